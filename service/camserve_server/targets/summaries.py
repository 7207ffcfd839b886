"""Summary of a model's outputs besides the explanations: logits, classes of a segmentation, detected objects."""

import numpy as np
import torch
from torch import Tensor

from camserve_server.core.arrays import Map
from camserve_server.models.outputs import OBJECT_COLUMNS, Outputs
from camserve_server.models.values import ModelInfo

BACKGROUND = ("background", "__background__")


def summary(outputs: Outputs) -> list[Tensor]:
    """Return the summary of each image: the values; for a segmentation [classes, 3], for a detector [n, 6].

    Those three are the share of the image that the class covers, and its mean probability and mean logit over that
    part. Those six describe an object, without its scores in other classes.
    """
    if outputs.info.task == "detect":
        return list(outputs.values.detach()[..., :OBJECT_COLUMNS])
    if outputs.info.task == "segment":
        return [covered(values) for values in outputs.values.detach()]
    return list(outputs.values.detach())


def order_of_areas(covered: Map, info: ModelInfo) -> list[int]:
    """Return the classes in a segmentation, the largest first and the background last.

    Args:
        covered: float32 [classes, 3], as `summary` returns it.
        info: the model's information, whose labels name the background class.
    """
    shares = covered[:, 0]
    classes = [int(index) for index in np.argsort(-shares, kind="stable") if shares[index] > 0]
    return sorted(classes, key=lambda index: info.label(index) in BACKGROUND)


def objects_of(padded: Map) -> Map:
    """Return the objects of an image without the rows of padding."""
    return padded[padded[:, 0] >= 0]


def covered(values: Tensor) -> Tensor:
    """Return the share of the image that each class covers, and its mean probability and logit there, [classes, 3]."""
    logits = values.flatten(1)
    winners = logits.argmax(0, keepdim=True)
    winning_values = [values.gather(0, winners)[0].double() for values in (logits.softmax(0), logits)]
    counts, *sums = (
        values.new_zeros(len(logits)).index_add(0, winners[0], values)
        for values in (torch.ones_like(winning_values[0]), *winning_values)
    )
    return torch.stack([counts / winners.numel(), *(total / counts.clamp(min=1) for total in sums)], 1)
