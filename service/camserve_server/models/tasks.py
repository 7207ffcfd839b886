"""Outputs of models by task: logits of classes, logits of every pixel, objects with boxes, or embeddings."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from camserve_server.core.errors import ConfigError, FailedPrecondition
from camserve_server.models import detectors, endings, pyramid
from camserve_server.models.endings import Ending
from camserve_server.models.hooks import first_tensor
from camserve_server.models.independence import Dependence
from camserve_server.models.outputs import OBJECT_COLUMNS
from camserve_server.models.values import Activation, LayerInfo, Task

OBJECT_KEYS = ("boxes", "labels", "scores")
"""Keys of each image's objects in the output of torchvision's detectors."""


WITH_CLASSES = ("classify", "multilabel", "segment")
"""Tasks of networks whose outputs are logits, of which camserve makes probabilities."""

LEAST_SHARE = 4
"""Logits of every pixel have at least a quarter of the input's rows and columns; features of a backbone have fewer."""


def task_of(output: Any, size: tuple[int, int] | None = None) -> Task:
    """Return the task of a model by its output: boxes, logits of every pixel, or logits of classes.

    Boxes are in a list of dictionaries, as torchvision's detectors return them. Logits of every pixel are the entry
    "out" of a dictionary, as torchvision's segmentation models return them, or have nearly the size of the input, as
    those of a U-Net. Logits of classes may also be an attribute or entry `logits` of the output, as in transformers.

    Args:
        output: the output.
        size: height and width of the input; None if no output is to be recognised by it.
    """
    if isinstance(output, Sequence) and output and all(_has_keys(item, OBJECT_KEYS) for item in output):
        return "detect"
    tensor = None if size is None or _has_several_parts(output) else _main_tensor(output)
    if size and tensor is not None and tensor.dim() == 4 and tensor.shape[2:].numel() > 1:  # noqa: PLR2004 -- [B,C,h,w]
        rows, columns = tensor.shape[2:]
        return "segment" if LEAST_SHARE * rows >= size[0] and LEAST_SHARE * columns >= size[1] else "classify"
    return "segment" if _has_keys(output, ("out",)) else "classify"


def _has_keys(output: Any, names: Sequence[str]) -> bool:
    return isinstance(output, Mapping) and all(name in output for name in names)


def values_of(output: Any, task: Task, images: int | None = None) -> Tensor:
    """Return the output of a model as one tensor, in the form of `outputs.Outputs.values`.

    Args:
        output: the output.
        task: the task.
        images: the number of images in the batch; None if the output has one number for each.

    Raises:
        FailedPrecondition: the output has no tensor.
    """
    if task == "detect":
        return pad_sequence([_objects(item) for item in output], batch_first=True, padding_value=-1.0)
    tensor = _main_tensor(output)
    if tensor is None:
        raise FailedPrecondition("the model returns no tensor of numbers")
    return tensor if task == "segment" else _rows(tensor, images)


def _rows(tensor: Tensor, images: int | None) -> Tensor:
    """Return an output with one row for each image, also that of a 1 × 1 convolution, or one that `squeeze` changed."""
    if tensor.dim() == 4 and tensor.shape[2:].numel() == 1:  # noqa: PLR2004 -- [B,C,1,1]
        return tensor.flatten(1)
    if tensor.dim() > 1:
        return tensor
    return tensor.reshape(-1, 1) if images is None else tensor.reshape(images, -1)


def _main_tensor(output: Any) -> Tensor | None:
    """Return an output's entry "out" or its logits, else its first floating-point tensor."""
    if _has_keys(output, ("out",)):
        return cast("Tensor", output["out"])
    logits = _logits(output)
    return first_tensor(_parts(output)) if logits is None else logits


def _logits(output: Any) -> Tensor | None:
    """Return the tensor that an output names "logits", as an attribute or an entry; None without one."""
    parts = _parts(output)
    logits = parts.get("logits") if isinstance(parts, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _parts(output: Any) -> Any:
    """Return a dataclass as the mapping of its fields; any other output as it is."""
    if not dataclasses.is_dataclass(output) or isinstance(output, Mapping | type):
        return output
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}


def _objects(detection: Mapping[str, Tensor]) -> Tensor:
    """Return one image's objects by descending score, in the form of `outputs.Outputs.values`."""
    scores = detection["scores"].float()
    parts = [detection["labels"][:, None], scores[:, None], detection["boxes"]]
    if "class_scores" in detection:
        parts.append(detection["class_scores"])
    objects = torch.cat([part.to(scores) for part in parts], 1)
    return objects[(-scores.detach()).argsort(stable=True)]


class Trial:
    """A single run of a model that finds its task.

    Args:
        task: the task that the model is declared to have; None to find it out.
        labels: the labels of its classes, if known.
        queries: the number of its tokens that ask for one object each.
        activation: what made probabilities of its logits; None to find it out.

    Attributes:
        task: the task.
        classes: the number of classes, or the length of the embedding.
        trunk: the names of the layers that may be the default layer; None for all.
        queries: the number of its tokens that ask for one object each.
        graph: the autograd graph of a detector's objects; empty for any other model.
        object_classes: the number of classes in which a detector scores each object; 0 if it scores only one.
        dependence: what its outputs depend on besides the image.
        differentiable: True if the scores have a gradient at the image.
        ending: how the network ends, if it has classes.
    """

    def __init__(
        self,
        task: Task | None = None,
        labels: Collection[str] = (),
        queries: int = 0,
        activation: Activation | None = "none",
    ) -> None:
        self.task: Task = task or "classify"
        self.classes = 0
        self.trunk: set[str] | None = None
        self.queries = queries
        self.object_classes = 0
        self.dependence = Dependence()
        self.differentiable = True
        self.ending = Ending()
        self._activation = activation
        self._output: Any = None
        self._declared_task = task
        self._labels = labels
        self.graph = pyramid.ObjectGraph()
        self._pyramid = detectors.Pyramid()
        self._collectors: set[str] = set()
        self._objects: Mapping[str, Tensor] = {}
        self._values: Tensor | None = None
        self._has_logits = False

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Make a detector report all objects inside the block, and record its feature pyramid."""
        with ExitStack() as stack:
            stack.enter_context(detectors.without_score_threshold(model))
            self._pyramid = stack.enter_context(detectors.record_pyramid(model))
            self._collectors = stack.enter_context(pyramid.record_collectors(model))
            yield

    def scores(self, model: nn.Module, output: Any, size: tuple[int, int] | None = None) -> Tensor:
        """Return scores [1, n] that together depend on the whole output for one image.

        Args:
            model: the model.
            output: its output.
            size: height and width of the image.

        Raises:
            ConfigError: the output does not fit the task.
        """
        self.task, self._output = self._declared_task or task_of(output, size), output
        self._values = values = _checked_values(output, self.task)
        self._has_logits = _logits(output) is not None
        if self.task != "detect":
            self.classes = values.shape[1]
            return values.mean((2, 3)) if self.task == "segment" else values
        self.classes, self._objects = detectors.classes_of(model, self._labels), output[0]
        self.object_classes = values.shape[2] - OBJECT_COLUMNS
        return values[:, :, 1]

    def find_ending(self, model: nn.Module, outputs: Mapping[str, Tensor | None]) -> None:
        """Find out how a network with classes ends, after its run; see `endings.find`."""
        if self._activation == "none" or self.task not in WITH_CLASSES or self._values is None:
            return
        self.ending = endings.find(model, self._output, self._values, outputs, self._activation)

    def find_trunk(self, model: nn.Module, outputs: Mapping[str, Tensor | None]) -> None:
        """Find the layers that may be the default layer.

        For a detector these are the layers that all scales depend on. For a segmentation model they are the backbone's,
        as in torchvision, or the layers before the one with a channel per class. Those of transformers, whose output
        has `logits`, decode features to a finer grid than the backbone's.

        Args:
            model: the model, after its run.
            outputs: the output of each module, on the graph, by name.
        """
        if self.task == "detect":
            self.graph = pyramid.ObjectGraph.of(self._objects, outputs, self._collectors)
            before = detectors.layers_before_pyramid(model, self._pyramid, outputs) if self._pyramid.maps else None
            self.trunk = before or set(outputs) - self._collectors
        if self.task == "segment" and self._values is not None:
            backbone = {name for name in outputs if name.startswith("backbone.") and not self._has_logits}
            self.trunk = backbone or _layers_before_classes(model, outputs, self._values)


def _layers_before_classes(model: nn.Module, outputs: Mapping[str, Tensor | None], values: Tensor) -> set[str] | None:
    """Return the modules that finish before the last module with weights whose output has a channel per class.

    Modules of which the logits do not depend, such as an auxiliary head, do not count.
    """
    used, channels = pyramid.ancestors(values.grad_fn), values.shape[1:2]
    ends = [
        index
        for index, (name, output) in enumerate(outputs.items())
        if output is not None and output.shape[1:2] == channels and output.grad_fn in used and _has_weights(model, name)
    ]
    return set(list(outputs)[: ends[-1]]) if ends else None


def _has_weights(model: nn.Module, name: str) -> bool:
    return any(True for _ in model.get_submodule(name).parameters(recurse=False))


def _checked_values(output: Any, task: Task) -> Tensor:
    """Return the output for one image as a tensor, if it fits the task."""
    if task == "detect":
        _check_objects(output)
        return values_of(output, task, 1)
    if task == "segment":
        if _dims(output) != 4:  # noqa: PLR2004 -- [batch, classes, height, width]
            raise ConfigError(
                f"it is not a segmentation model: it returns {_description(output)}, not [batch, classes, h, w]"
            )
    elif _has_several_parts(output) or _dims(output, rows=True) != 2:  # noqa: PLR2004 -- [batch, classes]
        hint = "; task=segment explains classes of places" if _dims(output) == 4 else ""  # noqa: PLR2004 -- [B,C,h,w]
        raise ConfigError(f"it is not a classifier: it returns {_description(output)}, not [batch, classes]{hint}")
    values = values_of(output, task, 1)
    if len(values) != 1:
        shape = list(values.shape)
        raise ConfigError(
            f"its output for one image is {shape}: the axis of the batch comes first, as in [batch, classes]"
        )
    return values


def _check_objects(output: Any) -> None:
    """Check that an output is that of a detector, which has found an object."""
    if task_of(output) != "detect":
        raise ConfigError(f"it is not a detector: it returns {_description(output)}, not boxes, labels and scores")
    if not len(output[0]["scores"]):
        raise ConfigError(
            "it finds no object in an image of noise, so its layers cannot be probed: keep the lowest score that "
            "it reports in an attribute score_thresh, which is lowered meanwhile"
        )
    others = output[0].get("class_scores")
    if others is not None and (others.dim() != 2 or len(others) != len(output[0]["scores"])):  # noqa: PLR2004
        raise ConfigError(f"its class_scores are {list(others.shape)} and not [objects, classes]")


def _has_several_parts(output: Any) -> bool:
    parts = _parts(output)
    if not isinstance(parts, dict | list) or _logits(output) is not None:
        return False
    values = parts.values() if isinstance(parts, dict) else parts
    return len(parts) > 1 or not all(isinstance(value, Tensor) for value in values)


def _dims(output: Any, *, rows: bool = False) -> int:
    tensor = _main_tensor(output)
    if tensor is None:
        return 0
    return (_rows(tensor, 1) if rows else tensor).dim()


def _description(output: Any) -> str:
    parts = _parts(output)
    if isinstance(parts, Mapping) and len(parts) > 1:
        return f"several outputs ({', '.join(map(str, parts))}: name one with output=)"
    if isinstance(output, list) and len(output) > 1:
        return f"{len(output)} outputs (name one by its index with output=)"
    tensor = _main_tensor(output)
    return f"a tensor {list(tensor.shape)}" if tensor is not None else "no tensor"


def embedding_layer(model: nn.Module, layers: Mapping[str, LayerInfo], classes: int) -> str:
    """Return the last linear layer of a classifier, whose input is the image's embedding; empty without one."""
    ends = [
        name
        for name, layer in layers.items()
        if isinstance(model.get_submodule(name), nn.Linear) and layer.shape == (1, classes) and layer.calls == 1
    ]
    return ends[-1] if ends else ""
