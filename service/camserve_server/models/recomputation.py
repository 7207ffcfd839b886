"""No activation checkpointing while a model of ours runs.

`torch.utils.checkpoint` runs parts of a network again during the backward pass, to save memory in a training. Hooks
cannot tell these calls from those of the forward pass, and in the reentrant variant the first call has no graph. Both
variants compute what the network computes without them, so our threads call the function alone. Networks take
`checkpoint` from torch by name, and switch it on in ways of their own, so it is what `checkpoint` itself calls that is
replaced, while a block runs.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.utils import checkpoint

_REENTRANT = "CheckpointFunction"
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""What `checkpoint` calls without reentrance, by torch's version: a generator around the call of the function."""


def switch_off(module: nn.Module) -> None:
    """Switch activation checkpointing off in a network of timm or transformers, or one with such parts.

    A network of timm otherwise calls the blocks of a stage one by one, so that the stage itself is no layer that runs.
    """
    for part in module.modules():
        for name, arguments in (("set_grad_checkpointing", (False,)), ("gradient_checkpointing_disable", ())):
            if callable(method := getattr(part, name, None)):
                with suppress(Exception):  # a user's module may raise anything
                    method(*arguments)


class _Switch:
    """Replaces what `checkpoint` calls while a block runs in any thread; only the threads of blocks notice it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._thread = threading.local()
        self._originals: dict[str, Any] = {}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Call checkpointed functions only once inside the block, in this thread."""
        outer = self._is_disabled()
        self._enter()
        self._thread.is_disabled = True
        try:
            yield
        finally:
            self._thread.is_disabled = outer
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                names = (_REENTRANT, *_GENERATORS)
                self._originals = {name: vars(checkpoint)[name] for name in names if hasattr(checkpoint, name)}
                for name, original in self._originals.items():
                    make = self._reentrant if name == _REENTRANT else self._generator
                    setattr(checkpoint, name, make(original))

    def _leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                for name, original in self._originals.items():
                    setattr(checkpoint, name, original)

    def _reentrant(self, original: Any) -> SimpleNamespace:
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:  # noqa: FBT001 -- torch's signature
            return function(*args) if self._is_disabled() else original.apply(function, preserve, *args)

        return SimpleNamespace(apply=apply)

    def _generator(self, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def generate(*args: Any, **kwargs: Any) -> Iterator[None]:
            return _around_nothing() if self._is_disabled() else original(*args, **kwargs)

        return generate

    def _is_disabled(self) -> bool:
        return getattr(self._thread, "is_disabled", False)


def _around_nothing() -> Iterator[None]:
    yield


disabled = _Switch().disabled
"""Context manager without activation checkpointing in the thread that enters it."""
