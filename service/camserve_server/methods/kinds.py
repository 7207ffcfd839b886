"""The kinds of method, named by the compute they share: a method is a frozen value made of pure functions.

A function's docstring is its method's documentation: the first line says what it does, the rest gives the formula.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from camserve_server.core.arrays import Map
from camserve_server.imaging.values import View
from camserve_server.methods.values import Edit, Fusion, ParameterValue
from camserve_server.models.values import Kind

Parameters: TypeAlias = Mapping[str, ParameterValue]

Array: TypeAlias = NDArray[np.float32]

RowsOf: TypeAlias = Callable[[str], int]
"""Name of a method -> the rows that it costs for one target, run by itself."""

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


class MethodKind:
    """The properties and functions that every kind of method has; a kind overrides those in which it differs.

    Attributes:
        kind: the family of methods that it belongs to, as callers see it.
        edits_image: whether the rows of a method have edits or windows of the image, made before they are submitted.
    """

    __slots__ = ()

    kind: ClassVar[Literal["cam", "saliency", "perturbation", "attention", "composite", "baseline"]]
    edits_image: ClassVar[bool] = False

    @property
    def layered(self) -> bool:
        """Whether it makes a map of a layer."""
        return False

    @property
    def smooths(self) -> bool:
        """Whether it can take the first principal component of the channels' terms instead of their sum."""
        return False

    @property
    def squares(self) -> bool:
        """Whether it needs the mean of the squared terms of its copies, too."""
        return False

    @property
    def decomposes(self) -> bool:
        """Whether it decomposes a matrix, which takes up to half a second for each map."""
        return False

    @property
    def copy(self) -> Copy:
        """The function that makes one copy of the image."""
        return itself

    @property
    def needs(self) -> str:
        """What it needs of a model, or of the installation, in words; empty for nothing."""
        return ""

    @property
    def pass_kind(self) -> Kind:
        """The kind of pass that computes its rows."""
        return "score"

    @property
    def answered_by(self) -> Kind | None:
        """The kind of pass that answers it by one row of the unchanged image, which other methods can share."""
        return None

    @property
    def needs_features(self) -> bool:
        """Whether it starts, or ends, with the feature maps that layers have for the unchanged image."""
        return False

    def rows(self, parameters: Parameters, channels: Sequence[int], size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return how many rows it costs for one target, beside the one of the unchanged image.

        Args:
            parameters: by name.
            channels: of each layer.
            size: height and width of the model's input.
            rows_of: the cost of another method, for methods made of others.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cam(MethodKind):
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

    kind = "cam"
    layered = True

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.weigh

    @property
    def pass_kind(self) -> Kind:
        """The pass over layers, or the one that differentiates twice."""
        return "curvature" if self.curvature else "cam"

    @property
    def answered_by(self) -> Kind | None:
        """The pass over layers, for a method without copies or curvature."""
        return None if self.curvature or self.copy is not itself else "cam"

    @property
    def needs_features(self) -> bool:
        """Whether it makes copies: `finish` then gets the image's own feature maps."""
        return self.copy is not itself

    def rows(self, parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return how many rows it costs: one for each copy."""
        return self.count(**parameters)


@dataclass(frozen=True, slots=True)
class Saliency(MethodKind):
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

    kind = "saliency"

    def __post_init__(self) -> None:
        if self.about is as_it_is:
            object.__setattr__(self, "about", self.finish if self.copy is itself else self.copy)

    @property
    def needs(self) -> str:
        """What it needs of a model."""
        return "" if self.rule == "saliency" else "ReLU"

    @property
    def pass_kind(self) -> Kind:
        """The pass down to the input, by its rule for each ReLU."""
        return self.rule

    @property
    def answered_by(self) -> Kind | None:
        """The pass down to the input by the chain rule, for a method without copies."""
        return "saliency" if self.rule == "saliency" and self.copy is itself else None

    def rows(self, parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return how many rows it costs: one for each copy."""
        return self.count(**parameters)


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
class Perturbation(MethodKind):
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

    kind = "perturbation"
    edits_image = True

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.explore

    @property
    def needs_features(self) -> bool:
        """Whether it starts from a layer's feature maps."""
        return self.layered

    def rows(self, parameters: Parameters, channels: Sequence[int], size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return how many rows it costs: one for each edit, on every layer if it looks at layers."""
        if self.layered:
            return sum(self.count(channels=layer, **parameters) for layer in channels)
        return self.count(height=size[0], width=size[1], **parameters)


Combine: TypeAlias = Callable[..., Tensor]
"""Attention of each block [L,B,heads,N,N], the score's gradients there, the number of prefix tokens, parameters by name
-> what each token adds [B,N]."""


@dataclass(frozen=True, slots=True)
class Attention(MethodKind):
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

    kind = "attention"
    needs = "attention between all of an image's patches"

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.combine

    @property
    def pass_kind(self) -> Kind:
        """The pass over the attention of every block."""
        return "each" if self.each else "attention"

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return how many rows it costs: one."""
        return 1


@dataclass(frozen=True, slots=True)
class FullGradient(MethodKind):
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

    kind = "saliency"
    needs = "biases"

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.spread

    @property
    def pass_kind(self) -> Kind:
        """The pass over biases."""
        return "bias"

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return how many rows it costs: one."""
        return 1


@dataclass(frozen=True, slots=True)
class Product(MethodKind):
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

    kind = "composite"
    parameters = ()
    layered = True

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return how many rows it costs: those of both methods."""
        return rows_of(self.pixels) + rows_of(self.layer)


@dataclass(frozen=True, slots=True)
class Fused(MethodKind):
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

    kind = "composite"
    parameters = ()
    layered = True

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return how many rows it costs: those of its method."""
        return rows_of(self.of)


@dataclass(frozen=True, slots=True)
class Windows(MethodKind):
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

    kind = "composite"
    edits_image = True
    layered = True

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.merge

    def rows(self, parameters: Parameters, _channels: Sequence[int], size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return how many rows it costs: those of its method for every window."""
        return len(self.views(height=size[0], width=size[1], **parameters)) * rows_of(self.of)


@dataclass(frozen=True, slots=True)
class Baseline(MethodKind):
    """A map that no model has a part in: what an explanation must be better than.

    Attributes:
        draw: normalised image, float32 [3,H,W], parameters by name -> map [h,w].
        paper: that proposes it.
        parameters: that it takes.
    """

    draw: Callable[..., Map]
    paper: str
    parameters: tuple[Parameter, ...] = ()

    kind = "baseline"

    @property
    def about(self) -> Callable[..., object]:
        """The function whose docstring is the method's."""
        return self.draw

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return how many rows it costs: none."""
        return 0


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
