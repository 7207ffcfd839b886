"""Probabilities on the host: of every class, and of a target. The differentiable one is in `scoring`.

The functions differ in range and rounding on purpose; the docstring of each gives the reason.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from camserve_server.core.arrays import Map
from camserve_server.models.values import Task
from camserve_server.targets.kinds import kind_of
from camserve_server.targets.values import FixedTarget

Doubles: TypeAlias = NDArray[np.float64]


class Answer(Protocol):
    """Part of an engine's `RowResult` that a probability is computed from."""

    @property
    def logits(self) -> Map:
        """Logits of all classes, float32 [classes]."""

    @property
    def target(self) -> FixedTarget:
        """Explained target."""

    @property
    def score(self) -> float:
        """Score of the target."""


def class_probabilities(task: Task, logits: Map) -> Map:
    """Return the probability of each class, float32 [classes]; 0 for a regression model.

    Computed in float64, so that a probability near 1 is rounded only once, to the float32 of a response.

    Args:
        task: the model's task: classify, multilabel or regress.
        logits: float32 [classes].
    """
    with np.errstate(invalid="ignore", over="ignore"):  # infinite logits have no softmax: the result is NaN
        return _PROBABILITIES[task](logits.astype(np.float64)).astype(np.float32)


def metric_probability(task: Task, answer: Answer) -> float:
    """Return the number that metrics compare: the probability of a target, or its score if it has none.

    For a class it is the softmax, or the sigmoid if classes do not exclude each other. For a contrast it is the softmax
    between its two classes. For any other target, and for a model that is not a classifier, it is the score itself:
    metrics measure how much the number falls, so it need not be between 0 and 1.
    """
    scale = kind_of(answer.target).scale
    if task not in ("classify", "multilabel") or scale not in ("logit", "log-odds"):
        return answer.score
    if task == "multilabel" or scale == "log-odds":
        return _stable_sigmoid(answer.score)
    logits = answer.logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite logits have no probabilities: the result is NaN
        return float(1 / np.exp(logits - logits[_index(answer.target)]).sum())


def weight_probability(task: Task, answer: Answer) -> float:
    """Return a weight of 0 to 1 for a map: the target's probability, or the logistic function of any other score.

    Weights cannot be negative, so the logistic function is also applied to a score that is neither a logit nor a
    difference of logits. Weights multiply float32 maps, so they are computed in float32.
    """
    scale = kind_of(answer.target).scale
    if scale == "probability":
        return answer.score
    if task == "classify" and scale == "logit":
        return float(torch.from_numpy(answer.logits).softmax(0)[_index(answer.target)])
    return float(torch.tensor(answer.score, dtype=torch.float32).sigmoid())


def _index(target: FixedTarget) -> int:
    index = kind_of(target).class_index(target)
    if index is None:
        raise TypeError(f"{target} has the scale of a logit, but no class")
    return index


def _softmax(logits: Doubles) -> Doubles:
    exponentials: Doubles = np.exp(logits - logits.max())
    probabilities: Doubles = exponentials / exponentials.sum()
    return probabilities


def _sigmoid(logits: Doubles) -> Doubles:
    probabilities: Doubles = 1 / (1 + np.exp(-logits))
    return probabilities


def _stable_sigmoid(score: float) -> float:
    """Return the logistic function of one number, without the overflow that `math.exp` reports as an error."""
    return 1 / (1 + math.exp(-score)) if score > 0 else math.exp(score) / (1 + math.exp(score))


_PROBABILITIES: Mapping[Task, Callable[[Doubles], Doubles]] = {
    "classify": _softmax,
    "multilabel": _sigmoid,
    "regress": np.zeros_like,
}
