"""The camserve server: explain vision models over gRPC, or in this process.

with camserve_server.Explainer(network, size=224, labels=labels) as explainer:
    explainer.explain("cat.jpg").explanations[0].save("why.jpg")

with camserve_server.running() as address, camserve.Client(address) as client:
    client.explain("cat.jpg").explanations[0].save("why.jpg")
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from camserve_server.core.process import without_collection

if TYPE_CHECKING:
    from camserve_server.app.explainer import Explainer

__all__ = ["Explainer", "running"]


def __getattr__(name: str) -> Any:
    """Import `Explainer` on its first use: it needs the extra [server], and importing torch takes seconds."""
    if name != "Explainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with without_collection():
        from camserve_server.app.explainer import Explainer  # noqa: PLC0415 -- on its first use

    return Explainer


@contextmanager
def running(
    models: str | Sequence[str] | Mapping[str, Any] = ("efficientnet_lite0",), **settings: Any
) -> Iterator[str]:
    """Serve on a free port of this machine inside the block, for tests and notebooks.

    Args:
        models: models to load, as `[NAME=]SOURCE:ARCH[?option=value]`. Or a mapping from names to models: a spec
            without a name, a `torch.nn.Module`, or a `camserve_server.models.Source`, which has a module with its
            preprocessing and labels. A module is copied when the block starts and left unchanged: it may be in
            training mode, and may be trained further.
        settings: other settings of the server by name, such as `max_batch_rows=16`.

    Yields:
        The server's address, such as "127.0.0.1:41234".

    Raises:
        ConfigError: a setting or a model is invalid.

    Example:
        >>> import camserve, camserve_server
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> with camserve_server.running({"small": network}) as address, camserve.Client(address) as client:
        ...     result = client.explain("cat.jpg", model="small")
        >>> result.model, result.explanations[0].heatmap.shape
        ('small', (28, 28))
    """
    with without_collection():
        from camserve_server.app import server  # noqa: PLC0415 -- it needs the extra [server]
        from camserve_server.core import config  # noqa: PLC0415 -- it needs the extra [server]

    flags = {"address": "127.0.0.1:0", "isolation": "thread", **settings}
    if isinstance(models, Mapping):
        chosen = config.load(flags=flags, environment={})
        specs = server.specs_of(models)
    else:
        texts = (models,) if isinstance(models, str) else tuple(models)
        chosen, specs = config.load(flags={**flags, "models": texts}, environment={}), None
    with server.serve_in_thread(chosen, specs) as address:
        yield address
