"""What models answer with, beside logits of classes: a class for every pixel, boxes, embeddings."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from camserve_server.errors import FailedPrecondition
from camserve_server.hooks import first_tensor
from camserve_server.types import Task

OBJECT = ("boxes", "labels", "scores")
"""What torchvision's detectors say of each image's objects."""


def task_of(output: Any) -> Task:
    """Tell by its output what a model answers with: boxes, a class for every pixel, or logits of classes.

    Boxes come as torchvision's detectors give them, in a list of dictionaries; a class for every pixel as its
    segmentation models do, in a dictionary with an entry "out".
    """
    if isinstance(output, Sequence) and output and all(_has(one, OBJECT) for one in output):
        return "detect"
    return "segment" if _has(output, ("out",)) else "classify"


def _has(output: Any, names: Sequence[str]) -> bool:
    return isinstance(output, Mapping) and all(name in output for name in names)


def values_of(output: Any, task: Task) -> Tensor:
    """Return what a model answered as one tensor, as `outputs.Outputs` has it.

    Raises:
        FailedPrecondition: there is none in it.
    """
    if task == "detect":
        return pad_sequence([_objects(one) for one in output], batch_first=True, padding_value=-1.0)
    tensor = output["out"] if _has(output, ("out",)) else first_tensor(output)
    if tensor is None:
        raise FailedPrecondition("the model answers with no tensor of numbers")
    return cast("Tensor", tensor)


def _objects(found: Mapping[str, Tensor]) -> Tensor:
    """Return one image's objects [n, 6]: class, score, left, top, right, bottom; the most certain first."""
    scores = found["scores"].float()
    objects = torch.cat([found["labels"].to(scores)[:, None], scores[:, None], found["boxes"].to(scores)], 1)
    return objects[(-scores.detach()).argsort(stable=True)]
