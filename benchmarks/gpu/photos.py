"""Measure decoding and drawing on a GPU instead of the processor, and the cost of uploads."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.model import pictures
from benchmarks.gpu.scale import Cells, Clock, Scale
from benchmarks.photos import QUALITY, photos
from benchmarks.results import Part, Table
from benchmarks.timing import Run
from camserve_server.core.arrays import Map, Pixels
from camserve_server.core.limits import Limits
from camserve_server.engine.inputs import upload
from camserve_server.imaging import fitting, images, render, scales
from camserve_server.imaging.channels import picture
from camserve_server.imaging.values import Preprocess, Rendering

COUNT = 32
GRID = 7
JPEG = Rendering(overlay="jpeg", quality=QUALITY)


def measure(scale: Scale, _clock: Clock) -> Part:
    """Time each step on both, for a batch of photos of 500 by 375."""
    part, rows, notes = Part("photos"), list[Cells](), list[str]()
    for step, ways in _steps(scale).items():
        cells = []
        for where, run in ways.items():
            try:
                cells.append(f"{1e6 * _seconds(run, scale) / COUNT:,.0f}")
            except Exception as error:  # noqa: BLE001 -- whatever it is, the others are measured
                cells.append("–")
                notes.append(f"{step}, {where}: {type(error).__name__}: {str(error)[:150]}")
        rows.append((step, *cells, *["–"] * (2 - len(cells))))
    notes.append("A processor's figure is for one thread, and its threads are as many as its cores.")
    columns = ("step", "one core, µs a photo", "GPU, µs a photo")
    part.tables.append(Table(f"Photos, {COUNT} at a time", columns, rows, tuple(notes)))
    return part


def _seconds(run: Run, scale: Scale) -> float:
    """Return the least time of a few runs."""
    found = []
    for _ in range(scale.rounds + 1):
        scale.wait()
        began = time.perf_counter()
        run()
        scale.wait()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _steps(scale: Scale) -> Mapping[str, Mapping[str, Run]]:
    """Return the steps, each as the service does it, and on the device where there is one."""
    files = [photos()[place % len(photos())] for place in range(COUNT)]
    decoded = [images.decode(one, Limits()) for one in files]
    wanted = Preprocess((scale.size, scale.size), scale.size, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    small = pictures(wanted.size, COUNT)
    heat = np.random.default_rng(0).random((GRID, GRID), np.float32)
    steps: dict[str, dict[str, Run]] = {
        "decode": {"cpu": lambda: [images.decode(one, Limits()) for one in files]},
        "fit to the model's input": {"cpu": lambda: [fitting.fit(one, wanted) for one in decoded]},
        "draw and encode": {"cpu": partial(_drawn, [picture(one) for one in decoded], heat, wanted)},
        "upload, as float32 from pageable memory": {"cpu": partial(_pageable, small, scale)},
        "upload, as the engine does": {"cpu": lambda: upload(small, torch.device(scale.device))},
    }
    if not scale.gpu:
        return steps
    there = [torch.from_numpy(one).to(scale.device).permute(2, 0, 1) for one in decoded]
    heats = torch.from_numpy(heat).to(scale.device).expand(COUNT, 1, GRID, GRID)
    more: dict[str, Run] = {
        "decode": partial(_decoded_there, files, scale),
        "fit to the model's input": lambda: [_fitted_there(one, scale) for one in there],
        "draw and encode": partial(drawn_there, there, heats),
    }
    return {step: ways | ({"gpu": more[step]} if step in more else {}) for step, ways in steps.items()}


def _drawn(decoded: Sequence[Pixels], heat: Map, wanted: Preprocess) -> None:
    for one in decoded:
        _, seen = fitting.fit(one[:8, :8], wanted)
        render.draw(one, scales.scale_map(heat, JPEG, wanted.size), seen, JPEG)


def _pageable(small: Sequence[Pixels], scale: Scale) -> Tensor:
    return torch.from_numpy(np.stack(small).astype(np.float32)).to(scale.device)


# --- on the device ---


def _decoded_there(files: Sequence[bytes], scale: Scale) -> None:
    from torchvision.io import ImageReadMode, decode_jpeg  # noqa: PLC0415 -- by nvJPEG

    packed = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in files]
    decode_jpeg(packed, mode=ImageReadMode.RGB, device=scale.device)


def _fitted_there(photo: Tensor, scale: Scale) -> Tensor:
    size = (scale.size, scale.size * photo.shape[2] // photo.shape[1])
    return functional.interpolate(photo[None].float(), size, mode="bilinear", antialias=True)


def drawn_there(there: Sequence[Tensor], heats: Tensor) -> None:
    """Draw intensities [n,1,h,w] on photos [3,height,width], and bring the files to the host."""
    from torchvision.io import encode_jpeg  # noqa: PLC0415 -- by nvJPEG

    photos_ = torch.stack(list(there))
    size = (photos_.shape[2], photos_.shape[3])
    colours = torch.from_numpy(render.colormap("jet")).to(heats.device)
    levels = (255 * functional.interpolate(heats, size, mode="bilinear", align_corners=False)[:, 0]).long()
    painted = colours[levels].permute(0, 3, 1, 2)
    blended = torch.lerp(photos_.float(), painted.float(), 0.5).round().byte()
    for one in encode_jpeg(list(blended.contiguous()), quality=QUALITY):
        one.cpu()
