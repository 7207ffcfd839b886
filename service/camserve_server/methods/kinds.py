"""The kinds of method, named by the computation they share. A method is a frozen value made of pure functions.

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
from camserve_server.models.values import Kind, Task

Parameters: TypeAlias = Mapping[str, ParameterValue]

Array: TypeAlias = NDArray[np.float32]

RowsOf: TypeAlias = Callable[[str], int]
"""Name of a method -> the number of rows that it computes for one target when it runs alone."""

Weigh: TypeAlias = Callable[..., Tensor]
"""See `Cam.weigh`."""

Copy: TypeAlias = Callable[..., Tensor]
"""See `Cam.copy`."""

Count: TypeAlias = Callable[..., int]
"""Parameters by name -> a number of rows or copies."""

Term: TypeAlias = Callable[..., Tensor]
"""See `Saliency.term`."""

Finish: TypeAlias = Callable[..., Tensor]
"""See `Saliency.finish` and `Cam.finish`."""

Explore: TypeAlias = Callable[..., Generator[Sequence[Edit], Array, Array]]
"""See `Perturbation.explore`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a method: a number in a range, or one of a few words.

    Attributes:
        name: its name in requests.
        summary: its effect, in a sentence.
        default: value if a request leaves it out.
        minimum: smallest number allowed.
        maximum: largest number allowed.
        integer: True if the number must be whole.
        choices: the allowed words; empty for a number.

    Example:
        >>> from camserve_server.methods import Parameter
        >>> Parameter("samples", "Number of noisy copies.", 16, minimum=1, maximum=512, integer=True).maximum
        512
        >>> Parameter("heads", "Way to fuse the heads.", "mean", choices=("mean", "max")).default
        'mean'
    """

    name: str
    summary: str
    default: ParameterValue
    minimum: float = 0.0
    maximum: float = 0.0
    integer: bool = False
    choices: tuple[str, ...] = ()


def single_copy(**_parameters: ParameterValue) -> int:
    """Return 1, the number of copies of a method that uses only the image itself."""
    return 1


def itself(image: Tensor, _index: int, **_parameters: ParameterValue) -> Tensor:
    """Return the image [3,H,W] unchanged."""
    return image


def gradient(_image: Tensor, _copy: Tensor, gradient: Tensor, _index: int, **_parameters: ParameterValue) -> Tensor:
    """Return the gradient [3,H,W] unchanged."""
    return gradient


def as_it_is(mean: Tensor, **_parameters: ParameterValue) -> Tensor:
    """Return the mean [h,w] unchanged as the map."""
    return mean


class MethodKind:
    """Properties and functions of every kind of method; a kind overrides those in which it differs.

    Attributes:
        kind: the method's family, as callers see it.
        edits_image: True if the method's rows have edits or windows of the image, made before they are submitted.
    """

    __slots__ = ()

    kind: ClassVar[Literal["cam", "saliency", "perturbation", "attention", "composite", "baseline"]]
    edits_image: ClassVar[bool] = False

    @property
    def layered(self) -> bool:
        """True if the method makes a map of a layer."""
        return False

    @property
    def smooths(self) -> bool:
        """True if the map can be the first principal component of the channels' terms instead of their sum."""
        return False

    @property
    def per_channel(self) -> bool:
        """True if the method can make a map of one channel of the model's input."""
        return False

    @property
    def squares(self) -> bool:
        """True if the method also needs the mean of the squared terms of its copies."""
        return False

    @property
    def decomposes(self) -> bool:
        """True if the method decomposes a matrix, which takes up to half a second for each map."""
        return False

    @property
    def copy(self) -> Copy:
        """Function that makes one copy of the image."""
        return itself

    @property
    def needs(self) -> str:
        """Requirement on the model or the installation, for messages; empty for none."""
        return ""

    @property
    def gradients(self) -> tuple[Literal["image", "layer"], ...]:
        """Places where the method needs the score's gradient: the image, the layer, both, or none."""
        return ("layer",) if self.layered else ("image",)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks of the models that the method explains; empty for all."""
        return ()

    @property
    def pass_kind(self) -> Kind:
        """Kind of the pass that computes the method's rows."""
        return "score"

    @property
    def answered_by(self) -> Kind | None:
        """Kind of the pass that computes the map from one row of the unchanged image, shared with other methods.

        None if there is no such pass.
        """
        return None

    @property
    def needs_features(self) -> bool:
        """True if the method uses the layers' feature maps of the unchanged image."""
        return False

    @property
    def looks_inside(self) -> bool:
        """True if the method observes or changes operations between the layers, such as every ReLU."""
        return False

    def rows(self, parameters: Parameters, channels: Sequence[int], size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return the number of rows for one target, not counting the one of the unchanged image.

        Args:
            parameters: values by name.
            channels: the number of channels of each layer.
            size: height and width of the model's input.
            rows_of: function that returns the rows of another method, for methods made of others.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cam(MethodKind):
    """Map from a layer's feature maps and their gradients: one forward pass and a backward pass down to the layer.

    Attributes:
        weigh: the method's formula: activations [B,C,h,w], gradients of the scores there [B,C,h,w], scores [B],
            parameters by name -> signed maps [B,h,w], or the terms of each channel [B,C,h,w], which are added up.
        paper: its source.
        parameters: the parameters of the formula.
        copy: normalised image [3,H,W], index of the copy, parameters by name -> one copy of the image [3,H,W].
        count: parameters by name -> the number of copies; the results of `weigh` are averaged over them.
        finish: that mean, parameters by name, the image's own `features` [C,h,w] if there are copies -> map [h,w].
        curvature: True to pass the Hessian of the score times the activations [B,C,h,w] to `weigh` as `curvature`.
        smooths: True if `weigh` returns the terms of each channel, so that eigen smoothing can use their first
            principal component instead of their sum.
        decomposes: True if `weigh` decomposes a matrix, which takes up to half a second for each map.
        differentiates: False if `weigh` uses the activations alone.

    Example:
        >>> import torch
        >>> from camserve_server.methods import Cam
        >>> def weigh(activations, gradients, scores):
        ...     return (activations * gradients).sum(1)
        >>> hirescam = Cam(weigh, "Draelos and Carin 2020")
        >>> hirescam.weigh(torch.ones(1, 4, 7, 7), torch.ones(1, 4, 7, 7), torch.ones(1)).shape
        torch.Size([1, 7, 7])
    """

    weigh: Weigh
    paper: str
    parameters: tuple[Parameter, ...] = ()
    copy: Copy = itself
    count: Count = single_copy
    finish: Finish = as_it_is
    curvature: bool = False
    smooths: bool = False
    decomposes: bool = False
    differentiates: bool = True

    kind = "cam"
    layered = True

    @property
    def gradients(self) -> tuple[Literal["image", "layer"], ...]:
        """At the layer, or nowhere."""
        return ("layer",) if self.differentiates else ()

    @property
    def about(self) -> Callable[..., object]:
        """Function whose docstring documents the method."""
        return self.weigh

    @property
    def pass_kind(self) -> Kind:
        """Pass over layers, or the one that differentiates twice."""
        return "curvature" if self.curvature else "cam"

    @property
    def answered_by(self) -> Kind | None:
        """Pass over layers, for a method without copies or curvature."""
        return None if self.curvature or self.copy is not itself else "cam"

    @property
    def needs_features(self) -> bool:
        """True if the method makes copies: `finish` then receives the image's own feature maps."""
        return self.copy is not itself

    def rows(self, parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return the number of rows: one for each copy."""
        return self.count(**parameters)


@dataclass(frozen=True, slots=True)
class Saliency(MethodKind):
    """Map from the score's gradient at the input: the mean, over copies of the image, of a term of that gradient.

    The map of one channel of the input is `finish` of that channel of the mean and of the image, unless there is a
    `split`.

    Attributes:
        finish: mean of the terms, by default [3,H,W], normalised image [3,H,W], parameters by name -> map [h,w].
        paper: the method's source.
        copy: normalised image [3,H,W], index of the copy, parameters by name -> one copy of the image [3,H,W].
        count: parameters by name -> the number of copies.
        term: normalised image [3,H,W], a copy of it, the score's gradient at the copy [3,H,W], index of the copy,
            parameters by name -> the term of the mean, of any shape; by default the gradient.
        squares: True to pass `finish` the mean of the squared terms too; both means are in float64, stacked [2,...].
        parameters: the parameters of these functions.
        rule: backward rule of the ReLUs: the chain rule ("saliency"), or that of guided backpropagation or a deconvnet.
        baseline: function that returns the index of the baseline among the copies, for a map that must add up to the
            image's score minus the baseline's. `finish` receives that difference as `gained`. None for other maps.
        about: function whose docstring documents the method.
        split: function like `finish` that returns the maps [C,H,W] of all channels; for a method whose map of one
            channel depends on the others. None for other methods.

    Example:
        >>> import torch
        >>> from camserve_server.methods import Saliency
        >>> def finish(gradient, image):
        ...     return (gradient * image).sum(0)
        >>> input_x_gradient = Saliency(finish, "Shrikumar et al. 2016")
        >>> input_x_gradient.finish(torch.ones(3, 8, 8), torch.ones(3, 8, 8)).shape
        torch.Size([8, 8])
    """

    finish: Finish
    paper: str
    copy: Copy = itself
    count: Count = single_copy
    term: Term = gradient
    squares: bool = False
    parameters: tuple[Parameter, ...] = ()
    rule: Literal["saliency", "guided", "deconvnet"] = "saliency"
    baseline: Count | None = None
    about: Callable[..., object] = as_it_is
    split: Finish | None = None

    kind = "saliency"
    per_channel = True

    def __post_init__(self) -> None:
        if self.about is as_it_is:
            object.__setattr__(self, "about", self.finish if self.copy is itself else self.copy)

    @property
    def needs(self) -> str:
        """Requirement on the model."""
        return "" if self.rule == "saliency" else "ReLU"

    @property
    def looks_inside(self) -> bool:
        """True for a rule that changes every ReLU."""
        return self.rule != "saliency"

    @property
    def pass_kind(self) -> Kind:
        """Pass down to the input, named by its rule for ReLUs."""
        return self.rule

    @property
    def answered_by(self) -> Kind | None:
        """Pass down to the input by the chain rule, for a method without copies."""
        return "saliency" if self.rule == "saliency" and self.copy is itself else None

    def rows(self, parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return the number of rows: one for each copy."""
        return self.count(**parameters)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Input of a perturbation method.

    Attributes:
        image: the normalised image, float32 [3,H,W].
        scores: scores of the unchanged image for each target, float32 [T].
        activations: the layer's feature maps, float32 [C,h,w]; None unless the method is layered.

    Example:
        >>> import numpy as np
        >>> from camserve_server.methods import Scene
        >>> scene = Scene(image=np.zeros((3, 8, 8), np.float32), scores=np.array([2.5], np.float32))
        >>> len(scene.scores)
        1
    """

    image: Array
    scores: Array
    activations: Array | None = None


@dataclass(frozen=True, slots=True)
class Perturbation(MethodKind):
    """Map from the scores of edited images: forward passes only.

    Attributes:
        explore: a `Scene`, parameters by name -> a generator that yields lists of n edits, receives the scores [n,T] of
            the edited images for the T targets, and returns the maps [T,h,w].
        paper: the method's source.
        count: parameters by name -> the number of edits. It also receives the layer's `channels` if the method is
            layered, and the input's `height` and `width` otherwise.
        parameters: the parameters of these functions.
        layered: True if the method uses a layer's feature maps.
        needs: package that must be installed, or kind of model, for messages.
        matches: True if the score of an edited image is the similarity of the target's object with the best match among
            the objects detected there. Only detectors have such a score.

    Example:
        >>> import numpy as np
        >>> from camserve_server.methods import Edit, Perturbation, Scene
        >>> def explore(scene):
        ...     left = np.ones(scene.image.shape[1:], np.float32)
        ...     left[:, left.shape[1] // 2 :] = 0
        ...     scores = yield [Edit(left), Edit(1 - left)]
        ...     return scores.T[:, None]  # a map [1,2] for each target
        >>> halves = Perturbation(explore, "an example", lambda height, width: 2)
        >>> edits = next(halves.explore(Scene(np.zeros((3, 8, 8), np.float32), np.zeros(1, np.float32))))
        >>> [edit.keep.mean() for edit in edits] == [0.5, 0.5]
        True
    """

    explore: Explore
    paper: str
    count: Count
    parameters: tuple[Parameter, ...] = ()
    layered: bool = False
    needs: str = ""
    matches: bool = False

    kind = "perturbation"
    edits_image = True
    gradients = ()

    @property
    def about(self) -> Callable[..., object]:
        """Function whose docstring documents the method."""
        return self.explore

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Detection only, if scores are similarities of detected objects."""
        return ("detect",) if self.matches else ()

    @property
    def needs_features(self) -> bool:
        """True if the method uses a layer's feature maps."""
        return self.layered

    def rows(self, parameters: Parameters, channels: Sequence[int], size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return the number of rows: one for each edit, on every layer if the method is layered."""
        if self.layered:
            return sum(self.count(channels=layer, **parameters) for layer in channels)
        return self.count(height=size[0], width=size[1], **parameters)


Combine: TypeAlias = Callable[..., Tensor]
"""See `Attention.combine`."""


@dataclass(frozen=True, slots=True)
class Attention(MethodKind):
    """Map from the attention in every block of a transformer, and its gradients.

    Attributes:
        combine: the method's formula: attention of each of D blocks [D,B,heads,N,N], the score's gradients there, the
            number of prefix tokens, parameters by name -> the value of each patch [B, N − prefix].
        paper: its source.
        parameters: the parameters of the formula.
        each: True if the gradient of a block is that of the score that the model's head gives to the block's own
            tokens, instead of the score of the last block's.
        last: True if the formula takes the queries, keys and values of the last attention, and the gradient at its
            output, instead of the attention of every block.

    Example:
        >>> import torch
        >>> from camserve_server.methods import Attention
        >>> def combine(attention, gradients, prefix):
        ...     return (attention * gradients)[-1].mean(1)[:, 0, prefix:]  # of the class token
        >>> method = Attention(combine, "an example")
        >>> method.combine(torch.ones(2, 1, 4, 17, 17), torch.ones(2, 1, 4, 17, 17), 1).shape
        torch.Size([1, 16])
    """

    combine: Combine
    paper: str
    parameters: tuple[Parameter, ...] = ()
    each: bool = False
    last: bool = False

    kind = "attention"
    looks_inside = True
    needs = "global (not windowed) self-attention"

    @property
    def about(self) -> Callable[..., object]:
        """Function whose docstring documents the method."""
        return self.combine

    @property
    def pass_kind(self) -> Kind:
        """Pass over the attention of every block, or of the last."""
        if self.last:
            return "last"
        return "each" if self.each else "attention"

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return the number of rows: one."""
        return 1


@dataclass(frozen=True, slots=True)
class FullGradient(MethodKind):
    """Map from the gradients at the input and at every bias of a model.

    Attributes:
        spread: one layer's terms [B,C,h,w], the input's `size`, parameters by name -> maps [B,H,W], which are added up
            over the layers.
        paper: the method's source.
        parameters: the parameters of `spread`.

    Example:
        >>> import torch
        >>> from camserve_server.methods import FullGradient
        >>> def spread(terms, size):
        ...     return torch.nn.functional.interpolate(terms.abs().sum(1, keepdim=True), size)[:, 0]
        >>> FullGradient(spread, "an example").spread(torch.ones(1, 4, 7, 7), size=(14, 14)).shape
        torch.Size([1, 14, 14])
    """

    spread: Callable[..., Tensor]
    paper: str
    parameters: tuple[Parameter, ...] = ()

    kind = "saliency"
    needs = "biases"
    looks_inside = True

    @property
    def about(self) -> Callable[..., object]:
        """Function whose docstring documents the method."""
        return self.spread

    @property
    def pass_kind(self) -> Kind:
        """Pass over biases."""
        return "bias"

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return the number of rows: one."""
        return 1


@dataclass(frozen=True, slots=True)
class Product(MethodKind):
    """Map of the input's pixels times the ReLU of a layer's map, resized to the pixels bilinearly.

    Attributes:
        pixels: name of the method for the input.
        layer: name of the method for layers.
        paper: the method's source.
        about: function whose docstring documents the method.

    Example:
        >>> from camserve_server.methods import Product, summary
        >>> def about():
        ...     "Multiply the gradient by the map of LayerCAM."
        >>> summary(Product("saliency", "layercam", "an example", about))
        'Multiply the gradient by the map of LayerCAM'
    """

    pixels: str
    layer: str
    paper: str
    about: Callable[..., object]

    kind = "composite"
    parameters = ()
    layered = True
    gradients = ("image", "layer")
    looks_inside = True

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return the number of rows: those of both methods."""
        return rows_of(self.pixels) + rows_of(self.layer)


@dataclass(frozen=True, slots=True)
class Fused(MethodKind):
    """Maps of one method on several layers, fused into one.

    Attributes:
        of: name of the fused method.
        how: way to fuse the maps: "mean", "max", "product" or "sum".
        paper: the method's source.
        about: function whose docstring documents the method.

    Example:
        >>> from camserve_server.methods import Fused, summary
        >>> def about():
        ...     "Take the largest value of LayerCAM over several layers."
        >>> summary(Fused("layercam", "max", "an example", about))
        'Take the largest value of LayerCAM over several layers'
    """

    of: str
    how: Fusion
    paper: str
    about: Callable[..., object]

    kind = "composite"
    parameters = ()
    layered = True

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return the number of rows: those of the fused method."""
        return rows_of(self.of)


@dataclass(frozen=True, slots=True)
class Windows(MethodKind):
    """Maps of one method for many windows of the image, merged into one.

    Attributes:
        of: name of the method for each window.
        views: parameters by name, and the input's `height` and `width` -> the windows, a list of `View`.
        merge: maps [n,h,w] of the windows, the target's probability in each [n], the windows, parameters by name,
            `height`, `width` -> map [H,W].
        paper: the method's source.
        parameters: the parameters of these functions.

    Example:
        >>> import numpy as np
        >>> from camserve_server.methods import View, Windows
        >>> def views(height, width):
        ...     return [View(), View(mirrored=True)]
        >>> def merge(maps, probabilities, views, height, width):
        ...     return (maps[0] + maps[1][:, ::-1]) / 2
        >>> mirrored = Windows("gradcam", views, merge, "an example")
        >>> mirrored.merge(np.ones((2, 7, 7)), np.ones(2), mirrored.views(224, 224), 224, 224).shape
        (7, 7)
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
        """Function whose docstring documents the method."""
        return self.merge

    def rows(self, parameters: Parameters, _channels: Sequence[int], size: tuple[int, int], rows_of: RowsOf) -> int:
        """Return the number of rows: those of the method for each window."""
        return len(self.views(height=size[0], width=size[1], **parameters)) * rows_of(self.of)


@dataclass(frozen=True, slots=True)
class Baseline(MethodKind):
    """Map that no model contributes to, for comparison with explanations.

    Attributes:
        draw: normalised image, float32 [3,H,W], parameters by name -> map [h,w].
        paper: source of the comparison.
        parameters: the parameters of `draw`.

    Example:
        >>> import numpy as np
        >>> from camserve_server.methods import Baseline
        >>> brightness = Baseline(lambda image: image.mean(0), "an example")
        >>> brightness.draw(np.zeros((3, 8, 8), np.float32)).shape
        (8, 8)
    """

    draw: Callable[..., Map]
    paper: str
    parameters: tuple[Parameter, ...] = ()

    kind = "baseline"
    gradients = ()

    @property
    def about(self) -> Callable[..., object]:
        """Function whose docstring documents the method."""
        return self.draw

    def rows(self, _parameters: Parameters, _channels: Sequence[int], _size: tuple[int, int], _rows_of: RowsOf) -> int:
        """Return the number of rows: zero."""
        return 0


Method: TypeAlias = Cam | Saliency | Perturbation | Attention | FullGradient | Product | Fused | Windows | Baseline


class Documented(Protocol):
    """Method or metric that a function's docstring documents."""

    @property
    def about(self) -> Callable[..., object]:
        """Function with the docstring."""


def summary(method: Documented) -> str:
    """Return a method's summary: the first line of its function's docstring, without the full stop."""
    return (method.about.__doc__ or "").strip().split("\n")[0].rstrip(".")


def formula(method: Documented) -> str:
    """Return a method's formula: its function's docstring after the first line, up to the first section."""
    _, _, rest = (method.about.__doc__ or "").strip().partition("\n")
    lines = [line.strip() for line in rest.split("\n")]
    end = next((i for i, line in enumerate(lines) if line in ("Args:", "Returns:", "Raises:", "Yields:")), len(lines))
    return "\n".join(lines[:end]).strip()
