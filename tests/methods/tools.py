"""Helpers of the tests of methods: rows run without a server, and a rule for the precision of a float32 result."""

import asyncio
import copy
from dataclasses import replace

import cv2
import numpy as np
import torch
from PIL import Image
from torch import nn

from camserve_server import jobs
from camserve_server.engine import Engine, normalise
from camserve_server.engine.values import Row
from camserve_server.methods import METHODS
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget
from support import PHOTOS

CAMS = ("gradcam", "hirescam", "layercam")


def call(name, **parameters):
    """A method with its defaults filled in."""
    return MethodCall(name, {p.name: p.default for p in METHODS[name].parameters} | parameters)


def gap(ours, theirs):
    """The largest difference, as a share of the largest value."""
    ours, theirs = (np.asarray(each, np.float64) for each in (ours, theirs))
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    assert np.abs(theirs).max() > 0
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


FACTOR, FLOOR = 4, 1e-6
"""A float32 answer may be `FACTOR` times as far from the truth as plain float32 is, plus `FLOOR`.

Both are shares of the largest value. Plain float32 is the same formula or model run by torch or numpy as it comes; the
truth is that in float64. Rounding is another on every processor, with every number of threads and in every order of a
sum, so that a bound in absolute numbers holds on one machine and not on the next.
"""


def error_ratio(found, plain, truth):
    """The distance of an answer from the truth, as a share of what plain float32's own distance allows."""
    return gap(found, truth) / (FACTOR * gap(plain, truth) + FLOOR)


def doubled(module):
    """Copy a module into float64."""
    return copy.deepcopy(module).double()


def exact(model):
    """The same model in float64, without its accelerated copy."""
    info = replace(model.info, precision="float32")
    return LoadedModel(info, doubled(model.module), dtype=torch.float64, text=model.text)


def worst_error_ratio(answers, model, *args):
    """The largest error ratio of a model's answers, where plain float32 is the model without its accelerated copy."""
    return max(map(error_ratio, *(answers(each, *args) for each in (model, plain(model), exact(model)))))


def noise(seed, size):
    """An image of noise, uint8 [size,size,3]."""
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)


def photo(name, side=224):
    """The middle square of a photo, uint8 [side,side,3]."""
    result = np.asarray(Image.open(PHOTOS[name]))
    square = min(result.shape[:2])
    top, left = ((length - square) // 2 for length in result.shape[:2])
    return cv2.resize(result[top : top + square, left : left + square], (side, side), interpolation=cv2.INTER_AREA)


def inputs(model, *images):
    """The model's input for the images, [B,3,h,w] in its precision."""
    return normalise(torch.from_numpy(np.stack(images)), model.info.preprocess).to(model.dtype)


def run(model, rows, layers=(), kind="cam", randomised=None):
    """Run rows as one batch."""
    pass_ = Pass(model.info.name, kind, model.info.preprocess.size, tuple(layers), randomised)
    return Engine({model.info.name: model}).run(pass_, rows)


def plain(model):
    """The same model without its accelerated copy, which knows nothing of what a test does to the model afterwards."""
    return LoadedModel(model.info, model.module, text=model.text)


def maps(model, image, layer, target=None, methods=CAMS):
    """One image's raw maps by method."""
    (result,) = run(model, [Row(image, target or ClassTarget(1), tuple(call(name) for name in methods))], [layer])
    return dict(zip(methods, result.maps[0], strict=True))


def job(model, calls, targets, layers=None, fusion=None):
    """A request for a model; methods may be given by name."""
    calls = tuple(call(each) if isinstance(each, str) else each for each in calls)
    return jobs.Job(model.info, calls, tuple(layers or [model.info.default_layer]), tuple(targets), fusion)


def explain(model, image, asked, chunk=64, batches=None):
    """Run a request in batches of at most `chunk` rows; `batches` gets each one's pass and number of rows."""

    async def submit(pass_, rows, collect):
        for start in range(0, len(rows), chunk):
            some = rows[start : start + chunk]
            if batches is not None:
                batches.append((pass_, len(some)))
            for place, result in enumerate(run(model, some, pass_.layers, pass_.kind)):
                collect(start + place, result)

    return result_of(jobs.explain(asked, image, submit))


def result_of(coroutine):
    """Run a coroutine as `asyncio.run` does, which also makes the repr of the result, in 10 ms for a few maps."""
    results = []

    async def main():
        results.append(await coroutine)

    asyncio.run(main())
    return results[0]


class Toy(nn.Module):
    """A model small enough to plant faults in: `middle` says what happens between the convolutions and the head."""

    def __init__(self, middle=None, layer=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.layer = layer or nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Conv2d(3, 3, 1)
        self.head = nn.Linear(4, 5)
        self.middle = middle or (lambda net, seen: net.layer(seen))

    def forward(self, image):
        return self.head((self.middle(self, self.conv(image)) ** 2).mean((2, 3)))
