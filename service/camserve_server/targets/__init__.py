"""Targets: from a model's outputs to the score that is explained, a logit unless another target is requested.

It may import `models` and the packages below that.
"""

from camserve_server.targets.fixing import anything
from camserve_server.targets.geometry import carried, whole
from camserve_server.targets.kinds import TargetKind, kind_of, resolve, scores, seen_in, with_box
from camserve_server.targets.probability import class_probabilities, metric_probability, weight_probability
from camserve_server.targets.scoring import similarity_of_best, with_texts
from camserve_server.targets.summaries import objects_of, order_of_areas, summary

__all__ = [
    "TargetKind",
    "anything",
    "carried",
    "class_probabilities",
    "kind_of",
    "metric_probability",
    "objects_of",
    "order_of_areas",
    "resolve",
    "scores",
    "seen_in",
    "similarity_of_best",
    "summary",
    "weight_probability",
    "whole",
    "with_box",
    "with_texts",
]
