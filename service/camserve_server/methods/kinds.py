"""The kinds of method, named by the compute they share: a method is a frozen value made of pure functions.

A function's docstring is its method's documentation: the first line says what it does, the rest gives the formula.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from camserve_server.types import Edit, Fusion, Map, ParameterValue, View

Parameters: TypeAlias = Mapping[str, ParameterValue]

Array: TypeAlias = NDArray[np.float32]

Weigh: TypeAlias = Callable[..., Tensor]
"""Activations [B,C,h,w], gradients [B,C,h,w], scores [B], parameters by name -> signed maps [B,h,w], or the terms of
each channel [B,C,h,w] whose sum the maps are."""

Copy: TypeAlias = Callable[..., Tensor]
"""Normalised image [3,H,W], index of the copy, parameters by name -> the copy [3,H,W]."""

Count: TypeAlias = Callable[..., int]
"""Parameters by name -> how many."""

Term: TypeAlias = Callable[..., Tensor]
"""Normalised image [3,H,W], a copy of it, the score's gradient there, index of the copy, parameters by name -> what it
adds to the mean, of any shape."""

Finish: TypeAlias = Callable[..., Tensor]
"""Mean of the terms, normalised image [3,H,W] (for a `Saliency` only), parameters by name (for a `Cam` that makes
copies also the image's own `features` [C,h,w]) -> map [h,w]."""

Explore: TypeAlias = Callable[..., Generator[Sequence[Edit], Array, Array]]
"""A scene, parameters by name -> a generator: it yields edits of the image, is sent the scores [n,T] that the edited
images have for each target, and returns the maps [T,h,w]."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a method lets its callers choose: a number in a range, or one of a few words.

    Attributes:
        name: in requests.
        summary: what it does, in a sentence.
        default: used where it is left out.
        minimum: smallest number allowed.
        maximum: largest number allowed.
        integer: whether it must be whole.
        choices: the words; none where it is a number.
    """

    name: str
    summary: str
    default: ParameterValue
    minimum: float = 0.0
    maximum: float = 0.0
    integer: bool = False
    choices: tuple[str, ...] = ()


def one(**_parameters: ParameterValue) -> int:
    """Need one."""
    return 1


def itself(image: Tensor, _index: int, **_parameters: ParameterValue) -> Tensor:
    """Take the image [3,H,W] as it is."""
    return image


def gradient(_image: Tensor, _copy: Tensor, gradient: Tensor, _index: int, **_parameters: ParameterValue) -> Tensor:
    """Add up the gradients [3,H,W] as they are."""
    return gradient


def as_it_is(mean: Tensor, **_parameters: ParameterValue) -> Tensor:
    """Take the mean [h,w] for the map."""
    return mean


@dataclass(frozen=True, slots=True)
class Cam:
    """A map from one layer's feature maps and their gradients: one forward, one backward down to the layer.

    Attributes:
        weigh: the method's formula.
        paper: that defines it.
        parameters: that it takes.
        copy: makes one copy of the image.
        count: how many copies it takes; what `weigh` makes of each is averaged.
        finish: from that mean to the map.
        curvature: whether `weigh` is given, as `curvature`, the Hessian of the score times the activations [B,C,h,w].
        smooths: whether `weigh` returns the terms of each channel, so that eigen smoothing can take their first
            principal component instead of their sum.
        decomposes: whether `weigh` decomposes a matrix, which takes up to half a second for each map.
    """

    weigh: Weigh
    paper: str
    parameters: tuple[Parameter, ...] = ()
    copy: Copy = itself
    count: Count = one
    finish: Finish = as_it_is
    curvature: bool = False
    smooths: bool = False
    decomposes: bool = False

    layered = True
    squares = False
    needs = ""

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.weigh


@dataclass(frozen=True, slots=True)
class Saliency:
    """A map from the score's gradient at the input: the mean, over copies of the image, of a term of it.

    Attributes:
        finish: from the mean to the map.
        paper: that defines it.
        copy: makes one copy of the image.
        count: how many copies it takes.
        term: what one copy adds to the mean.
        squares: whether `finish` also gets the mean of the squared terms; both means are in float64, stacked [2,...].
        parameters: that it takes.
        rule: how a ReLU passes a gradient on: as it is, or as guided backpropagation or a deconvnet has it.
        baseline: which of the copies is the baseline whose score, taken from the image's own, the map must add up to:
            `finish` gets the difference as `gained`. None where nothing of the kind is promised.
        about: the function whose docstring is the method's.
    """

    finish: Finish
    paper: str
    copy: Copy = itself
    count: Count = one
    term: Term = gradient
    squares: bool = False
    parameters: tuple[Parameter, ...] = ()
    rule: Literal["saliency", "guided", "deconvnet"] = "saliency"
    baseline: Count | None = None
    about: Callable[..., object] = as_it_is

    layered = False
    smooths = False

    def __post_init__(self) -> None:
        if self.about is as_it_is:
            object.__setattr__(self, "about", self.finish if self.copy is itself else self.copy)

    @property
    def needs(self) -> str:
        """What it needs of a model."""
        return "" if self.rule == "saliency" else "ReLU"


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """What a perturbation method starts from.

    Attributes:
        image: normalised, float32 [3,H,W].
        scores: of the image as it is, for each target, float32 [T].
        activations: the layer's feature maps, float32 [C,h,w]; for layered methods only.
    """

    image: Array
    scores: Array
    activations: Array | None = None


@dataclass(frozen=True, slots=True)
class Perturbation:
    """A map from the scores of edited images: forward passes only.

    Attributes:
        explore: says which edits to try, and makes the map of their scores.
        paper: that defines it.
        count: how many edits; it is told the input's `height` and `width`, or where it is layered the layer's
            `channels`, too.
        parameters: that it takes.
        layered: whether it starts from a layer's feature maps.
        needs: what else must be installed, in words.
    """

    explore: Explore
    paper: str
    count: Count
    parameters: tuple[Parameter, ...] = ()
    layered: bool = False
    needs: str = ""

    smooths = False

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.explore


Combine: TypeAlias = Callable[..., Tensor]
"""Attention of each block [L,B,heads,N,N], the score's gradients there, the number of prefix tokens, parameters by name
-> what each token adds [B,N]."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A map from the attention in every block of a transformer, and its gradients.

    Attributes:
        combine: the method's formula.
        paper: that defines it.
        parameters: that it takes.
        each: whether the gradient of a block is that of the score that the head gives to the block's own tokens, rather
            than of the score of the last.
    """

    combine: Combine
    paper: str
    parameters: tuple[Parameter, ...] = ()
    each: bool = False

    layered = False
    smooths = False
    needs = "attention between all of an image's patches"

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.combine


@dataclass(frozen=True, slots=True)
class FullGradient:
    """A map from the gradients at the input and at every bias of a model.

    Attributes:
        spread: one layer's terms [B,C,h,w], the input's `size`, parameters by name -> the maps [B,H,W] that are added
            up.
        paper: that defines it.
        parameters: that it takes.
    """

    spread: Callable[..., Tensor]
    paper: str
    parameters: tuple[Parameter, ...] = ()

    layered = False
    smooths = False
    needs = "biases"

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.spread


@dataclass(frozen=True, slots=True)
class Product:
    """A map of the input's pixels times a layer's, which is cut at zero and brought to the pixels bilinearly.

    Attributes:
        pixels: name of the method that looks at the input.
        layer: name of the method that looks at layers.
        paper: that defines it.
        about: the function whose docstring is the method's.
    """

    pixels: str
    layer: str
    paper: str
    about: Callable[..., object]

    parameters = ()
    layered = True
    smooths = False
    needs = ""


@dataclass(frozen=True, slots=True)
class Fused:
    """One method's maps on several layers, fused.

    Attributes:
        of: name of the method.
        how: they are fused.
        paper: that defines it.
        about: the function whose docstring is the method's.
    """

    of: str
    how: Fusion
    paper: str
    about: Callable[..., object]

    parameters = ()
    layered = True
    smooths = False
    needs = ""


@dataclass(frozen=True, slots=True)
class Windows:
    """One method's maps of many windows of the image, put together.

    Attributes:
        of: name of the method.
        views: parameters by name, and the input's `height` and `width` -> the windows, a list of `View`.
        merge: maps [n,h,w] of the windows, the target's probability in each [n], the windows, parameters by name,
            `height`, `width` -> map [H,W].
        paper: that defines it.
        parameters: that it takes.
    """

    of: str
    views: Callable[..., Sequence[View]]
    merge: Callable[..., Map]
    paper: str
    parameters: tuple[Parameter, ...] = ()

    layered = True
    smooths = False
    needs = ""

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.merge


@dataclass(frozen=True, slots=True)
class Baseline:
    """A map that no model has a part in: what an explanation must be better than.

    Attributes:
        draw: normalised image, float32 [3,H,W], parameters by name -> map [h,w].
        paper: that proposes it.
        parameters: that it takes.
    """

    draw: Callable[..., Map]
    paper: str
    parameters: tuple[Parameter, ...] = ()

    layered = False
    smooths = False
    needs = ""

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.draw


Method: TypeAlias = Cam | Saliency | Perturbation | Attention | FullGradient | Product | Fused | Windows | Baseline


class Documented(Protocol):
    """What has a function whose docstring is its documentation."""

    @property
    def about(self) -> Callable[..., object]:
        """That function."""


def summary(method: Documented) -> str:
    """Say what a method does, in a sentence: the first line of its function's docstring, without the full stop."""
    return (method.about.__doc__ or "").strip().split("\n")[0].rstrip(".")


def formula(method: Documented) -> str:
    """Give a method's formula: its function's docstring after the first line, up to the sections."""
    _, _, rest = (method.about.__doc__ or "").strip().partition("\n")
    lines = [line.strip() for line in rest.split("\n")]
    end = next((i for i, line in enumerate(lines) if line in ("Args:", "Returns:", "Raises:", "Yields:")), len(lines))
    return "\n".join(lines[:end]).strip()
