"""Memory layout of images and convolution weights, chosen by timing both.

cuDNN has kernels for contiguous images (channels first) and for channels last. Half precision is usually faster
channels last, float32 without TF32 is often faster contiguous. The faster one depends on the GPU, the precision and the
model, so both layouts are timed when a model is loaded (docs/decisions/031-gpu-memory-layout.md). On an
H100, channels last was chosen for every model and precision (docs/decisions/048-first-measurements-on-a-gpu.md).

On a CPU nothing is timed, and the layout is channels last unless the model has a group norm. Measured with two threads,
float32, as multiples of the speed of a contiguous forward pass, batch 1, 8 and 32: resnet50 1.06, 1.22 and 1.33,
mobilenet_v3_large 1.30, 1.42 and 1.56, convnext_tiny and vit_b_16 1.00 (benchmarks/RESULTS.md).
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

from camserve_server.core.devices import Device, device_for
from camserve_server.models.hooks import capture_layers
from camserve_server.models.values import ModelInfo

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TIMED_ROWS = 8
"""Size of the timed batch, if the size of the largest batch is not known."""

ROUNDS = 5
"""Batches timed in each layout, after one untimed batch in each for first-use initialisation."""

MIN_SPEEDUP = 1.05
"""Smallest speedup of contiguous over channels last for which contiguous is used.

Timings are not exact. Without a margin, a model that is equally fast in both would change its layout from one start of
the server to the next, and the last bits of its results with it.
"""

MEMORY_FORMATS = {True: torch.channels_last, False: torch.contiguous_format}
"""Memory formats: True for channels last, False for contiguous."""


def noise_images(info: ModelInfo, rows: int, *, channels_last: bool = True) -> Tensor:
    """Return images of noise [rows,C,H,W] on a model's device, always the same."""
    shape, generator = (rows, info.channels, *info.preprocess.size), torch.Generator().manual_seed(0)
    dtype = torch.float64 if info.precision == "float64" else torch.float32
    return (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        .to(info.device, dtype)
        .contiguous(memory_format=MEMORY_FORMATS[channels_last])
    )


def set_layout(weights: Sequence[nn.Parameter], *, channels_last: bool) -> None:
    """Put convolution weights into a layout, in place."""
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=MEMORY_FORMATS[channels_last])


class _FindGroupNorm(TorchFunctionMode):
    """Finds out whether a group norm runs inside the block.

    torch's kernel for channels last on a CPU computes the variance as the mean of squares minus the square of the mean.
    For a group of 50,000 values with mean 2 and deviation 0.3, its output is off by 2e-4 of its maximum in float32, and
    that for contiguous tensors by 1e-7 (torch 2.14.1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found = self.found or function in _GROUP_NORMS
        return function(*args, **(kwargs or {}))


_GROUP_NORMS = (nn.functional.group_norm, torch.group_norm, torch.native_group_norm)


def run_channels_last(info: ModelInfo, run: Callable[[Tensor], Result]) -> Result | None:
    """Run a model on an image that is channels last.

    Args:
        info: its description.
        run: runs it on an image [1,C,H,W].

    Returns:
        What `run` returns. None if the model does not run on such images, as one with `x.view(len(x), -1)`, or if it
        is less precise on them than on contiguous ones, as one with group norms is on a CPU.
    """
    try:
        with torch.no_grad(), _FindGroupNorm() as mode:
            result = run(noise_images(info, 1))
    except Exception as error:  # noqa: BLE001 -- a user's module may raise anything; it has run on a contiguous image
        log.info("model %s runs contiguous: not channels_last (%s)", info.name, error)
        return None
    if mode.found and device_for(info.device).is_cpu:
        log.info("model %s runs contiguous: its group norms would be less precise channels_last", info.name)
        return None
    return result


def is_channels_last_faster(
    module: nn.Module,
    info: ModelInfo,
    weights: Sequence[nn.Parameter] = (),
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = TIMED_ROWS,
) -> bool:
    """Choose the layout in which a model, or its accelerated copy, computes Grad-CAM faster.

    Channels last on a CPU. A wrong choice costs only time. If the timing fails, images stay channels last.

    Args:
        module: the module, frozen, in evaluation mode, on its device.
        info: the description of the model.
        weights: convolution weights that belong to the module alone; they are put into the chosen layout.
        dtype: the type of the module's input.
        rows: size of the timed batch; half as many, or fewer, if the device has too little memory for it.
    """
    device = device_for(info.device)
    if device.is_cpu:
        return True
    faster = True
    try:
        ratio, rows = _time_ratio(device, partial(_seconds, module, info, weights, dtype), rows)
        faster = ratio * MIN_SPEEDUP >= 1
        names = "channels_last", "contiguous"
        chosen, other, times = (*names, ratio) if faster else (*reversed(names), 1 / ratio)
        log.info(
            "model %s runs %s: %s takes %.2f times as long, in batches of %d", info.name, chosen, other, times, rows
        )
    except Exception as error:  # noqa: BLE001 -- a user's model may raise anything; its warm-up decides if it can be served
        reason = f"{type(error).__name__}: {error}"
        log.warning("model %s runs channels_last: the memory layouts could not be timed (%s)", info.name, reason)
    set_layout(weights, channels_last=faster)
    device.release_memory()  # a batch may run in its own stream, which cannot use memory that is reserved here
    return faster


def _time_ratio(device: Device, seconds: Callable[[int], tuple[float, float]], rows: int) -> tuple[float, int]:
    """Return the time of a contiguous batch divided by that of a channels-last one, and the rows of both."""
    while True:
        try:
            channels_last, contiguous = seconds(rows)
            return contiguous / channels_last, rows
        except Exception as error:  # the libraries below torch may raise anything
            if rows == 1 or not device.is_out_of_memory(error):
                raise
        device.release_memory()  # not inside the block: the error holds the tensors that fill the memory
        rows //= 2


def _seconds(
    module: nn.Module, info: ModelInfo, weights: Sequence[nn.Parameter], dtype: torch.dtype, rows: int
) -> tuple[float, float]:
    """Return the time of a batch in seconds, channels last and contiguous: the median of alternating rounds."""
    device = device_for(info.device)
    batches = {last: noise_images(info, rows, channels_last=last).to(dtype) for last in MEMORY_FORMATS}
    times: dict[bool, list[float]] = {last: [] for last in MEMORY_FORMATS}
    for _ in range(ROUNDS + 1):  # alternating, so that other load on the machine slows both
        for last, measured in times.items():
            set_layout(weights, channels_last=last)
            measured.append(device.measure(partial(_compute_gradcam, module, info, batches[last])))
    return median(times[True][1:]), median(times[False][1:])


def _compute_gradcam(module: nn.Module, info: ModelInfo, batch: Tensor) -> None:
    """Compute what Grad-CAM needs: a forward pass, and a backward pass down to the default layer."""
    precision: torch.dtype = getattr(torch, info.precision)
    half = precision != torch.float32 and batch.dtype == torch.float32  # otherwise the weights have that precision
    autocast = torch.autocast(batch.device.type, precision if half else torch.bfloat16, enabled=half)
    layers = {name: module.get_submodule(name) for name in info.default_layers}
    with torch.enable_grad(), capture_layers(layers), autocast:
        output = module(batch.clone())  # a model may change its input in place
        sums = [part.sum() for part in pytree.tree_leaves(output) if isinstance(part, Tensor) and part.requires_grad]
    if sums:
        torch.autograd.backward(sums)
