"""Draw the pictures of a request's explanations, and estimate the memory of the pictures and the reply."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from camserve_server import jobs
from camserve_server.core.arrays import Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import regions, render, scales
from camserve_server.imaging.values import Rendering
from camserve_server.serving import memory
from camserve_server.serving.photos import PreparedPhoto, decoded, memory_of_photo, shown
from camserve_server.serving.requests import ExplainRequest

T = TypeVar("T")

PIXELS_PER_STEP = 1_000_000  # pixels of pictures drawn before other callers have a turn: about 5 ms


def draw_and_reply(
    request: ExplainRequest,
    photo: PreparedPhoto,
    explanations: Sequence[jobs.Explanation],
    limits: Limits,
    make_reply: Callable[[list[jobs.Explanation]], T],
) -> Generator[None, None, T]:
    """Draw the explanations, and make the reply in the last step; pause after every PIXELS_PER_STEP pixels.

    Raises:
        InvalidArgument: the encoded pictures and regions take more than MAX_PICTURES bytes.
    """
    rendering, pixels, drawn = request.rendering, photo.pixels, list[jobs.Explanation]()
    if pixels is None and rendering.pictures:
        pixels = shown(decoded(request.image, request.job.model.preprocess, limits), rendering)
        yield
    input_size = (photo.image.shape[0], photo.image.shape[1])
    scale = yield from _common_scale(rendering, input_size, explanations)
    per_step = _maps_per_step(memory.pixels_per_map(rendering, photo.size) or math.prod(input_size))
    size = 0
    for explanation in explanations:
        if drawn and len(drawn) % per_step == 0:
            yield
        drawn.append(_draw(explanation, pixels, photo, rendering, scale))
        size += _size_of(drawn[-1])
        if size > memory.MAX_PICTURES:
            raise InvalidArgument(
                f"the pictures take more than {memory.MAX_PICTURES // 2**20} MiB: set max_side, ask for fewer, or for "
                "JPEG",
                field="rendering.max_side",
            )
    return make_reply(drawn)


def _maps_per_step(pixels: float) -> int:
    return max(1, round(PIXELS_PER_STEP / pixels))


def _common_scale(
    rendering: Rendering, size: tuple[int, int], explanations: Sequence[jobs.Explanation]
) -> Generator[None, None, float | None]:
    """Return the scale of all maps, or None if each has its own; pause as in `draw_and_reply`."""
    if rendering.scale == "own":
        return None
    if rendering.scale != "shared":
        return rendering.scale
    largest, per_step = 0.0, _maps_per_step(math.prod(size))
    for index, explanation in enumerate(explanations, 1):
        largest = max(largest, scales.own_scale(explanation.heatmap, rendering, size))
        if index % per_step == 0:
            yield
    return largest


def _draw(
    explanation: jobs.Explanation,
    pixels: Pixels | None,
    photo: PreparedPhoto,
    rendering: Rendering,
    scale: float | None,
) -> jobs.Explanation:
    """Return an explanation with its pictures, intensities and regions, as far as the request asks for them."""
    size = (photo.image.shape[0], photo.image.shape[1])
    scaled = scales.scale_map(explanation.heatmap, rendering, size, scale)
    options, threshold, values = rendering.regions, rendering.threshold, None
    if options or threshold:
        values = scales.values_on_input(explanation.heatmap, rendering, size)
    found = regions.find(values, photo.seen, photo.size, options) if options and values is not None else ()
    overlay = heatmap_image = None
    if pixels is not None:
        least = scales.threshold_of(np.abs(values), threshold) if threshold and values is not None else None
        outlines = [region.contour for region in found] if options and options.draw else []
        overlay, heatmap_image = render.draw(pixels, scaled, photo.seen, rendering, threshold=least, outlines=outlines)
    intensity = scales.on_input(scaled, size) if rendering.intensity else None
    return replace(
        explanation,
        overlay=overlay,
        heatmap_image=heatmap_image,
        intensity=intensity,
        scale=scaled.scale,
        regions=found,
    )


def _size_of(explanation: jobs.Explanation) -> int:
    """Return the bytes of an explanation's pictures and regions."""
    pictures = sum(len(picture.data) for picture in (explanation.overlay, explanation.heatmap_image) if picture)
    outlines = sum(memory.FLOAT * region.contour.size for region in explanation.regions)
    return pictures + outlines + sum(len(region.mask.counts) for region in explanation.regions if region.mask)


def memory_to_draw(request: ExplainRequest, photo: PreparedPhoto, limits: Limits) -> int:
    """Return an upper bound, in bytes, of the memory to draw a request's maps, and to decode its photo again."""
    rendering, input_size = request.rendering, photo.image.shape[:2]
    work = memory.work_bytes(rendering, photo.size, input_size)
    found = memory.region_bytes(rendering, photo.size, input_size)
    if not rendering.pictures:
        return work + min(request.job.explanations * found, memory.MAX_PICTURES)
    decodes = photo.pixels is None
    to_decode = memory_of_photo(request.image, request.job.model.preprocess, limits) if decodes else 0
    each = memory.RGB * math.ceil(memory.pixels_per_map(rendering, photo.size))
    held = memory.RGB * math.prod(photo.size) * decodes + each + work
    return max(to_decode, held) + min(request.job.explanations * (each + found), memory.MAX_PICTURES)


def estimate_reply(request: ExplainRequest, photo: PreparedPhoto, explanations: Sequence[jobs.Explanation]) -> int:
    """Estimate the bytes of the pictures and numbers in a reply, with one byte a pixel for JPEG and WebP."""
    rendering, input_size = request.rendering, photo.image.shape[:2]
    pixel = memory.RGB if "png" in (rendering.overlay, rendering.heatmap_image) else 1
    each = math.ceil(memory.pixels_per_map(rendering, photo.size)) * pixel
    each += memory.region_bytes(rendering, photo.size, input_size)
    drawn = min(len(explanations) * each, memory.MAX_PICTURES)
    intensities = memory.FLOAT * len(explanations) * math.prod(input_size) * rendering.intensity
    heatmaps = sum(explanation.heatmap.nbytes for explanation in explanations) * rendering.heatmap
    return drawn + intensities + heatmaps
