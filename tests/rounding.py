"""Check that two maps of the same model and request differ by no more than rounding."""

import functools

import numpy as np

from camserve_server.models import load, parse
from camserve_server.targets.values import ClassTarget
from methods.tools import FACTOR, FLOOR, call, exact, explain, gap, job, plain

PICTURES = 3


@functools.cache
def allowed(spec, method="gradcam", **parameters):
    """Return the largest difference of two maps that rounding explains, as a share of the largest value.

    Each map may be as far from the exact one as the rule of `methods.tools` allows, on either side. The error of plain
    float32 is measured on this machine with a few pictures of noise.
    """
    model = load(parse(spec))
    request = job(model, [call(method, **parameters)], [ClassTarget(1)])
    distances = []
    for seed in range(PICTURES):
        image = np.random.default_rng(seed).integers(0, 256, (*model.info.preprocess.size, 3), np.uint8)
        result, truth = (explain(each, image, request).explanations[0].heatmap for each in (plain(model), exact(model)))
        distances.append(gap(result, truth))
    return 2 * (FACTOR * max(distances) + FLOOR)


def check_same(result, expected, spec, method="gradcam", **parameters):
    """Check that two maps of the same model and request are equal but for rounding.

    Raises:
        AssertionError: the maps differ by more than rounding explains.
    """
    assert gap(result, expected) <= allowed(spec, method, **parameters)
