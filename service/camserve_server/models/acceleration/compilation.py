"""`torch.compile` for the part of a model up to its default layer, on request (`?compile=true`).

Nothing observes the modules that finish before that layer, so they can be compiled. The largest modules there are
compiled, each as one graph. Hooks on the layer stay outside the graph, even if the layer itself is compiled. Modules
after the layer are not compiled, because gradients are computed there.

A model is compiled only while it is loaded, for one row and for any larger number of rows. If compiled code does not
fit a batch, or a module cannot be compiled, the module runs as before.

Measured, processor time of a Grad-CAM without the compiler divided by that with it, one thread, batches 8 and 1:
mobilenet_v3_large 1.19 and 1.16 in bfloat16, 1.05 and 1.06 in float32; resnet50 1.07 and 1.03, convnext_tiny 1.05 and
1.05 in bfloat16. In float32 these two gain nothing (a batch of convnext_tiny took 1.9 times as long), and vit_b_16 in
bfloat16 was ten times slower at batch 8. So the compiled code is timed against the oneDNN calls, and discarded if it is
slower. Compiling took 60 s of processor time for mobilenet_v3_small and 157 s for swin_t.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
import torch.overrides
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.devices import device_for
from camserve_server.models.acceleration.onednn import OneDNNPatch
from camserve_server.models.acceleration.trial import output_error
from camserve_server.models.hooks import output_of

BATCH_SIZES = (1, 3, 2, 8)
"""Sizes of the batches that run while compiling: one row, several, and two more for code that those did not cover.

Code for a batch of unknown size is as fast as code for one size, and takes two compilations instead of one per size.
"""

ROUNDS = 5
"""Timing rounds; each runs a batch with the compiled code and without it."""

MAX_TIME_RATIO = 1.05
"""Largest allowed time of a batch, relative to the time without compiled code: timings are no more exact than that."""

_OPTIONS: dict[str, Any] = {
    # The modules belong to a copy that never changes. Guards would check all their parameters before each call.
    "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    # Use as many cores as the running batch has, not as many as there were at compile time: two batches that run at
    # once on half of the cores each had four threads on two cores.
    "cpp.dynamic_threads": True,
}


class CompiledModule:
    """A module whose forward is compiled.

    Args:
        name: the name of the module.
        module: the frozen module; it belongs to the caller alone.

    Attributes:
        name: the name of the module.
        failure: the reason why it cannot be compiled; empty if it can.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.failure = name, ""
        self._module, self._plain, self._function = module, module.forward, _with_own_code(module.forward)
        options = dict(_OPTIONS)  # torch.compile removes the filter of guards from the dictionary that it gets
        self._compiling: Callable[..., Any] = torch.compile(self._function, fullgraph=True, options=options)
        module.forward = self._compile_and_run

    def _compile_and_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, after compiling it for such arguments if needed; run it uncompiled if that fails."""
        tensors = [part for part in pytree.tree_leaves((args, kwargs)) if isinstance(part, Tensor) and part.dim()]
        for tensor in tensors:
            if len(tensor) == len(tensors[0]) > 1:
                torch._dynamo.mark_dynamic(tensor, 0)  # noqa: SLF001 -- torch documents it by this name
        if not self.failure:
            try:
                return self._compiling(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- the compiler may raise anything; the module itself can run
                self.failure = _summary(error)
                self.disable()
        return self._plain(*args, **kwargs)

    def enable(self) -> None:
        """Run the existing compiled code from now on, and compile nothing more."""
        if self.failure:
            return
        compiled = torch._dynamo.run(self._function)  # noqa: SLF001 -- torch documents it by this name

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad(), _without_mode():  # as at compile time; nothing is differentiated here
                return compiled(*args, **kwargs)

        self._module.forward = forward

    def disable(self) -> None:
        """Restore the module's own forward."""
        self._module.forward = self._plain


def _without_mode() -> AbstractContextManager[object]:
    """Leave the torch function mode of the pass, if it has one: compiled code does not run under a mode.

    A pass that differentiates twice sets a mode that computes attention step by step.
    """
    if torch._C._len_torch_function_stack():  # noqa: SLF001 -- torch has no public name for it
        return torch.overrides._pop_mode_temporarily()  # noqa: SLF001 -- the same
    return nullcontext()


@dataclass(frozen=True, slots=True)
class CompilationResult:
    """The result of compiling a model.

    Attributes:
        modules: the names of the compiled modules.
        failures: by the name of a module that cannot be compiled, the reason.
        reason: the reason why nothing is compiled; empty if something is.
        seconds: the time that compiling took.
        time_ratio: the time of the largest batch with the compiled code, divided by the time without it; 1 if it was
            not measured.
    """

    modules: tuple[str, ...]
    failures: dict[str, str]
    reason: str
    seconds: float
    time_ratio: float


def compile_before_layer(
    module: nn.Module, layer: str, batches: Sequence[Tensor], tolerance: float, patch: OneDNNPatch
) -> CompilationResult:
    """Compile a layer and what finishes before it, in place, if the output stays the same and it is not slower.

    Args:
        module: the frozen module, in evaluation mode; it belongs to the caller alone.
        layer: the name of the layer, which the module calls once.
        batches: inputs [B,3,H,W], one for each of `BATCH_SIZES`.
        tolerance: the largest distance of the layer's output from its previous one, as a share of its norm.
        patch: the oneDNN calls that run if nothing is compiled.
    """
    # torch's compiler cannot trace these calls, and its own graph calls the same functions.
    patch.disable()
    start, modules, ratio = time.monotonic(), list[CompiledModule](), 1.0
    try:
        with torch.no_grad():
            reason = _compile(modules, module, layer, batches, tolerance)
            ratio = 1.0 if reason else _time_ratio(module, modules, batches[-1], patch)
    except Exception as error:  # noqa: BLE001 -- a user's model may raise anything, for example if it takes one image at a time
        reason = _summary(error)
    if ratio > MAX_TIME_RATIO:
        reason = f"it would be slower: a batch takes {ratio:.2f} times as long"
    if reason:
        _call_each(modules, CompiledModule.disable)
        patch.enable()
    failures = {compiled.name: compiled.failure for compiled in modules if compiled.failure}
    names = () if reason else tuple(compiled.name for compiled in modules if not compiled.failure)
    return CompilationResult(names, failures, reason, time.monotonic() - start, ratio)


def _compile(
    modules: list[CompiledModule], module: nn.Module, layer: str, batches: Sequence[Tensor], tolerance: float
) -> str:
    """Compile modules and add them to a list; return the reason why they cannot be used, or an empty string."""
    expected = [output_of(module, layer, images) for images in batches]
    modules += [
        CompiledModule(name, module.get_submodule(name)) for name in _names_to_compile(module, layer, batches[0])
    ]
    for images in batches:
        module(images.clone())
    if all(compiled.failure for compiled in modules):
        return "no module can be compiled"
    _call_each(modules, CompiledModule.enable)
    pairs = zip(batches, expected, strict=True)
    errors = [output_error(output_of(module, layer, images), output, tolerance) for images, output in pairs]
    return next(filter(None, errors), "")


def _call_each(modules: Sequence[CompiledModule], method: Callable[[CompiledModule], None]) -> None:
    for compiled in modules:
        method(compiled)


def _time_ratio(module: nn.Module, modules: Sequence[CompiledModule], images: Tensor, patch: OneDNNPatch) -> float:
    """Return the time of a batch with compiled code, divided by its time without."""
    plain, compiled = list[float](), list[float]()
    for _ in range(ROUNDS):  # alternating, so that other load on the machine slows both
        _call_each(modules, CompiledModule.disable)
        patch.enable()
        plain.append(_seconds(module, images))
        patch.disable()
        _call_each(modules, CompiledModule.enable)
        compiled.append(_seconds(module, images))
    return min(compiled) / min(plain)


def _seconds(module: nn.Module, images: Tensor) -> float:
    start = time.perf_counter()
    module(images.clone())
    device_for(images.device).synchronize()
    return time.perf_counter() - start


def _names_to_compile(module: nn.Module, layer: str, image: Tensor) -> list[str]:
    """Return the largest modules that finish before a layer, or with it, and are called once, if it is worth it."""
    finished: list[str] = []
    with ExitStack() as stack:
        for name, child in module.named_modules():
            hook = child.register_forward_hook(lambda _module, _args, _output, name=name: finished.append(name))
            stack.enter_context(hook)
        module(image.clone())
    calls = Counter(finished)
    before = [name for name in finished[: finished.index(layer) + 1] if calls[name] == 1]
    largest = [name for name in before if not any(name.startswith(f"{other}.") for other in before)]
    return [name for name in largest if _is_worth_compiling(module.get_submodule(name))]


def _is_worth_compiling(module: nn.Module) -> bool:
    """Return whether a module has several operations to fuse: a single module of torch's own is one call already."""
    single = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    return any(True for _ in module.parameters()) and not single


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in one with a code object of its own, because torch looks up compiled code by code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own = cast("FunctionType", call)
    return FunctionType(own.__code__.replace(), own.__globals__, own.__name__, None, own.__closure__)


def _summary(error: Exception) -> str:
    """Summarise the error of a compiler, or of a model, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "error:" in line] or [line for line in lines if not line.endswith(":")] or [""]
    return f"{type(error).__name__}: {causes[0]}"
