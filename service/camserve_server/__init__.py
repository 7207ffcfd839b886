"""The camserve server: explanations of vision models over gRPC, or in this process.

with camserve_server.Explainer(network, size=224, labels=labels) as explainer:
    explainer.explain("cat.jpg").explanations[0].save("why.jpg")

with camserve_server.running() as address, camserve.Client(address) as client:
    client.explain("cat.jpg").explanations[0].save("why.jpg")
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from camserve_server.app.explainer import Explainer

__all__ = ["Explainer", "running"]


def __getattr__(name: str) -> Any:
    """Import `Explainer` when it is first used: it needs the extra [server], and torch takes seconds."""
    if name != "Explainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from camserve_server.app.explainer import Explainer  # noqa: PLC0415 -- only when it is used

    return Explainer


@contextmanager
def running(
    models: str | Sequence[str] | Mapping[str, Any] = ("efficientnet_lite0",), **settings: Any
) -> Iterator[str]:
    """Serve on a free port of this machine inside the block: for tests and notebooks.

    Args:
        models: to load, as `[NAME=]SOURCE:ARCH[?option=value]`. Or by name: a text without a name, a `torch.nn.Module`,
            or a `camserve_server.models.Source`, which has a module with its preprocessing and labels. A module is left
            as it is: it may be in training mode, and trained further afterwards. What is served has the weights that it
            had when the block began.
        settings: any other setting of the server by its name, such as `max_batch_rows=16`.

    Yields:
        The address, such as "127.0.0.1:41234".

    Raises:
        ConfigError: a setting or a model cannot be used.
    """
    from camserve_server.app import server  # noqa: PLC0415 -- they need the extra [server]; `import` does not
    from camserve_server.core import config  # noqa: PLC0415 -- they need the extra [server]; `import` does not

    flags = {"address": "127.0.0.1:0", "isolation": "thread", **settings}
    if isinstance(models, Mapping):
        chosen = config.load(flags=flags, environment={})
        specs = server.specs_of(models)
    else:
        named = (models,) if isinstance(models, str) else tuple(models)
        chosen, specs = config.load(flags={**flags, "models": named}, environment={}), None
    with server.serve_in_thread(chosen, specs) as address:
        yield address
