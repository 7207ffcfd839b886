"""Measurement of the rule: samples of toy models and of the default model, and tables of their error rates."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from benchmarks.diff import maps, real, rules, toy
from benchmarks.diff.maps import Answers, Photos
from benchmarks.diff.rules import RULES, Sample
from benchmarks.results import Part, Table
from camserve.diff import rule
from camserve.diff.calibration import NOISE
from camserve_server import Explainer, models

METHODS = ("gradcam", "layercam", "saliency")
POOL, PHOTOS = 100, (25, 64)
"""Number of explained photos, and of those that one decision is made from."""

Samples = dict[str, dict[str, Sample]]
"""Samples by method and by candidate."""


def measure(runs: int = 4, draws: int = 200, *, with_real: bool = True, say: Callable[[str], None] = print) -> Part:
    """Measure how often each rule says that a candidate differs.

    Args:
        runs: The number of toy models.
        draws: The number of random draws of photos from each pool.
        with_real: Whether the default model is measured too.
        say: Function that reports the progress.
    """
    part = Part("diff")
    sets = []
    for seed in range(runs):
        sets.append(toy_samples(seed))
        say(f"diff: toy model {seed + 1} of {runs}")
    part.tables.append(_table(f"Toy models from {runs} seeds", sets, draws))
    if with_real:
        part.tables.append(_table(f"{real.SPEC} and crops of photos", [real_samples()], draws))
    return part


def toy_samples(seed: int, pool: int = POOL) -> Samples:
    """Train a toy model and its changed copies, and compare their maps of scenes with patches."""
    network = toy.trained(seed)
    clean, classes = toy.scenes(pool, 5000 + seed)
    photos = list(toy.with_patch(clean, classes, seed))
    others: dict[str, _Model] = {name: (copy, toy.options()) for name, copy in toy.copies(network, seed).items()}
    others["not accelerated"] = (network, toy.options() | {"accelerate": False})
    return _samples_of(network, toy.options(), others, photos)


def real_samples(pool: int = POOL) -> Samples:
    """Compare the maps of the default model and of its changed copies, of crops of photos."""
    loaded = models.load(models.parse(real.SPEC))
    shape = {"size": real.SIDE, "crop": 1.0, "mean": loaded.info.preprocess.mean, "std": loaded.info.preprocess.std}
    others: dict[str, _Model] = {name: (copy, shape) for name, copy in real.copies(loaded.module).items()}
    others["not accelerated"] = (loaded.module, shape | {"accelerate": False})
    others["bfloat16"] = (f"{real.SPEC}?precision=bfloat16", {})
    return _samples_of(loaded.module, shape, others, real.crops(pool))


_Model = tuple[nn.Module | str, dict[str, Any]]
"""A network or a spec, and options of its explainer."""


def _samples_of(network: nn.Module, options: dict[str, Any], others: dict[str, _Model], photos: Photos) -> Samples:
    with Explainer(network, **options) as explainer:
        classes = maps.explain(explainer, photos, None, METHODS[:1]).predictions
        truth = maps.explain(explainer, photos, classes, METHODS)
        noisy = [maps.explain(explainer, maps.noisy(photos, NOISE, seed), classes, METHODS) for seed in range(3)]
        random = maps.with_random_weights(explainer, photos, classes, METHODS)
    found = {"noise": noisy[2]}
    for name, (other, how) in others.items():
        with Explainer(other, **how) as explainer:
            found[name] = maps.explain(explainer, photos, classes, METHODS)
    return {
        method: {name: _sample(method, truth, noisy[:2], random[method], one) for name, one in found.items()}
        for method in METHODS
    }


def _sample(method: str, truth: Answers, noisy: Sequence[Answers], random: maps.Values, candidate: Answers) -> Sample:
    return Sample(
        truth.correlations(method, candidate),
        truth.verdict_changes(method, candidate),
        candidate.predictions != truth.predictions,
        np.stack([truth.correlations(method, one) for one in noisy]),
        np.stack([one.predictions != truth.predictions for one in noisy]),
        random,
    )


def _table(title: str, sets: Sequence[Samples], draws: int) -> Table:
    columns = ("method", "candidate", "floor", "limit", "ceiling", "median", "predictions changed")
    rules_of = tuple(f"{name}, {count}" for count in PHOTOS for name in RULES)
    rows = [
        (method, name, *_levels(samples), *_rates(samples, draws))
        for method in METHODS
        for name in sets[0][method]
        for samples in [[one[method][name] for one in sets]]
    ]
    return Table(title, columns + rules_of, rows)


def _levels(samples: Sequence[Sample]) -> tuple[str, ...]:
    levels = [(*_scale(one), np.nanmedian(one.candidate), one.changed.mean()) for one in samples]
    return tuple(f"{level:.2f}" for level in np.mean(levels, 0))


def _scale(sample: Sample) -> tuple[float, float, float]:
    return rule.scale_of(sample.calibration)


def _rates(samples: Sequence[Sample], draws: int) -> tuple[str, ...]:
    found = [[rules.rates(one, count, draws) for one in samples] for count in PHOTOS]
    return tuple(f"{np.mean([one[name] for one in some]):.2f}" for some in found for name in RULES)
