"""Memory layout of images and convolution weights, chosen by timing both.

cuDNN has kernels for contiguous images (channels first) and for channels last. Half precision is usually faster
channels last, float32 without TF32 is often faster contiguous: it depends on the GPU, the precision and the model. So
both layouts are timed when a model is loaded. On a CPU the layout is always channels last.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows

from camserve_server.devices import Device, device_of
from camserve_server.hooks import watching
from camserve_server.types import ModelInfo

log = logging.getLogger(__name__)

ROWS = 8
"""Size of the batch that is timed, where the largest batch that will run is not known."""

ROUNDS = 5
"""Batches timed in each layout. One more in each, before these, pays for what is made on first use."""

GAIN = 1.05
"""How many times as fast contiguous must be to replace channels last.

Timings are not exact. Without a margin, a model that is equally fast in both would change its layout, and with it the
last bits of its answers, from one start of the server to the next.
"""

FORMATS = {True: torch.channels_last, False: torch.contiguous_format}
"""Memory formats, by whether they are channels last."""


def images(info: ModelInfo, rows: int, *, channels_last: bool = True) -> Tensor:
    """Return images of noise [rows,3,H,W] on a model's device, always the same."""
    noise = torch.randn((rows, 3, *info.preprocess.size), generator=torch.Generator().manual_seed(0))
    return noise.to(info.device).contiguous(memory_format=FORMATS[channels_last])


def arrange(weights: Sequence[nn.Parameter], *, channels_last: bool) -> None:
    """Put the weights of convolutions into a layout, in place."""
    for one in weights:
        one.data = one.data.contiguous(memory_format=FORMATS[channels_last])


def is_channels_last_faster(
    module: nn.Module,
    info: ModelInfo,
    weights: Sequence[nn.Parameter] = (),
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = ROWS,
) -> bool:
    """Choose the layout in which a model, or its quicker copy, computes Grad-CAM faster; always channels last on a CPU.

    A wrong choice costs time, and so does a failure: images then stay channels last.

    Args:
        module: frozen, in evaluation mode, on its device.
        info: of the model.
        weights: of the module's own convolutions; they are put into the layout that is chosen.
        dtype: of the module's input.
        rows: of the batch that is timed; half as many, or fewer, if the device has too little memory for it.
    """
    device = device_of(info.device)
    if device.is_cpu:
        return True
    faster = True
    try:
        ratio, rows = _ratio(device, partial(_seconds, module, info, weights, dtype), rows)
        faster = ratio * GAIN >= 1
        words = "channels_last", "contiguous"
        mine, other, times = (*words, ratio) if faster else (*reversed(words), 1 / ratio)
        log.info("model %s runs %s: %s takes %.2f times as long, in batches of %d", info.name, mine, other, times, rows)
    except Exception as error:  # noqa: BLE001 -- whatever a user's model raises: its warm-up decides if it can be served
        reason = f"{type(error).__name__}: {error}"
        log.warning("model %s runs channels_last: the memory layouts could not be timed (%s)", info.name, reason)
    arrange(weights, channels_last=faster)
    device.release_memory()  # a batch may run in a stream of its own, which cannot use what is reserved here
    return faster


def _ratio(device: Device, seconds: Callable[[int], tuple[float, float]], rows: int) -> tuple[float, int]:
    """Return the time of a contiguous batch as a share of that of one with channels last, and the rows of both."""
    while True:
        try:
            last, first = seconds(rows)
            return first / last, rows
        except Exception as error:  # whatever the libraries beneath torch raise
            if rows == 1 or not device.is_out_of_memory(error):
                raise
        device.release_memory()  # not above: the error holds the tensors that fill the memory
        rows //= 2


def _seconds(
    module: nn.Module, info: ModelInfo, weights: Sequence[nn.Parameter], dtype: torch.dtype, rows: int
) -> tuple[float, float]:
    """Return the seconds that a batch takes, channels last and contiguous: the median of several, taken in turn."""
    device = device_of(info.device)
    batches = {last: images(info, rows, channels_last=last).to(dtype) for last in FORMATS}
    spent: dict[bool, list[float]] = {last: [] for last in FORMATS}
    for _ in range(ROUNDS + 1):  # in turn, so that what else the machine does slows both
        for last, found in spent.items():
            arrange(weights, channels_last=last)
            found.append(device.measure(partial(_explain, module, info, batches[last])))
    return median(spent[True][1:]), median(spent[False][1:])


def _explain(module: nn.Module, info: ModelInfo, batch: Tensor) -> None:
    """Compute what Grad-CAM needs: a forward pass, and a backward pass down to the default layer."""
    precision: torch.dtype = getattr(torch, info.precision)
    half = precision != torch.float32 and batch.dtype == torch.float32  # else the weights are in that precision
    autocast = torch.autocast(batch.device.type, precision if half else torch.bfloat16, enabled=half)
    with torch.enable_grad(), watching({info.default_layer: module.get_submodule(info.default_layer)}), autocast:
        said = module(batch.clone())  # a model may change its input in place
        numbers = [part.sum() for part in pytree.tree_leaves(said) if isinstance(part, Tensor) and part.requires_grad]
    if numbers:
        torch.autograd.backward(numbers)
