"""Parity: how far our maps are from an oracle's, measured one way for the tests and for docs/parity.md.

A case compares one of our methods, on one of the models below, with an oracle: another library, or the paper's formula
in float64. Its deviation is the worst over the model's photos.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Literal

import numpy as np
import torch
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn

from camserve_server import models
from camserve_server.jobs.cost import is_clean
from camserve_server.methods import METHODS
from camserve_server.models import LoadedModel
from camserve_server.types import ClassTarget, RankTarget, Row
from methods.tools import call, explain, inputs, job, photo, run

MODELS = {
    "efficientnet_lite0": ("efficientnet_lite0", None, ("chelsea", "coffee", "astronaut")),
    "resnet50": ("torchvision:resnet50?weights=none", "layer4", ("chelsea",)),
    "densenet121": ("torchvision:densenet121?weights=none&size=128", "features.denseblock4", ("coffee",)),
    "vgg16": ("torchvision:vgg16?weights=none&size=96", "features.29", ("astronaut",)),
    "convnext_tiny": ("torchvision:convnext_tiny?weights=none&size=160", None, ("rocket",)),
    "swin_t": ("torchvision:swin_t?weights=none", None, ("china",)),
    "vit_b_16": ("torchvision:vit_b_16?weights=none", None, ("flower",)),
    "resnet18, biases drawn": ("drawn=methods.parity.made:resnet18?size=96", "layer4", ("flower",)),
}
"""By name: the model, seeded where it has no weights; the layer, None for its default; the photos."""


@dataclass(frozen=True, eq=False)
class Subject:
    """One photo before one model, and the class that is explained: the one that the model finds most probable.

    Attributes:
        model: ours.
        theirs: the same weights, for peers to hook and differentiate as they like.
        layer: the name of the layer looked at.
        image: what the model sees, uint8 [H,W,3].
        index: of the class.
    """

    model: LoadedModel
    theirs: nn.Module
    layer: str
    image: np.ndarray
    index: int

    def ours(self, method, **parameters):
        """Our raw map [h,w]."""
        plain = {} if parameters else together(self)
        return plain[method] if method in plain else self.finding(call(method, **parameters)).heatmap

    def finding(self, asked, *layers, fusion=None):
        """What our service finds for a call, on its own layer or others."""
        (found,) = self.findings([asked], *layers, fusion=fusion)
        return found

    def findings(self, asked, *layers, fusion=None):
        """What our service finds for several calls."""
        wanted = job(self.model, asked, [ClassTarget(self.index)], layers or [self.layer], fusion=fusion)
        return explain(self.model, self.image, wanted).findings

    @property
    def input(self):
        """What the model gets, float32 [1,3,H,W]."""
        return inputs(self.model, self.image)

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

    def double(self):
        """The peers' copy in float64."""
        return copy.deepcopy(self.theirs).double().requires_grad_(requires_grad=False)


@lru_cache(maxsize=4)
def together(subject):
    """Our raw map of every CAM that one pass over the image as it is answers, by name."""
    names = [name for name in METHODS if is_clean(call(name))]
    return dict(zip(names, (one.heatmap for one in subject.findings(names)), strict=True))


@lru_cache(maxsize=4)
def exact(subject):
    """Activations and gradients of a subject's layer in float64, each [C,h,w], by autograd and nothing of ours."""
    return gradients(subject, subject.double(), subject.input.double())


def gradients(subject, model, image):
    """Activations and gradients of a subject's layer for any input of any copy of its model, each [C,h,w]."""
    kept = []

    def keep(_module, _args, output):
        kept.append(output.detach().requires_grad_())
        return kept[-1].clone()

    with model.get_submodule(subject.layer).register_forward_hook(keep):
        (gradient,) = torch.autograd.grad(model(image)[0, subject.index], kept[-1:])
    return tuple(subject.reshape(one.detach())[0].numpy() for one in (kept[-1], gradient))


@lru_cache(maxsize=2)  # cases go model by model; all of them at once would hold gigabytes
def subjects(name):
    """The photos before a model."""
    spec, layer, names = MODELS[name]
    model = models.load(models.parse(spec))
    theirs = unfrozen(model.module)
    found = []
    for image in (photo(one, model.info.preprocess.size[0]) for one in names):
        (result,) = run(model, [Row(image, RankTarget(0))], kind="score")
        found.append(Subject(model, theirs, layer or model.info.default_layer, image, result.target.index))
    return found


def unfrozen(module):
    """Copy a model that can be differentiated from its first parameter on; the numbers in it are shared."""
    first, *rest = module.parameters()
    shared = {id(one): nn.Parameter(one.data, requires_grad=False) for one in rest}
    return copy.deepcopy(module, {id(first): nn.Parameter(first.data), **shared})


@dataclass(frozen=True)
class Case:
    """One method on one model against one oracle.

    Attributes:
        method: ours.
        model: one of `MODELS`.
        oracle: whose map it is compared with, in words.
        theirs: a subject -> the oracle's map.
        bound: the largest deviation allowed; of a correlation, the smallest.
        measure: "max": the largest difference as a share of the largest value. "correlation": Pearson's.
        ours: a subject -> our map; None for the raw map with the parameters below.
        parameters: of the method, by name.
        signed: whether the oracle's sign means something; else it is turned to agree with ours.
        note: why the two differ, where they do.
    """

    method: str
    model: str
    oracle: str
    theirs: Callable[[Subject], np.ndarray]
    bound: float = 1e-5
    measure: Literal["max", "correlation"] = "max"
    ours: Callable[[Subject], np.ndarray] | None = None
    parameters: dict = field(default_factory=dict)
    signed: bool = True
    note: str = ""

    def __str__(self):
        return f"{self.method}-{self.model}-{self.oracle}"

    def deviation(self):
        """Measure the worst deviation over the model's photos."""
        found = [self._deviation(one) for one in subjects(self.model)]
        return max(found) if self.measure == "max" else min(found)

    def _deviation(self, subject):
        ours = self.ours(subject) if self.ours else subject.ours(self.method, **self.parameters)
        return MEASURES[self.measure](ours, self._turned(ours, np.asarray(self.theirs(subject), np.float64)))

    def _turned(self, ours, theirs):
        return theirs if self.signed or correlation(ours, theirs) >= 0 else -theirs

    def holds(self, deviation):
        """Tell whether a deviation is within the bound."""
        return deviation <= self.bound if self.measure == "max" else deviation >= self.bound


def furthest(ours, theirs):
    """The largest difference of two maps, as a share of the largest value of the second."""
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    assert np.abs(theirs).max() > 0
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def correlation(ours, theirs):
    """Pearson's correlation of two maps."""
    assert ours.shape == theirs.shape
    return float(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1])


MEASURES = {"max": furthest, "correlation": correlation}


def library(name):
    """Name a library with its version."""
    return f"{name} {version(name)}"
