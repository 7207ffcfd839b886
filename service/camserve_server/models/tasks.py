"""What models answer with, beside logits of classes: a class for every pixel, boxes, embeddings."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from camserve_server.core.errors import ConfigError, FailedPrecondition
from camserve_server.models import detectors
from camserve_server.models.hooks import first_tensor
from camserve_server.models.values import LayerInfo, Task

OBJECT = ("boxes", "labels", "scores")
"""What torchvision's detectors say of each image's objects."""


def task_of(output: Any) -> Task:
    """Tell by its output what a model answers with: boxes, a class for every pixel, or logits of classes.

    Boxes come as torchvision's detectors give them, in a list of dictionaries; a class for every pixel as its
    segmentation models do, in a dictionary with an entry "out". Logits may also be an output's attribute `logits`, as
    transformers has it.
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
    tensor = _tensor(output)
    if tensor is None:
        raise FailedPrecondition("the model answers with no tensor of numbers")
    return tensor


def _tensor(output: Any) -> Tensor | None:
    """Return the answer among all that an output may hold: what is called so, else its first tensor of numbers."""
    if _has(output, ("out",)):
        return cast("Tensor", output["out"])
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else first_tensor(output)


def _objects(found: Mapping[str, Tensor]) -> Tensor:
    """Return one image's objects [n, 6]: class, score, left, top, right, bottom; the most certain first."""
    scores = found["scores"].float()
    objects = torch.cat([found["labels"].to(scores)[:, None], scores[:, None], found["boxes"].to(scores)], 1)
    return objects[(-scores.detach()).argsort(stable=True)]


class Trial:
    """One run of a model, that shows what it answers with.

    Args:
        wanted: what it is said to answer with; None to find out.
        labels: of its classes, where they are known.

    Attributes:
        task: what it answers with.
        classes: how many it knows; how long its embedding is.
        trunk: names of the layers among which the default is; None for all.
    """

    def __init__(self, wanted: Task | None = None, labels: Collection[str] = ()) -> None:
        self.task: Task = wanted or "classify"
        self.classes = 0
        self.trunk: set[str] | None = None
        self._wanted = wanted
        self._labels = labels
        self._pyramid = detectors.Pyramid()

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Have a model that runs in the block say all that it can."""
        with detectors.lenient(model), detectors.pyramid_of(model) as self._pyramid:
            yield

    def scores(self, model: nn.Module, output: Any) -> Tensor:
        """Return scores [1, n] that together depend on all that the model answered to one image.

        Raises:
            ConfigError: it answered with something else than its task says.
        """
        self.task = self._wanted or task_of(output)
        values = _checked(output, self.task)
        if self.task != "detect":
            self.classes = values.shape[1]
            return values.mean((2, 3)) if self.task == "segment" else values
        self.classes = detectors.classes_of(model, self._labels)
        return values[:, :, 1]

    def seek(self, model: nn.Module, outputs: Mapping[str, Tensor | None]) -> None:
        """Find the layers among which the default is.

        Of a detector these are what all of its scales are made from; of a segmentation what comes before the classes.

        Args:
            model: that was run.
            outputs: of each module, on the graph, by name.
        """
        if self.task == "detect" and self._pyramid.maps:
            self.trunk = detectors.below(model, self._pyramid, outputs)
        if self.task == "segment":
            inside = {name for name in outputs if name.startswith("backbone.")}
            self.trunk = inside or _before_classes(model, outputs, self.classes)


def _before_classes(model: nn.Module, outputs: Mapping[str, Tensor | None], classes: int) -> set[str] | None:
    """Return the modules that end before the last one with weights that answers with a channel for each class."""
    ends = [
        place
        for place, (name, one) in enumerate(outputs.items())
        if one is not None and one.shape[1:2] == (classes,) and _has_weights(model, name)
    ]
    return set(list(outputs)[: ends[-1]]) if ends else None


def _has_weights(model: nn.Module, name: str) -> bool:
    return any(True for _ in model.get_submodule(name).parameters(recurse=False))


def _checked(output: Any, task: Task) -> Tensor:
    """Return what a model answered to one image, if it fits its task."""
    if task == "detect":
        if task_of(output) != "detect":
            raise ConfigError(f"it is no detector: it answers with {_shown(output)}, not boxes, labels and scores")
        if not len(output[0]["scores"]):
            raise ConfigError("it finds no object in an image of noise, however unsure, so its layers cannot be told")
    elif task == "segment":
        if _dims(output) != 4:  # noqa: PLR2004 -- [batch, classes, height, width]
            raise ConfigError(f"it is no segmentation: it answers with {_shown(output)}, not [batch, classes, h, w]")
    elif _is_several(output) or _dims(output) != 2:  # noqa: PLR2004 -- [batch, classes]
        raise ConfigError(f"it is no classifier: it answers with {_shown(output)}, not [batch, classes]")
    return values_of(output, task)


def _is_several(output: Any) -> bool:
    return isinstance(output, dict | list) and not isinstance(getattr(output, "logits", None), Tensor)


def _dims(output: Any) -> int:
    found = _tensor(output)
    return found.dim() if isinstance(found, Tensor) else 0


def _shown(output: Any) -> str:
    tensor = _tensor(output)
    return f"a tensor {list(tensor.shape)}" if tensor is not None else "no tensor"


def embedding_layer(model: nn.Module, layers: Mapping[str, LayerInfo], classes: int) -> str:
    """Return the linear layer that a classifier ends in, whose input is the image's embedding; nothing without one."""
    ends = [
        name
        for name, layer in layers.items()
        if isinstance(model.get_submodule(name), nn.Linear) and layer.shape == (1, classes) and layer.calls == 1
    ]
    return ends[-1] if ends else ""
