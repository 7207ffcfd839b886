"""Parity: how far our maps are from the truth, measured one way for the tests and for docs/parity.md.

A case runs one of our methods on one of the models below, and an oracle: another library, or the paper's formula. The
truth is the oracle in float64. The same oracle in plain float32 says how much float32 loses there, on this processor,
and our float32 map may be a few times as far from the truth as that.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from importlib.metadata import version

import numpy as np
import torch
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn

from camserve_server import models
from camserve_server.engine.values import Row
from camserve_server.jobs.cost import runs_unchanged
from camserve_server.methods import METHODS
from camserve_server.models import LoadedModel
from camserve_server.targets.values import ClassTarget, RankTarget
from methods.tools import FACTOR, FLOOR, call, doubled, explain, gap, inputs, job, photo, run

MODELS = {
    "efficientnet_lite0": ("efficientnet_lite0", None, ("chelsea", "coffee", "astronaut")),
    "resnet50": ("torchvision:resnet50?weights=none", "layer4", ("chelsea",)),
    "densenet121": ("torchvision:densenet121?weights=none&size=128", "features.denseblock4", ("coffee",)),
    "vgg16": ("torchvision:vgg16?weights=none&size=96", "features.29", ("astronaut",)),
    "convnext_tiny": ("torchvision:convnext_tiny?weights=none&size=160", None, ("rocket",)),
    "swin_t": ("torchvision:swin_t?weights=none", None, ("china",)),
    "vit_b_16": ("torchvision:vit_b_16?weights=none&size=96", None, ("flower",)),
    "resnet18, biases drawn": ("drawn=methods.parity.made:resnet18?size=96", "layer4", ("flower",)),
}
"""By name: the model, seeded where it has no weights; the layer, None for its default; the photos."""

SMALL = "small resnet, biases drawn"
"""A model for fast tests, which is not in docs/parity.md."""
_SMALL = ("small=methods.parity.made:small?size=96", "layer4", ("flower",))
_SIZES = {"resnet50": 96, "densenet121": 128, "vgg16": 96, "convnext_tiny": 96, "swin_t": 112, "vit_b_16": 64}
_SMALLER = ("smaller=efficientnet_lite0?size=112", *MODELS["efficientnet_lite0"][1:])
NARROW = {"efficientnet_lite0": "smaller efficientnet_lite0"} | {name: f"narrow {name}" for name in _SIZES}
"""Names of narrow models of the same architectures, and of the embedded model for photos of half the size.

They are for tests, and not in docs/parity.md either.
"""


def _described(name):
    """Return what `MODELS` says about a model, also for those that it does not have."""
    tested = {SMALL: _SMALL, NARROW["efficientnet_lite0"]: _SMALLER}
    for kind, size in _SIZES.items():
        tested[NARROW[kind]] = (f"narrow=methods.narrow:{kind}?size={size}", *MODELS[kind][1:])
    return (MODELS | tested)[name]


def cached(function):
    """Call a function of a subject once, and cache its result as long as the subject exists."""

    @wraps(function)
    def once(subject):
        if function not in subject.known:
            subject.known[function] = function(subject)
        return subject.known[function]

    return once


@dataclass(frozen=True, eq=False)
class Subject:
    """One photo before one model, and the class that is explained: the one that the model finds most probable.

    Attributes:
        model: ours.
        theirs: the same weights, for oracles to hook and differentiate as they like; its precision is theirs.
        layer: the name of the layer looked at.
        image: what the model sees, uint8 [H,W,3].
        index: of the class.
        rounded: another number for another rounding of the oracles' input, by one unit in the last place; 0 for none.
        known: what functions marked `cached` returned for it.
    """

    model: LoadedModel
    theirs: nn.Module
    layer: str
    image: np.ndarray
    index: int
    rounded: int = 0
    known: dict = field(init=False, default_factory=dict)

    def ours(self, method, **parameters):
        """Our raw map [h,w]."""
        plain = {} if parameters else together(self)
        return plain[method] if method in plain else self.finding(call(method, **parameters)).heatmap

    def finding(self, asked, *layers, fusion=None):
        """Return the service's explanation for a method call, on its own layer or others."""
        (explanation,) = self.explanations([asked], *layers, fusion=fusion)
        return explanation

    def explanations(self, asked, *layers, fusion=None):
        """Return the service's explanations for several method calls."""
        wanted = job(self.model, asked, [ClassTarget(self.index)], layers or [self.layer], fusion=fusion)
        return explain(self.model, self.image, wanted).explanations

    @cached_property
    def exact(self):
        """The same photo and the same weights in float64."""
        return replace(self, theirs=doubled(self.theirs))

    @property
    def input(self):
        """The model's input, [1,3,H,W], in the oracles' precision."""
        exact = inputs(self.model, self.image)
        if self.rounded:
            up = torch.rand(exact.shape, generator=torch.Generator().manual_seed(self.rounded)) < 0.5
            exact = torch.where(up, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf)))
        return exact.to(next(self.theirs.parameters()).dtype)

    @property
    def size(self):
        """The input's height and width."""
        return self.model.info.preprocess.size

    @property
    def module(self):
        """The layer in the peers' copy."""
        return self.theirs.get_submodule(self.layer)

    @property
    def targets(self):
        """The class as pytorch-grad-cam wants it."""
        return [ClassifierOutputTarget(self.index)]

    def reshape(self, output):
        """Bring what a layer returns to [B,C,h,w], for peers that want to be told how."""
        layout = self.model.info.layers[self.layer].layout
        if layout.axes == "tokens":
            return output[:, layout.prefix :].unflatten(1, (layout.height, layout.width)).permute(0, 3, 1, 2)
        return output.permute(0, 3, 1, 2) if layout.axes == "nhwc" else output


@cached
def together(subject):
    """Our raw map of every CAM that one pass over the image as it is answers, by name."""
    names = [name for name in METHODS if runs_unchanged(call(name))]
    return dict(zip(names, (explanation.heatmap for explanation in subject.explanations(names)), strict=True))


@cached
def captured(subject):
    """Activations and gradients of a subject's layer, each [C,h,w], by autograd, without our code."""
    return gradients(subject, subject.input)


def gradients(subject, image):
    """Activations and gradients of a subject's layer for any input, each [C,h,w]."""
    kept = []

    def keep(_module, _args, output):
        kept.append(output.detach().requires_grad_())
        return kept[-1].clone()

    with subject.module.register_forward_hook(keep):
        (gradient,) = torch.autograd.grad(subject.theirs(image)[0, subject.index], kept[-1:])
    return tuple(subject.reshape(each.detach())[0].numpy() for each in (kept[-1], gradient))


@lru_cache(maxsize=1)  # cases go model by model; all of them at once would hold gigabytes
def subjects(name):
    """The photos before a model."""
    spec, layer, names = _described(name)
    model = models.load(models.parse(spec))
    theirs = unfrozen(model.module)
    results = []
    for image in (photo(name, model.info.preprocess.size[0]) for name in names):
        (result,) = run(model, [Row(image, RankTarget(0))], kind="score")
        results.append(Subject(model, theirs, layer or model.info.default_layer, image, result.target.index))
    return results


def unfrozen(module):
    """Copy a model that can be differentiated from its first parameter on; the numbers in it are shared."""
    first, *rest = module.parameters()
    shared = {id(each): nn.Parameter(each.data, requires_grad=False) for each in rest}
    return copy.deepcopy(module, {id(first): nn.Parameter(first.data), **shared})


@dataclass(frozen=True)
class Distances:
    """Distances of two float32 maps from the exact map, as shares of its largest value."""

    ours: float
    plain: float

    @property
    def allowed(self):
        """The largest distance that ours may have."""
        return FACTOR * self.plain + FLOOR

    @property
    def ratio(self):
        """Our distance as a share of the limit; more than 1 is too far."""
        return self.ours / self.allowed


@dataclass(frozen=True)
class Case:
    """One method on one model against one oracle.

    Attributes:
        method: ours.
        model: one of `MODELS`.
        oracle: whose map it is compared with, in words.
        theirs: a subject -> the oracle's map, in the precision of the subject.
        least: Pearson's correlation that is enough, where the oracle computes something else by its documentation;
            None where both compute the same.
        ours: a subject -> our map; None for the raw map with the parameters below.
        parameters: of the method, by name.
        signed: whether the oracle's sign means something; else it is turned to agree with ours.
        note: why the two differ, where they do.
        photos: how many of the model's photos to try, where each takes long.
    """

    method: str
    model: str
    oracle: str
    theirs: Callable[[Subject], np.ndarray]
    least: float | None = None
    ours: Callable[[Subject], np.ndarray] | None = None
    parameters: dict = field(default_factory=dict)
    signed: bool = True
    note: str = ""
    photos: int = 3

    def __str__(self):
        return f"{self.method}-{self.model}-{self.oracle}"

    def distances(self):
        """Measure the distances on the photo on which ours comes closest to its limit."""
        return max((self.on(each) for each in subjects(self.model)[: self.photos]), key=lambda each: each.ratio)

    def on(self, subject):
        """Measure the distances on one photo."""
        truth, ours = np.asarray(self.theirs(subject.exact), np.float64), self._ours(subject)
        result = Distances(gap(ours, self._turned(ours, truth)), 0)
        for plain in self.plain(subject):
            result = replace(result, plain=max(result.plain, gap(plain, self._turned(plain, truth))))
            if result.ratio <= 1:
                break
        return result

    def plain(self, subject):
        """Run the oracle in plain float32: as it is, without oneDNN's kernels, and with the input rounded otherwise.

        Where a map amplifies rounding, one run may be close to the truth by chance.
        """
        yield self.theirs(subject)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # flags() sets TF32 too, and warns where there is none
            with torch.backends.mkldnn.flags(enabled=False):
                yield self.theirs(replace(subject))
        yield from (self.theirs(replace(subject, rounded=seed)) for seed in range(1, 4))

    def likeness(self):
        """Measure the least correlation with the oracle over the model's photos."""
        return min(correlation(self._ours(each), self.theirs(each)) for each in subjects(self.model)[: self.photos])

    def _ours(self, subject):
        return self.ours(subject) if self.ours else subject.ours(self.method, **self.parameters)

    def _turned(self, found, truth):
        return truth if self.signed or correlation(found, truth) >= 0 else -truth


def correlation(ours, theirs):
    """Pearson's correlation of two maps."""
    assert ours.shape == theirs.shape
    return float(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1])


def library(name):
    """Name a library with its version."""
    return f"{name} {version(name)}"
