"""Two answers of one model to the same question may differ by rounding, and by nothing else."""

import functools

import numpy as np

from camserve_server.models import load, parse
from camserve_server.targets.values import ClassTarget
from methods.tools import FACTOR, FLOOR, call, exact, explain, gap, job, plain

PICTURES = 3


@functools.cache
def allowed(spec, method="gradcam", **parameters):
    """The largest difference of two maps that rounding explains, as a share of the largest value.

    Each of them may be as far from the truth as the rule of `methods.tools` says, on either side of it. How far plain
    float32 is from the truth is measured here, on this machine, with a few pictures of noise.
    """
    model = load(parse(spec))
    asked = job(model, [call(method, **parameters)], [ClassTarget(1)])
    distances = []
    for seed in range(PICTURES):
        image = np.random.default_rng(seed).integers(0, 256, (*model.info.preprocess.size, 3), np.uint8)
        found, truth = (explain(one, image, asked).explanations[0].heatmap for one in (plain(model), exact(model)))
        distances.append(gap(found, truth))
    return 2 * (FACTOR * max(distances) + FLOOR)


def check_same(found, expected, spec, method="gradcam", **parameters):
    """Check that two maps are answers of a model to the same question.

    Raises:
        AssertionError: they differ by more than rounding explains.
    """
    assert gap(found, expected) <= allowed(spec, method, **parameters)
