"""Memory limits of the use cases, and estimates of the memory that a request takes."""

import math

from camserve_server import jobs
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import components, marks
from camserve_server.imaging.values import Rendering
from camserve_server.methods import METHODS
from camserve_server.models.values import ModelInfo
from camserve_server.scheduling.admission import Admission, MemoryBudget
from camserve_server.serving.requests import FeaturesRequest, InspectRequest

MAX_WAITING_PHOTO = 3_000_000  # bytes of a decoded photo kept while its request waits; larger ones are decoded again
PHOTO_BUDGET = 32 * 2**20  # bytes of all decoded photos kept; a photo that does not fit is decoded again
IMAGE_MEMORY = 160 * 2**20  # bytes of all photos being decoded and pictures being drawn; other requests wait
MIN_CALLER_SHARE = 8 * 2**20  # bytes of IMAGE_MEMORY that each caller may always use
MAX_PICTURES = 32 * 2**20  # bytes of the pictures in one reply
LARGEST_REPLY = 21 * 2**20  # bytes that one reply counts for at most: so much one caller that does not read leaves
REPLY_COPIES = 3  # of each reply: the message, its serialised form, and what gRPC holds until it is sent

RGB = 3  # bytes of a pixel
FLOAT = 4  # bytes of a number of a map
WORK = 72  # bytes of a pixel of the model's input while thresholds and regions are found
RUN_WORK = 40  # bytes of a run of a mask while it is encoded
RUN = 3  # bytes of a run of a mask, as text: the difference to a run of about the same length
MASK = FLOAT  # bytes of a pixel of the mask by which an image is edited


def photo_budget(processes: int = 1) -> MemoryBudget:
    """Return a new budget for decoded photos whose requests wait; several processes divide it."""
    return MemoryBudget(max(PHOTO_BUDGET // processes, MAX_WAITING_PHOTO))


def image_memory() -> Admission:
    """Return a new limit on the memory of photos being decoded and pictures being drawn; requests wait for it."""
    return Admission(IMAGE_MEMORY, MIN_CALLER_SHARE, line=math.inf)


def input_bytes(job: jobs.Job, rows: int) -> int:
    """Return an upper bound, in bytes, of the inputs of a job while `rows` of its rows are queued or running.

    Noisy copies are made in the engine and do not count. Edited images are made here, with one mask for each row.
    """
    return math.prod(job.model.preprocess.size) * input_pixel(job.model) + edits_image(job) * rows * row_bytes(job)


def edits_image(job: jobs.Job) -> bool:
    """Return True if a method of a job edits the image, which takes a mask for each row."""
    return any(METHODS[call.name].edits_image for call in job.calls)


def row_bytes(job: jobs.Job) -> int:
    """Return the bytes of the mask of an edited image."""
    return MASK * math.prod(job.model.preprocess.size)


def input_pixel(model: ModelInfo) -> int:
    """Return the bytes of one pixel of a model's input; other channels than RGB may have any type of values."""
    return RGB if model.channels == RGB else FLOAT * model.channels


def text_bytes(model: ModelInfo) -> int:
    """Return the bytes of the embeddings of the texts that are a model's classes."""
    return FLOAT * len(model.texts) * model.text.length if model.text else 0


def feature_bytes(request: InspectRequest | FeaturesRequest) -> int:
    """Return an upper bound, in bytes, of the feature maps of all photos of a request, or of an attention's heads."""
    if not isinstance(request, FeaturesRequest):
        return 0
    layers = request.model.layers
    if request.rank == "heads":
        grids = [each.layout for each in layers.values() if each.layout and each.layout.axes == "tokens"]
        return FLOAT * request.top * max((grid.height * grid.width for grid in grids), default=0)
    return FLOAT * math.prod(layers[request.layer].shape) * (1 + len(request.fit_images))


def shown_bytes(request: InspectRequest | FeaturesRequest) -> int:
    """Return an upper bound, in bytes, of the photo that components are drawn on, which is kept meanwhile."""
    drawn = isinstance(request, FeaturesRequest) and request.rank == "pca" and request.picture is not None
    return drawn * RGB * components.MAX_SIDE**2


def map_bytes(job: jobs.Job) -> int:
    """Return an upper bound, in bytes, of a job's maps without the first, which is small next to a message.

    If a method starts from feature maps, those of the job's layers count too, and so do the embeddings of its texts.
    """
    features = sum(math.prod(job.model.layers[name].shape) for name in job.layers) if job.features else 0
    return FLOAT * (math.prod(job.model.preprocess.size) * (job.explanations - 1) + features) + text_bytes(job.model)


def pixels_per_map(rendering: Rendering, size: tuple[int, int]) -> float:
    """Return the number of pixels of all pictures of one map.

    Args:
        rendering: the pictures to draw.
        size: height and width of the photo.
    """
    scale = min(1.0, (rendering.max_side or math.inf) / max(size))
    height, width = size[0] * scale, size[1] * scale
    bar = marks.bar_width(math.ceil(height), math.ceil(width)) if rendering.color_bar else 0
    return rendering.pictures * height * (width + bar)


def region_bytes(rendering: Rendering, size: tuple[int, int], input_size: tuple[int, int]) -> int:
    """Return an upper bound, in bytes, of the outlines and masks of one map's regions.

    Args:
        rendering: the regions to find.
        size: height and width of the photo.
        input_size: height and width of the model's input.
    """
    if rendering.regions is None:
        return 0
    corners = 2 * math.prod(input_size)  # if regions are single pixels: four of every second pixel
    return 2 * FLOAT * corners + rendering.regions.masks * RUN * _runs(size, input_size)


def work_bytes(rendering: Rendering, size: tuple[int, int], input_size: tuple[int, int]) -> int:
    """Return an upper bound, in bytes, of the memory to find the threshold and the regions of one map.

    Args:
        rendering: the threshold and the regions to find.
        size: height and width of the photo.
        input_size: height and width of the model's input.
    """
    masks = rendering.regions is not None and rendering.regions.masks
    selects = rendering.regions is not None or rendering.threshold is not None
    return selects * WORK * math.prod(input_size) + masks * RUN_WORK * _runs(size, input_size)


def _runs(size: tuple[int, int], input_size: tuple[int, int]) -> int:
    """Return the largest number of runs of a mask: it changes at every row of the model's input."""
    return (min(size[0], input_size[0]) + 1) * size[1]


def check_drawn_pixels(job: jobs.Job, rendering: Rendering, size: tuple[int, int], limits: Limits) -> None:
    """Check that the pictures of a job do not have too many pixels.

    Args:
        job: the explanations to draw.
        rendering: the pictures to draw of each.
        size: height and width of the photo.
        limits: the limits on one request.

    Raises:
        InvalidArgument: they have more than the limit.
    """
    drawn = job.explanations * pixels_per_map(rendering, size)
    if drawn > limits.drawn_pixels:
        raise InvalidArgument(
            f"the pictures have {drawn / 1e6:,.0f} million pixels, and {limits.drawn_pixels / 1e6:,.0f} is the limit: "
            "set max_side, or ask for fewer",
            field="rendering.max_side",
        )
