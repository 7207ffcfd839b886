"""Measurement of the rules: samples of a toy model and of the default model, and tables of their error rates."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn

from benchmarks.diff import changes, maps, real, rules, toy
from benchmarks.diff.maps import Answers, Photos
from benchmarks.diff.rules import RULES, Sample
from benchmarks.results import Part, Table
from camserve_server import Explainer, models

METHODS = ("gradcam", "layercam", "saliency")
NOISE = 0.02
"""Standard deviation of the floor's noise, as a share of the range of pixels."""
POOL, PHOTOS = 100, (25, 64)
"""Number of explained photos, and of those that one decision is made from."""

Samples = dict[str, dict[str, Sample]]
"""Samples by method and by candidate."""


def measure(runs: int = 4, draws: int = 200, *, with_real: bool = True, say: Callable[[str], None] = print) -> Part:
    """Measure how often each rule fails each candidate.

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
    part.tables.append(_table(f"Share of failed checks, toy models from {runs} seeds", sets, draws))
    if with_real:
        part.tables.append(_table(f"Share of failed checks, {real.SPEC} and crops of photos", [real_samples()], draws))
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
        mirrored = maps.explain(explainer, maps.mirrored(photos), classes, METHODS).mirrored()
    found = {"noise": noisy[2], "mirrored": mirrored}
    random = ("", (changes.randomised(network, 10), options))
    for name, (other, how) in [*others.items(), random]:
        with Explainer(other, **how) as explainer:
            found[name] = maps.explain(explainer, photos, classes, METHODS)
    ceiling = found.pop("")
    return {method: dict(_by_candidate(method, truth, noisy[:2], ceiling, found)) for method in METHODS}


def _by_candidate(
    method: str, truth: Answers, floor: Sequence[Answers], ceiling: Answers, found: dict[str, Answers]
) -> Iterator[tuple[str, Sample]]:
    def correlations(answers: Iterable[Answers]) -> np.ndarray[Any, np.dtype[np.float64]]:
        rows = [maps.numbers(truth.maps[method], one.maps[method])["spearman"] for one in answers]
        return np.nan_to_num(np.stack(rows))

    floors, (ceilings,) = correlations(floor), correlations([ceiling])
    changed = np.stack([one.predictions != truth.predictions for one in floor])
    for name, answers in found.items():
        (candidate,) = correlations([answers])
        yield name, Sample(candidate, answers.predictions != truth.predictions, floors, changed, ceilings)


def _table(title: str, sets: Sequence[Samples], draws: int) -> Table:
    columns = ("method", "candidate", "floor", "limit", "ceiling", "median", "predictions changed")
    rules_of = tuple(f"{rule}, {count}" for count in PHOTOS for rule in RULES)
    rows = [
        (method, name, *_levels([samples[method][name] for samples in sets]), *cells)
        for method in METHODS
        for name in sets[0][method]
        for cells in [_rates([samples[method][name] for samples in sets], draws)]
    ]
    return Table(title, columns + rules_of, rows)


def _levels(samples: Sequence[Sample]) -> tuple[str, ...]:
    levels = [
        (np.median(one.floor), one.limit, np.median(one.ceiling), np.median(one.candidate), one.changed.mean())
        for one in samples
    ]
    return tuple(f"{level:.2f}" for level in np.mean(levels, 0))


def _rates(samples: Sequence[Sample], draws: int) -> tuple[str, ...]:
    found = [[rules.rates(one, count, draws) for one in samples] for count in PHOTOS]
    return tuple(f"{np.mean([one[rule] for one in some]):.2f}" for some in found for rule in RULES)
