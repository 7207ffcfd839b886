"""Explain a network in this process, without a server."""

import asyncio
import math
import threading
import weakref
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_args

import numpy as np
import torch
from torch import Tensor, nn

import camserve
from camserve_server.api import inprocess
from camserve_server.app import server
from camserve_server.core import config
from camserve_server.core.errors import ConfigError, ServiceError, did_you_mean
from camserve_server.core.hardware import cores
from camserve_server.imaging import inputs
from camserve_server.imaging.transforms import Transform
from camserve_server.models import ModelSpec, Source, TextTower, parse, search_current_folder, spec_of_network
from camserve_server.models.heads import Output
from camserve_server.models.live import unwrap
from camserve_server.models.source import DEFAULT_PREPROCESS, Labels, names_of
from camserve_server.models.stem import RGB, input_channels, of_channels
from camserve_server.models.values import Activation, DeclaredTask, Task
from camserve_server.models.weights import PART_WRAPPER

if TYPE_CHECKING:
    from camserve_server.imaging.values import Preprocess
    from camserve_server.serving.explain import Pipeline


ROOM = {"max_pixels": 89_478_485, "max_side": 2**16, "max_drawn_pixels": 2**30}
"""Limits on photos of the caller's own, such as scans and those of a phone. Pillow opens no larger pictures."""


class NetworkOptions(TypedDict, total=False):
    """Options that describe a network. All are optional.

    Attributes:
        size: Height and width of the input in pixels, or one number for both. Default: the size that `transform`
            returns, else 224.
        crop: Share of the photo's shorter side to keep around its centre, up to 1; "whole" squashes the whole photo
            into the input. Default: 0.875, or the part that a `transform` shows.
        mean: Mean of each channel, RGB from 0 to 1. Default: ImageNet's.
        std: Standard deviation of each channel. Default: ImageNet's.
        labels: Labels of the classes, in the order of the logits; or a mapping such as `config.id2label` of
            transformers or `class_to_idx` of torchvision.
        transform: Function that turns a photo into the input [3, H, W], instead of a resize, a crop and a
            normalisation, such as a transform of torchvision or Albumentations, or an image processor of
            transformers. It gets a PIL image; if it fails with that, a uint8 array [height, width, 3].
        output: Key, attribute or index of the output to explain, if the network has several; or a function that turns
            the network's output into logits [B, classes].
        task: Task of the network, such as "multilabel", or "binary" for one logit for two classes. Default:
            detected by running it.
        activation: The softmax or sigmoid that the network applies to its logits itself, "softmax" or "sigmoid"; "none"
            if its outputs are logits. Default: detected by running it.
        accelerate: True to run a faster copy of the network where one exists. Default: True.
        text: Text encoder of a network whose output is an embedding of the image, such as that of CLIP. Labels are then
            texts.

    Example:
        >>> from torch import nn
        >>> from camserve_server import Explainer
        >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> with Explainer(network, size=64, labels=["cat", "dog"], mean=[0.5] * 3, std=[0.25] * 3) as explainer:
        ...     model = explainer.model()
        >>> model.labels, (model.input_height, model.input_width)
        (('cat', 'dog'), (64, 64))
    """

    size: int | inputs.Size | None
    crop: inputs.Crop | None
    mean: Sequence[float]
    std: Sequence[float]
    labels: Labels
    transform: Transform | None
    output: Output | str | int | None
    task: DeclaredTask | None
    activation: Activation | None
    accelerate: bool
    text: TextTower | None


class Explainer(camserve.Client):
    """Explains a network in this process, or any model by its spec, with the client's methods and without a server.

    It opens no port and starts no process. It does not change the network: its modes, hooks, device, parameters and
    buffers stay as they are. Its parameters share their memory with the explainer, so do not train the network during a
    call. After a training step, call `refresh`.

    All methods that take a photo also take a preprocessed input of the network: a float tensor or array [C, H, W]. An
    array of floats [H, W] or [H, W, C] is a photo, as is every array for a spec.

    Args:
        model: A `torch.nn.Module`, or a model spec such as "timm:resnet50?weights=default".
        device: Device to compute on. Default: the network's own; for a spec, the first GPU, else the CPU.
        timeout: Seconds that a call may take. Default: no limit.
        settings: Settings of the server by name, such as `{"max_batch_rows": 16}`.
        **options: Description of the network: see `NetworkOptions`. Not for a spec, which contains it.

    Raises:
        ConfigError: The model cannot be explained as described.

    Example:
        >>> from torch import nn
        >>> from camserve_server import Explainer
        >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> with Explainer(network, size=64, labels=["cat", "dog"]) as explainer:
        ...     result = explainer.explain("cat.jpg", targets=["cat"])
        >>> result.explanations[0].heading, result.explanations[0].heatmap.shape
        ('cat · gradcam', (8, 8))
    """

    def __init__(
        self,
        model: nn.Module | str,
        *,
        device: str | None = None,
        timeout: float = math.inf,
        settings: Mapping[str, Any] | None = None,
        **options: Unpack[NetworkOptions],
    ) -> None:
        if isinstance(model, str) and options:
            raise ConfigError(f"{', '.join(options)}: only for a network; a model spec contains its own options")
        spec = _spec(model) if isinstance(model, str) else _spec_of(model, options)
        self._preprocess: Preprocess | None = spec.live and spec.live.preprocess
        self._network: nn.Module | None = spec.live and spec.live.module
        flags = {
            "device": device or ("auto" if isinstance(model, str) else _device_of(model)),
            "isolation": "thread",
            "threads": min(torch.get_num_threads(), cores()),
            "max_queue_delay_ms": 0,
            **ROOM,
            **(settings or {}),
        }
        self._service = _Service(config.load(flags=flags, environment={}), spec)
        # A notebook may create another explainer without closing this one. At the end of the process nothing is
        # stopped: executors are shut down before finalizers run, so the event loop would print that it cannot stop.
        weakref.finalize(self, self._service.stop).atexit = False
        super().__init__("in-process", channel=self._service.channel, timeout=timeout)

    def close(self) -> None:
        """Cancel the calls in progress, and free the model.

        Example:
            >>> from torch import nn
            >>> from camserve_server import Explainer
            >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            >>> explainer = Explainer(network, size=64)
            >>> explainer.close()
            >>> try:
            ...     explainer.explain("cat.jpg")
            ... except camserve.FailedPrecondition as error:
            ...     print(error.message)
            the client is closed
        """
        super().close()
        self._service.close()

    def refresh(self) -> None:
        """Use the network's current weights, after a training step.

        Raises:
            ConfigError: The network can no longer be explained.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from camserve_server import Explainer
            >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            >>> with Explainer(network, size=64) as explainer:
            ...     with torch.no_grad():  # in place of a training step
            ...         _ = network[0].weight.zero_(), network[0].bias.copy_(torch.tensor([1.0, 2.0]))
            ...     explainer.refresh()
            ...     result = explainer.explain("cat.jpg")
            >>> [round(prediction.score, 1) for prediction in result.predictions]
            [2.0, 1.0]
        """
        self._service.refresh()

    def file_of(self, image: Any) -> bytes:
        """Encode an image, or a preprocessed input, as a file.

        Args:
            image: An image as for `explain`, or a float tensor or array [C, H, W].

        Raises:
            InvalidArgument: The value is neither.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from camserve_server import Explainer
            >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            >>> with Explainer(network, size=64) as explainer:
            ...     file = explainer.file_of(torch.zeros(3, 64, 64))
            >>> file[1:4]
            b'PNG'
        """
        if isinstance(image, np.ndarray) and np.issubdtype(image.dtype, np.floating) and not self._is_photo(image):
            image = torch.from_numpy(image)
        if not isinstance(image, Tensor):
            return super().file_of(image)
        if self._preprocess is None:
            raise camserve.InvalidArgument("image: a model with a spec takes photos, not tensors")
        try:
            return inputs.file_of(image, self._preprocess)
        except ServiceError as error:
            raise camserve.InvalidArgument(f"image: {error.message}", fields={"image": error.message}) from error

    def named(self, options: Any) -> Any:
        """Return the options of a call: names in place of modules of the network, files in place of its inputs.

        Args:
            options: options of a call, or an item of `explain_many`. `layers` and `layer` may be modules, and the image
                of a similarity an input of the network.

        Raises:
            InvalidArgument: A module is not one of the network, or an input does not fit it.

        Example:
            >>> from torch import nn
            >>> from camserve_server import Explainer
            >>> network = nn.Sequential(nn.Conv2d(3, 2, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            >>> with Explainer(network, size=64) as explainer:
            ...     explainer.named({"layers": [network[1]]})
            {'layers': ['1']}
        """
        if not isinstance(options, Mapping):
            return options
        named = {name: self._names_of(options[name]) for name in ("layers", "layer") if name in options}
        named |= {name: self._with_files(options[name]) for name in ("targets", "target") if name in options}
        return {**options, **named} if named else options

    def _with_files(self, targets: Any) -> Any:
        if isinstance(targets, list | tuple):
            return [self._with_files(target) for target in targets]
        if isinstance(targets, camserve.Similarity) and isinstance(targets.image, Tensor | np.ndarray):
            return replace(targets, image=self.file_of(targets.image))
        return targets

    def _names_of(self, layers: Any) -> Any:
        if isinstance(layers, nn.Module):
            return self._name_of(layers)
        if isinstance(layers, list | tuple):
            return [self._name_of(layer) if isinstance(layer, nn.Module) else layer for layer in layers]
        return layers

    def _name_of(self, layer: nn.Module) -> str:
        for name, module in self._network.named_modules() if self._network else ():
            if module is layer and name:
                return PART_WRAPPER.sub("", f".{name}")[1:]
        kind = type(layer).__name__
        raise camserve.InvalidArgument(f"layers: this {kind} is no module inside the network")

    def _is_photo(self, array: np.ndarray) -> bool:
        """Return true for an array of floats [H,W] or [H,W,C], and false for the network's input [C,H,W]."""
        if self._preprocess is None or array.ndim == 2:  # noqa: PLR2004 -- rows and columns
            return True
        channels = self._preprocess.channels
        return array.ndim == 3 and array.shape[-1] == channels != array.shape[0]  # noqa: PLR2004 -- and channels


def _spec_of(network: nn.Module, options: NetworkOptions) -> ModelSpec:
    """Return the spec of a network.

    Raises:
        ConfigError: it is not a network, or an option is unknown or invalid.
    """
    if unknown := options.keys() - NetworkOptions.__annotations__.keys():
        name = min(unknown)
        raise ConfigError(f'unknown option "{name}"{did_you_mean(name, NetworkOptions.__annotations__)}')
    _check(options)
    mean, std = _statistics_of(network, options)
    preprocess = inputs.preprocess_of(options.get("size"), options.get("crop"), mean, std, options.get("transform"))
    labels, text = names_of(options.get("labels")), options.get("text")
    task = options.get("task") or ("embed" if text else None)
    source = Source(
        network, preprocess, labels, task, options.get("output"), text, activation=options.get("activation")
    )
    spec = spec_of_network(type(unwrap(network)).__name__, source, shared=True)
    return replace(spec, accelerate=options.get("accelerate", True))


def _check(options: NetworkOptions) -> None:
    """Check the options whose values are of a few kinds."""
    for name, choices in (("task", (*get_args(Task), "binary")), ("activation", get_args(Activation))):
        value: Any = options.get(name)
        if value is not None and value not in choices:
            raise ConfigError(f'{name}="{value}"{did_you_mean(str(value), choices)}: one of {", ".join(choices)}')
    accelerate, text = options.get("accelerate", True), options.get("text")
    if not isinstance(accelerate, bool):
        raise ConfigError(f"accelerate={accelerate!r}: True or False")
    if text is not None and not isinstance(text, TextTower):
        raise ConfigError(f"text is a {type(text).__name__}: give a camserve_server.models.TextTower")


def _statistics_of(network: nn.Module, options: NetworkOptions) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the deviation of each channel: ImageNet's, or their averages for other channels than RGB."""
    mean, std = options.get("mean"), options.get("std")
    channels = next((len(each) for each in (mean, std) if isinstance(each, Sized)), 0)
    if mean is None and std is None and "transform" not in options and isinstance(network, nn.Module):
        size = options.get("size")
        channels = input_channels(unwrap(network), *inputs.size_of(inputs.SIDE if size is None else size))
    usual = of_channels(DEFAULT_PREPROCESS, channels or RGB)
    return usual.mean if mean is None else mean, usual.std if std is None else std


def _spec(text: str) -> ModelSpec:
    spec = parse(text)
    search_current_folder(spec)
    return spec


def _device_of(network: nn.Module) -> str:
    """Return the device of a network's first parameter; the CPU if it has none."""
    return str(next((parameter.device for parameter in network.parameters()), "cpu"))


class _Service:
    """A worker and its services, on an event loop in a thread of their own.

    Args:
        settings: settings of the server.
        spec: spec of the model.

    Raises:
        ConfigError: the model cannot be loaded.

    Attributes:
        channel: a `grpc.Channel` to the services.
    """

    def __init__(self, settings: config.Settings, spec: ModelSpec) -> None:
        self._name = spec.name
        started: Future[tuple[asyncio.AbstractEventLoop, Pipeline, inprocess.Services]] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(settings, spec, started), name="camserve-explainer", daemon=True
        )
        self._thread.start()
        self._loop, self._pipeline, services = started.result()
        self.channel: Any = inprocess.Channel(self._loop, services)

    def _run(self, settings: config.Settings, spec: ModelSpec, started: "Future[Any]") -> None:
        async def main() -> None:
            async with server.open_pipeline(settings, specs={spec.name: spec}, watch=False) as pipeline:
                services = inprocess.services_of(pipeline, settings.stream_in_flight)
                started.set_result((asyncio.get_running_loop(), pipeline, services))
                await self._stop.wait()

        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    def refresh(self) -> None:
        """Load the model again."""
        asyncio.run_coroutine_threadsafe(self._pipeline.repository.reload(self._name), self._loop).result()

    def stop(self) -> None:
        """Start to stop; thread-safe."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Stop, and wait until the model is freed."""
        self.stop()
        self._thread.join()
