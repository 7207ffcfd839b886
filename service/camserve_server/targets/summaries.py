"""What is told of an image beside its explanations: logits, the classes of a segmentation, objects."""

import numpy as np
import torch
from torch import Tensor

from camserve_server.core.arrays import Map
from camserve_server.models.outputs import Outputs
from camserve_server.models.values import ModelInfo

BACKGROUND = ("background", "__background__")


def summary(outputs: Outputs) -> list[Tensor]:
    """Return what is told of each image: the values as they are; of a segmentation, [classes, 3] for each class.

    The three are the share of the image that the class covers, and over that part its mean probability and mean logit.
    """
    if outputs.info.task == "segment":
        return [covered(values) for values in outputs.values.detach()]
    return list(outputs.values.detach())


def order_of_areas(covered: Map, info: ModelInfo) -> list[int]:
    """Return the classes that a segmentation shows, the largest first and the background last.

    Args:
        covered: float32 [classes, 3], as `summary` returns it.
        info: of the model, whose labels say which class is the background.
    """
    shares = covered[:, 0]
    found = [int(index) for index in np.argsort(-shares, kind="stable") if shares[index] > 0]
    return sorted(found, key=lambda index: info.label(index) in BACKGROUND)


def objects_of(found: Map) -> Map:
    """Leave out of objects [n, 6] the rows that fill up."""
    return found[found[:, 0] >= 0]


def covered(values: Tensor) -> Tensor:
    """Return share, mean probability and mean logit of each class [classes, 3] over the part that it covers."""
    logits = values.flatten(1)
    winners = logits.argmax(0, keepdim=True)
    won = [one.gather(0, winners)[0].double() for one in (logits.softmax(0), logits)]
    counts, *sums = (
        one.new_zeros(len(logits)).index_add(0, winners[0], one) for one in (torch.ones_like(won[0]), *won)
    )
    return torch.stack([counts / winners.numel(), *(one / counts.clamp(min=1) for one in sums)], 1)
