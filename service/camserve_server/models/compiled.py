"""The way up to a model's default layer, compiled.

Nobody looks into what finishes before that layer does, so it may become code of its own: the largest modules there are
compiled, each as one graph. Hooks on the layer hang outside of it, even where it is compiled itself. What follows the
layer, where gradients are, stays as it is.

That happens while the model is loaded, for one row and for any larger number, and never after: where compiled code does
not fit a batch, or could not be made, the module runs as it would have.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
import torch.overrides
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows

from camserve_server.devices import device_of
from camserve_server.hooks import output_of
from camserve_server.models.onednn import Direct

ROWS = (1, 3, 2, 8)
"""Of the batches that are run while compiling: for one row, for several, and for what that did not cover."""

ROUNDS = 5
"""In which a batch is timed with what is compiled and without it."""

SLOWER = 1.05
"""How many times as long a batch may take: a busy machine does not measure better than that."""

_OPTIONS: dict[str, Any] = {
    # The modules are of a copy that nobody changes; to look at all their parameters first would take its time.
    "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    # On as many cores as the batch that runs has, and not on as many as there were when it was compiled.
    "cpp.dynamic_threads": True,
}


class Part:
    """A module whose forward is compiled.

    Args:
        name: of the module.
        module: frozen, and nobody else's.

    Attributes:
        name: of the module.
        failure: why it cannot be compiled, or nothing.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.failure = name, ""
        self._module, self._plain, self._alone = module, module.forward, _alone(module.forward)
        self._compiling: Callable[..., Any] = torch.compile(self._alone, fullgraph=True, options=_OPTIONS)
        module.forward = self._attempt

    def _attempt(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, compiled for such arguments first where it has not been; or else as it is."""
        tensors = [part for part in pytree.tree_leaves((args, kwargs)) if isinstance(part, Tensor) and part.dim()]
        for tensor in tensors:
            if len(tensor) == len(tensors[0]) > 1:
                torch._dynamo.mark_dynamic(tensor, 0)  # noqa: SLF001 -- torch documents it by this name
        if not self.failure:
            try:
                return self._compiling(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- whatever a compiler says: the module itself can do it
                self.failure = _reason(error)
                self.undo()
        return self._plain(*args, **kwargs)

    def settle(self) -> None:
        """Run what is compiled of the module from now on, and compile nothing; or else run it as it is."""
        if self.failure:
            return
        known = torch._dynamo.run(self._alone)  # noqa: SLF001 -- torch documents it by this name

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad(), _without_mode():  # as when it was compiled; nothing here is differentiated
                return known(*args, **kwargs)

        self._module.forward = forward

    def undo(self) -> None:
        """Give the module its own forward back."""
        self._module.forward = self._plain


def _without_mode() -> AbstractContextManager[object]:
    """Leave the torch function mode that a pass may have set, because compiled code does not run under a mode."""
    if torch._C._len_torch_function_stack():  # noqa: SLF001 -- torch has no public name for it
        return torch.overrides._pop_mode_temporarily()  # noqa: SLF001 -- the same
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Compilation:
    """What came of compiling a model.

    Attributes:
        parts: names of the modules that are compiled.
        failed: why others cannot be, by their names.
        reason: why none is, or nothing.
        seconds: that it took.
        share: of the time that the largest batch took before, what it takes now; 1 where that was not measured.
    """

    parts: tuple[str, ...]
    failed: dict[str, str]
    reason: str
    seconds: float
    share: float


def compiled(module: nn.Module, layer: str, batches: Sequence[Tensor], apart: float, otherwise: Direct) -> Compilation:
    """Compile what finishes before a layer does, and the layer, in place, where that changes nothing and pays.

    Args:
        module: frozen, in evaluation mode, and nobody else's.
        layer: that it calls once.
        batches: inputs [B,3,H,W], with a B of each of `ROWS`.
        apart: how far the layer's output may be from what it was, as a share of its norm.
        otherwise: what oneDNN is asked for directly where nothing is compiled.
    """
    otherwise.off()  # neither can torch's compiler look into that, nor would it be any better
    began, parts, share = time.monotonic(), list[Part](), 1.0
    try:
        with torch.no_grad():
            reason = _tried(parts, module, layer, batches, apart)
            share = 1.0 if reason else _share(module, parts, batches[-1], otherwise)
    except Exception as error:  # noqa: BLE001 -- as a model that takes one image at a time
        reason = _reason(error)
    if share > SLOWER:
        reason = f"it would be slower, a batch taking {share:.2f} times as long"
    if reason:
        _all(parts, Part.undo)
        otherwise.on()
    failed = {part.name: part.failure for part in parts if part.failure}
    done = () if reason else tuple(part.name for part in parts if not part.failure)
    return Compilation(done, failed, reason, time.monotonic() - began, share)


def _tried(parts: list[Part], module: nn.Module, layer: str, batches: Sequence[Tensor], apart: float) -> str:
    """Compile what can be, adding it to the parts; return what is against using it, or nothing."""
    expected = [output_of(module, layer, images) for images in batches]
    parts += [Part(name, module.get_submodule(name)) for name in _names(module, layer, batches[0])]
    for images in batches:
        module(images.clone())
    if all(part.failure for part in parts):
        return "there is nothing that can be"
    _all(parts, Part.settle)
    far = [too_far(output_of(module, layer, images), one, apart) for images, one in zip(batches, expected, strict=True)]
    return next(filter(None, far), "")


def too_far(found: Tensor, expected: Tensor, apart: float) -> str:
    """Say so where the default layer's output is further from what it should be than a share of its norm."""
    distance = float((found - expected).norm() / expected.norm())
    return "" if distance <= apart else f"its default layer would be off by {distance:.3g} of its norm"  # or by NaN


def _all(parts: Sequence[Part], turn: Callable[[Part], None]) -> None:
    for part in parts:
        turn(part)


def _share(module: nn.Module, parts: Sequence[Part], images: Tensor, otherwise: Direct) -> float:
    """Return how long a batch takes, as a share of what it takes without a compiler."""
    plain, now = list[float](), list[float]()
    for _ in range(ROUNDS):  # one after the other, so that what else the machine does slows both
        _all(parts, Part.undo)
        otherwise.on()
        plain.append(_seconds(module, images))
        otherwise.off()
        _all(parts, Part.settle)
        now.append(_seconds(module, images))
    return min(now) / min(plain)


def _seconds(module: nn.Module, images: Tensor) -> float:
    began = time.perf_counter()
    module(images.clone())
    device_of(images.device).synchronize()
    return time.perf_counter() - began


def missing(device: str) -> str:
    """Return why there is no hope of compiling for a device, or nothing.

    For a CPU torch compiles C++. For a GPU Triton compiles C: a Python module through which it talks to the driver.
    Both load the shared library that comes out. Triton has an assembler of its own, and needs no CUDA toolkit.
    """
    if sys.platform == "win32":
        return ""
    if device != "cpu":
        return _missing_of_triton() if device.startswith("cuda") else ""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    return _no_compiler("C++", [os.environ.get("CXX", usual)]) or _not_loadable(folder, "TORCHINDUCTOR_CACHE_DIR")


def _missing_of_triton() -> str:
    """Return what Triton lacks; each is looked for where Triton looks."""
    if not find_spec("triton"):
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 -- as Triton: it never fails
    return (
        _no_compiler("C", compilers)
        or ("" if headers.exists() else f"Python's headers are not installed: there is no {headers}")
        or _not_loadable(os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache", "TRITON_CACHE_DIR")
    )


def _no_compiler(language: str, names: Sequence[str]) -> str:
    if any(map(shutil.which, names)):
        return ""
    return f"there is no {language} compiler: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def _not_loadable(folder: str, variable: str) -> str:
    """Say so where a folder, or its nearest parent if it is still to be made, is mounted noexec."""
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if os.access(one, os.F_OK))
    if not os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0):  # Linux alone has the flag
        return ""
    return f"compiled code cannot be loaded from {path}, which is mounted noexec; {variable} names another folder"


def _names(module: nn.Module, layer: str, image: Tensor) -> list[str]:
    """Return the largest modules that finish before a layer does, or with it, and are called once."""
    ended: list[str] = []
    with ExitStack() as stack:
        for name, one in module.named_modules():
            hook = one.register_forward_hook(lambda _module, _args, _output, name=name: ended.append(name))
            stack.enter_context(hook)
        module(image.clone())
    calls = Counter(ended)
    before = [name for name in ended[: ended.index(layer) + 1] if calls[name] == 1]
    largest = [name for name in before if not any(name.startswith(f"{other}.") for other in before)]
    return [name for name in largest if _computes(module.get_submodule(name))]


def _computes(module: nn.Module) -> bool:
    """Tell whether there is something to join: of torch's own modules a single one is one function already."""
    single = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    return any(True for _ in module.parameters()) and not single


def _alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same as a function with code of its own: by that torch finds what it has compiled of it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own = cast("FunctionType", call)
    return FunctionType(own.__code__.replace(), own.__globals__, own.__name__, None, own.__closure__)


def _reason(error: Exception) -> str:
    """Say in a line what a compiler, or a model, complained about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "error:" in line] or [line for line in lines if not line.endswith(":")] or [""]
    return f"{type(error).__name__}: {told[0]}"
