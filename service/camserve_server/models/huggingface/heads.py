"""Kinds of model that transformers saves, and their outputs in camserve's form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from camserve_server.core.errors import ConfigError
from camserve_server.models.values import Task

Convert: TypeAlias = Callable[[Any, tuple[int, int]], Any]
"""Receives the output of a network of transformers, and height and width of its input; returns camserve's form."""


@dataclass(frozen=True, slots=True)
class Head:
    """A kind of model, by the head that its network ends in.

    Attributes:
        names: parts of the class names in transformers.
        registry: name of transformers' mapping from settings to classes.
        role: a noun for such a model.
        task: its task; None if the settings decide.
        convert: receives the model's image processor; returns the conversion of its outputs. None for outputs that need
            no conversion.
    """

    names: tuple[str, ...]
    registry: str
    role: str
    task: Task | None = None
    convert: Callable[[Any], Convert] | None = None

    def model_class(self, transformers: Any, config: Any, origin: str) -> Any:
        """Return transformers' own class for a model's settings, never one from code in the folder.

        Raises:
            ConfigError: transformers has no such class.
        """
        kinds = getattr(transformers, self.registry).get(type(config), None)
        if kinds is None:
            raise ConfigError(f'{origin} is a "{config.model_type}", for which transformers has no {self.role}')
        names = config.architectures or []
        classes = kinds if isinstance(kinds, Sequence) else (kinds,)
        return next((kind for kind in classes if kind.__name__ in names), classes[0])


def _objects(processor: Any) -> Convert:
    """Return the conversion to boxes, labels and scores, which are transformers' own, and scores of all classes."""
    if not hasattr(processor, "post_process_object_detection"):
        raise ConfigError(f"its {type(processor).__name__} has no post_process_object_detection")

    def convert(output: Any, size: tuple[int, int]) -> Any:
        images = processor.post_process_object_detection(output, 0.0, [size] * len(output.logits))
        # Of the whole output, as transformers computes them: those of chosen queries would be rounded otherwise.
        probabilities = output.logits.sigmoid(), output.logits.softmax(-1)
        for index, (objects, queries) in enumerate(zip(images, _queries(processor, output), strict=True)):
            objects["class_scores"] = _behind_scores(objects, *(each[index, queries] for each in probabilities))
        return images

    return convert


def _queries(processor: Any, output: Any) -> list[Tensor]:
    """Return for each image the index of the query of each object that transformers finds.

    Its post-processing sorts the queries, but does not return their order. So it is run with boxes of no size, at the
    index of their query.
    """
    with torch.no_grad():
        boxes = torch.zeros_like(output.pred_boxes, dtype=torch.float32)  # half precision would round the indices
        boxes[..., 0] = torch.arange(boxes.shape[1], device=boxes.device)
        numbered = type(output)(logits=output.logits, pred_boxes=boxes)
        images = processor.post_process_object_detection(numbered, 0.0, [(1, 1)] * len(boxes))
    return [objects["boxes"][:, 0].round().long() for objects in images]


def _behind_scores(objects: Mapping[str, Tensor], apart: Tensor, together: Tensor) -> Tensor:
    """Return the one of two tensors of probabilities [n,classes] from which the scores of the objects were taken."""
    labels, scores = objects["labels"][:, None], objects["scores"].detach()
    errors = [(each.detach().gather(1, labels)[:, 0] - scores).abs().sum() for each in (apart, together)]
    return torch.where(errors[0] <= errors[1], apart, together)


def _class_scores(processor: Any) -> Convert:
    """Return the conversion of masks and their classes to a logarithmic score of each class at every pixel.

    The score is transformers' own, the sum over all queries of class probability times mask probability (Cheng et al.
    2021, section 3.4). Its logarithm serves as logit: the softmax of it is the class's share of all scores.
    """

    def convert(output: Any, _size: tuple[int, int]) -> Any:
        classes = output.class_queries_logits.softmax(-1)[..., :-1]
        scores = torch.einsum("bqc,bqhw->bchw", classes, _masks(processor, output).sigmoid())
        return {"out": scores.clamp(min=torch.finfo(scores.dtype).tiny).log()}

    return convert


def instances(processor: Any) -> Convert:
    """Return the conversion of masks and their classes to objects, the boxes of which enclose the masks.

    As in transformers, an object is a query with a class, its score the probability of that class times the mean
    probability of the mask's pixels, and a query without pixels is none.
    """

    def convert(output: Any, size: tuple[int, int]) -> list[dict[str, Tensor]]:
        images = zip(_masks(processor, output), output.class_queries_logits, strict=True)
        return [_instances(*image, size) for image in images]

    return convert


def _masks(processor: Any, output: Any) -> Tensor:
    """Return the logits of all masks [B,Q,h,w] on the grid to which transformers resizes them, if it does."""
    masks: Tensor = output.masks_queries_logits
    first = type(output)(masks_queries_logits=masks[:1, :1], class_queries_logits=output.class_queries_logits[:1, :1])
    with torch.no_grad():
        grid = tuple(processor.post_process_semantic_segmentation(first)[0].shape)
    if masks.shape[2:] == grid:
        return masks
    return functional.interpolate(masks, grid, mode="bilinear", align_corners=False)


def _instances(masks: Tensor, classes: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
    """Return the objects of one image.

    Args:
        masks: logits of the masks [Q,h,w].
        classes: logits of the classes, and of no object [Q,classes+1].
        size: height and width of the input.
    """
    probabilities = classes.softmax(-1)[:, :-1]
    best, places = probabilities.flatten().topk(len(masks))
    masks, labels = masks[places // probabilities.shape[1]], places % probabilities.shape[1]
    inside = (masks > 0).to(masks)
    means = (masks.sigmoid() * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
    visible = inside.any(2).any(1)
    rows, columns = inside.any(2)[visible], inside.any(1)[visible]
    (top, bottom), (left, right) = _extent(rows, size[0]), _extent(columns, size[1])
    return {
        "boxes": torch.stack([left, top, right, bottom], 1),
        "labels": labels[visible],
        "scores": (best * means)[visible],
    }


def _extent(occupied: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return start and end of the occupied cells [n,cells] along one axis of the input, in pixels [n]."""
    cells = occupied.shape[1]
    numbers = torch.arange(cells, device=occupied.device)
    first = torch.where(occupied, numbers, cells).amin(1)
    last = torch.where(occupied, numbers, -1).amax(1)
    return first * length / cells, (last + 1) * length / cells


HEADS = (
    Head(("ForImageClassification",), "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "image classifier"),
    Head(("ForObjectDetection",), "MODEL_FOR_OBJECT_DETECTION_MAPPING", "object detector", "detect", _objects),
    Head(
        ("ForSemanticSegmentation",),
        "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING",
        "model for semantic segmentation",
        "segment",
    ),
    Head(
        ("ForUniversalSegmentation", "ForInstanceSegmentation"),
        "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING",
        "model for universal segmentation",
        "segment",
        _class_scores,
    ),
)
"""The kinds of model, the default first."""


def head_of(config: Mapping[str, Any], origin: str, *, trained: bool) -> Head:
    """Return the head of a model by the class that it was saved as.

    Args:
        config: the settings in its config.json.
        origin: its source, for errors.
        trained: True if its weights are used; otherwise a network without a head gets that of a classifier.

    Raises:
        ConfigError: the model has another head, or none yet.
    """
    saved = config.get("architectures")
    names = [str(name)[:100] for name in saved] if isinstance(saved, list) else []
    for head in HEADS:
        if any(part in name for part in head.names for name in names):
            return head
    if trained and names:
        known = ", ".join(f"…{part}" for head in HEADS for part in head.names)
        raise ConfigError(
            f"{origin} was saved as {names[0]}, and hf: is for {known}: serve another model from a function of your "
            "own, your.module:factory, which says what its task is"
        )
    return HEADS[0]


def with_form(module: nn.Module, convert: Convert | None, *, swaps_channels: bool) -> nn.Module:
    """Make a network of transformers take red, green and blue, and return outputs in camserve's form.

    The module gets a class of its own, derived from its present one. A wrapper module would add a level to the names of
    all layers.

    Args:
        module: the network.
        convert: the conversion of its outputs; None for outputs that need none.
        swaps_channels: True if it takes blue, green and red.
    """
    if convert is None and not swaps_channels:
        return module
    kind = type(module)

    def call(self: nn.Module, images: Tensor) -> Any:
        output = kind.__call__(self, images.flip(1) if swaps_channels else images)
        return output if convert is None else convert(output, (images.shape[2], images.shape[3]))

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return module
