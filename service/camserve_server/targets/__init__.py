"""Targets: from what a model answers to the score that is explained, a logit and never a softmax unless asked for."""

from camserve_server.targets.fixing import anything, resolve
from camserve_server.targets.geometry import carried, seen_in, whole
from camserve_server.targets.scoring import scores
from camserve_server.targets.summaries import objects_of, order_of_areas, summary

__all__ = ["anything", "carried", "objects_of", "order_of_areas", "resolve", "scores", "seen_in", "summary", "whole"]
