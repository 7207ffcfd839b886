"""Draw the pictures of a request's explanations, and estimate the memory of the pictures and the reply."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from camserve_server import jobs
from camserve_server.core.arrays import Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import images, render
from camserve_server.imaging.values import Rendering
from camserve_server.serving import memory
from camserve_server.serving.photos import PreparedPhoto
from camserve_server.serving.requests import ExplainRequest

T = TypeVar("T")

PIXELS_PER_STEP = 1_000_000  # pixels of pictures drawn before other callers have a turn: about 5 ms
PIXELWISE_TOP = 0.99  # quantile of a map of the input's pixels that has the strongest colour: Smilkov et al. 2017


def draw_and_reply(
    request: ExplainRequest,
    photo: PreparedPhoto,
    explanations: Sequence[jobs.Explanation],
    limits: Limits,
    make_reply: Callable[[list[jobs.Explanation]], T],
) -> Generator[None, None, T]:
    """Draw the explanations, and make the reply in the last step; pause after every PIXELS_PER_STEP pixels.

    Raises:
        InvalidArgument: the encoded pictures take more than MAX_PICTURES bytes.
    """
    rendering, pixels, drawn = request.rendering, photo.pixels, list[jobs.Explanation]()
    if pixels is None and rendering.pictures:
        pixels = images.decode(request.image, limits)
        yield
    each = memory.pixels_per_map(rendering, photo.size) or math.prod(photo.image.shape[:2])
    per_step = max(1, round(PIXELS_PER_STEP / each))
    size = 0
    for explanation in explanations:
        if drawn and len(drawn) % per_step == 0:
            yield
        drawn.append(_draw(explanation, pixels, photo, rendering))
        size += sum(len(picture.data) for picture in (drawn[-1].overlay, drawn[-1].heatmap_image) if picture)
        if size > memory.MAX_PICTURES:
            raise InvalidArgument(
                f"the pictures take more than {memory.MAX_PICTURES // 2**20} MiB: set max_side, ask for fewer, or for "
                "JPEG",
                field="rendering.max_side",
            )
    return make_reply(drawn)


def _draw(
    explanation: jobs.Explanation, pixels: Pixels | None, photo: PreparedPhoto, rendering: Rendering
) -> jobs.Explanation:
    """Return an explanation with its pictures, and its intensities if the request asks for them."""
    heatmap = explanation.heatmap
    size = (photo.image.shape[0], photo.image.shape[1])
    top = PIXELWISE_TOP if heatmap.shape == size else 1.0
    full = render.intensities(heatmap, rendering.profile, size, top) if rendering.whole else None
    if pixels is None:
        return replace(explanation, intensity=full)
    # The papers' intensities are drawn from the layer's own grid: one interpolation, straight to the photo.
    drawn = render.intensity(heatmap, top) if full is None or rendering.profile == "paper" else full
    overlay, heatmap_image = render.draw(pixels, drawn, photo.seen, rendering)
    intensity = full if rendering.intensity else None
    return replace(explanation, overlay=overlay, heatmap_image=heatmap_image, intensity=intensity)


def memory_to_draw(request: ExplainRequest, photo: PreparedPhoto) -> int:
    """Return an upper bound, in bytes, of the memory to draw a request's pictures, and to decode its photo again."""
    rendering = request.rendering
    if not rendering.pictures:
        return 0
    decodes = photo.pixels is None
    to_decode = images.memory_to_decode(request.image) if decodes else 0
    each = memory.RGB * math.ceil(memory.pixels_per_map(rendering, photo.size))
    held = memory.RGB * math.prod(photo.size) * decodes + each
    return max(to_decode, held) + min(request.job.explanations * each, memory.MAX_PICTURES)


def estimate_reply(request: ExplainRequest, photo: PreparedPhoto, explanations: Sequence[jobs.Explanation]) -> int:
    """Estimate the bytes of the pictures and numbers in a reply, with one byte a pixel for JPEG and WebP."""
    rendering = request.rendering
    pixel = memory.RGB if "png" in (rendering.overlay, rendering.heatmap_image) else 1
    each = math.ceil(memory.pixels_per_map(rendering, photo.size)) * pixel
    pictures = min(len(explanations) * each, memory.MAX_PICTURES)
    intensities = memory.FLOAT * len(explanations) * math.prod(photo.image.shape[:2]) * rendering.intensity
    heatmaps = sum(explanation.heatmap.nbytes for explanation in explanations) * rendering.heatmap
    return pictures + intensities + heatmaps
