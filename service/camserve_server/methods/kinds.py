"""The kinds of method, named by the compute they share: a method is a frozen value made of pure functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from camserve_server.types import ParameterValue

Parameters: TypeAlias = Mapping[str, ParameterValue]

Weigh: TypeAlias = Callable[..., Tensor]
"""Activations [B,C,h,w], gradients [B,C,h,w], scores [B], parameters by name -> signed maps [B,h,w]."""

Copy: TypeAlias = Callable[[Tensor, int, Parameters], Tensor]
"""Normalised image [3,H,W], index of the copy, parameters -> the copy [3,H,W]."""

Count: TypeAlias = Callable[[Parameters], int]
"""Parameters -> how many copies of the image the method needs."""

Term: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Copies [B,3,H,W], gradients of the score there [B,3,H,W] -> what each adds to the mean [B,3,H,W]."""

Finish: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Normalised image [3,H,W], mean of the terms [3,H,W] -> map [H,W]."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a method takes.

    Attributes:
        name: in requests.
        summary: what it does, in a sentence.
        default: used where it is left out.
        minimum: smallest value allowed.
        maximum: largest value allowed.
        integer: whether it must be whole.
    """

    name: str
    summary: str
    default: float
    minimum: float
    maximum: float
    integer: bool = False


@dataclass(frozen=True, slots=True)
class Cam:
    """A map from one layer's feature maps and their gradients: one forward, one backward down to the layer.

    Attributes:
        weigh: the method's formula.
        paper: that defines it.
        parameters: that it takes.
    """

    weigh: Weigh
    paper: str
    parameters: tuple[Parameter, ...] = ()

    @property
    def summary(self) -> str:
        """What it does, in a sentence: its formula's own."""
        return first_line(self.weigh)


def one(_parameters: Parameters) -> int:
    """Need one copy of the image."""
    return 1


def itself(image: Tensor, _index: int, _parameters: Parameters) -> Tensor:
    """Take the image [3,H,W] as it is."""
    return image


def gradient(_copies: Tensor, gradients: Tensor) -> Tensor:
    """Add up the gradients [B,3,H,W] as they are."""
    return gradients


@dataclass(frozen=True, slots=True)
class Saliency:
    """A map from the score's gradient at the input: the mean, over copies of the image, of a term of it.

    Attributes:
        finish: from the mean to the map; its docstring is the method's.
        paper: that defines it.
        copy: makes one copy of the image.
        count: how many copies it takes.
        term: what one copy adds to the mean.
        parameters: that it takes.
    """

    finish: Finish
    paper: str
    copy: Copy = itself
    count: Count = one
    term: Term = gradient
    parameters: tuple[Parameter, ...] = ()

    @property
    def summary(self) -> str:
        """What it does, in a sentence: its copies' if it makes any, else its last step's."""
        return first_line(self.finish if self.copy is itself else self.copy)


Method: TypeAlias = Cam | Saliency


def first_line(function: Callable[..., object]) -> str:
    """Return the first line of a function's docstring, without its full stop."""
    return (function.__doc__ or "").strip().split("\n")[0].rstrip(".")
