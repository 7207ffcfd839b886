"""Run a model on an image, and keep the output of each module and the gradient there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from camserve_server.core.errors import ConfigError
from camserve_server.models import faults, stem
from camserve_server.models.hooks import changes_in_place, first_tensor
from camserve_server.models.tasks import Trial

RGB = 3  # channels

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a model on an image.

    Attributes:
        image: the image [1,C,H,W], a leaf of the graph.
        scores: scores [1,n] that together depend on the whole output, on the graph.
        output: the first tensor of the output.
        calls: the first tensor that each module returned, on the graph, one for each call, in the order in which the
            last calls end.
        intact: the last tensor of each module, if no later module has changed it in place.
    """

    image: Tensor
    scores: Tensor
    output: Tensor | None
    calls: dict[str, list[Tensor | None]]
    intact: dict[str, Tensor | None]

    @property
    def last(self) -> dict[str, Tensor | None]:
        """The last tensor that each module returned."""
        return {name: outputs[-1] for name, outputs in self.calls.items()}

    def gradients(self, *, image: bool = True) -> dict[str, Tensor | None]:
        """Return the gradient of a random mixture of all scores at each module's output, and at the image as ""."""
        outputs = {**self.last, "": self.image} if image else self.last
        differentiable = {name: out for name, out in outputs.items() if out is not None and out.requires_grad}
        if not self.scores.requires_grad:
            return dict.fromkeys(outputs)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(self.scores.shape, generator=generator, dtype=torch.float32).to(self.scores)
        mixture = (self.scores * weights).sum()
        gradients = torch.autograd.grad(mixture, list(differentiable.values()), allow_unused=True)
        return dict.fromkeys(outputs) | dict(zip(differentiable, gradients, strict=True))


def first_run(model: nn.Module, image: Tensor, trial: Trial, size: tuple[int, int]) -> _Run:
    """Run a model for gradients; if it fails, without: it may convert tensors to arrays, which have none."""
    try:
        return _run(model, image, trial, size)
    except ConfigError:
        with suppress(ConfigError):
            return _run(model, image, trial, size, graph=False)
        raise


def find_gradients(
    model: nn.Module, run: _Run, image: Tensor, trial: Trial, size: tuple[int, int]
) -> tuple[_Run, dict[str, Tensor | None]]:
    """Return the gradients of a run's scores at each module's output, and the run.

    They may all be zero for one image, as those of a network that ends in a ReLU. Then other images are tried. Without
    a gradient at the input, there may be one at later modules, whose outputs are then made the start of the graph.
    """
    try:
        gradients = run.gradients()
    except RuntimeError:  # of a change in place between the image and the layers: there is a gradient at the layers
        run = _run(model, image, trial, size)
        gradients = run.gradients(image=False)
        return run, {**gradients, "": torch.ones(1)}
    if gradients[""] is None:
        with suppress(ConfigError):
            gradients = _run(model, image, trial, size, cut=True).gradients()
        return run, gradients
    for other in () if reaches_image(gradients) else _other_images(image):
        other_run = _run(model, other, trial, size)
        found = other_run.gradients()
        if reaches_image(found):
            return other_run, found
    return run, gradients


def _other_images(image: Tensor) -> Iterator[Tensor]:
    """Yield images of other brightness and contrast."""
    for contrast, brightness in ((0.25, 2.0), (0.25, -2.0), (1.0, 1.0), (1.0, -1.0), (4.0, 0.0), (0.0, 0.5)):
        yield contrast * image + brightness


def reaches_image(gradients: Mapping[str, Tensor | None]) -> bool:
    """Return whether the gradient at the image has a value other than zero."""
    return gradients[""] is not None and bool(gradients[""].any())


@contextmanager
def record_outputs(
    model: nn.Module, observe: Callable[[str, Any, Any], tuple[Any, Any]]
) -> Iterator[dict[str, list[Any]]]:
    """Record an observation of each module call.

    Args:
        model: the model.
        observe: receives the module's name, and the arguments and the output of a call; returns the observation, and
            the output with which the model continues.

    Yields:
        The observations by module name, one per call, in the order in which the last calls end.
    """
    calls: dict[str, list[Any]] = {}

    def make_hook(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, output: Any) -> Any:
            observation, output = observe(name, args, output)
            calls[name] = [*calls.pop(name, []), observation]
            return output

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(make_hook(name)))
        yield calls


def _own_tensor(args: Any, output: Any) -> tuple[Tensor | None, Any]:
    """Replace the first tensor of an output by a copy, if other modules may use the same tensor.

    The gradient at the copy belongs to this module alone. A module that returns its input would otherwise share the
    gradient of everything else that uses the input. A module that returns several tensors may have computed the others
    from the first, and the model may use only those. The score then does not depend on the captured first tensor.
    """
    first = first_tensor(output)
    parts, structure = pytree.tree_flatten(output)
    several = sum(isinstance(part, Tensor) for part in parts) > 1
    if first is None or not (several or any(first is part for part in pytree.tree_leaves(args))):
        return first, output
    own = first.clone()
    changed = [own if part is first else part for part in parts]
    return own, pytree.tree_unflatten(changed, structure)


def _run(
    model: nn.Module, image: Tensor, trial: Trial, size: tuple[int, int], *, graph: bool = True, cut: bool = False
) -> _Run:
    """Run a model on an image.

    Args:
        model: the model.
        image: the image [1,C,H,W].
        trial: makes the scores of the output.
        size: height and width of the image.
        graph: False to record no graph.
        cut: True to start the graph at the modules' outputs instead of the image.

    Raises:
        ConfigError: the model does not run, or its output does not fit its task.
    """
    versions: dict[str, int] = {}

    def keep(name: str, args: Any, output: Any) -> tuple[Tensor | None, Any]:
        first, output = _start_of_graph(output) if cut else _own_tensor(args, output)
        versions[name] = changes_in_place(first)
        return first, output

    image = image.clone().requires_grad_(graph and not cut)
    with torch.set_grad_enabled(graph), record_outputs(model, keep) as calls:
        output = _output(model, image)
        scores = trial.scores(model, output, size)
    last = {name: outputs[-1] for name, outputs in calls.items()}
    intact = {name: each for name, each in last.items() if changes_in_place(each) == versions[name]}
    return _Run(image, scores, first_tensor(output), calls, intact)


def _start_of_graph(output: Any) -> tuple[Tensor | None, Any]:
    """Make the first tensor of an output the start of a graph, if it is on none and gradients are recorded."""
    first = first_tensor(output)
    if first is None or first.requires_grad or not torch.is_grad_enabled():
        return first, output
    own = first.detach().clone().requires_grad_()
    parts, structure = pytree.tree_flatten(output)
    return own, pytree.tree_unflatten([own if part is first else part for part in parts], structure)


def _output(model: nn.Module, image: Tensor) -> Any:
    try:
        return model(image.clone())  # a model may change its input in place, but cannot change a leaf
    except Exception as error:
        size, channels = "x".join(map(str, image.shape[2:])), image.shape[1]
        kind = "pixels" if channels == RGB else f"pixels with {channels} channel{'s' * (channels > 1)}"
        hint = _hint(model, channels)
        place = faults.place_of(error, model)
        words = f"it does not run on an image of {size} {kind}: {faults.message_of(error)}"
        raise ConfigError(words + (f", in {place}" if place else "") + hint) from error


def _hint(model: nn.Module, channels: int) -> str:
    """Return what may be missing in the description of a model that does not run."""
    parameters = signature(model.forward).parameters
    if "input_ids" in parameters:
        return "; it takes texts, too: name its saved folder as hf:FOLDER, or give its part for texts as text="
    if any(isinstance(part, nn.Conv3d) for part in model.modules()):
        return "; it takes videos or volumes: camserve_server.models.tiled gives it the tiles of one picture"
    needed = [each.name for each in parameters.values() if each.kind in _POSITIONAL and each.default is each.empty]
    if len(needed) > 1:
        return (
            f"; its forward needs {', '.join(needed[1:])} besides the image: wrap it in a module that passes it on, or "
            "with camserve_server.models.tiled if these are pictures"
        )
    first = stem.channels_of(model)
    if first in (0, channels):
        return ""
    return f"; its first convolution takes {first} channels: give mean and std a number for each"
