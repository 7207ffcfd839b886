"""Prepare a request's images: decode the photo, make the model's input of it, and bring the targets to that input."""

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from camserve_server.core.arrays import Input, Photo, Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import channels, fitting, headers, images
from camserve_server.imaging.channels import RGB
from camserve_server.imaging.inputs import carries_input
from camserve_server.imaging.values import Box, Part, Preprocess, Rendering
from camserve_server.jobs import Job
from camserve_server.models.values import ModelInfo
from camserve_server.serving import memory, receipts
from camserve_server.serving.receipts import Receipt
from camserve_server.serving.requests import ExplainRequest
from camserve_server.targets import carried, kind_of, whole, with_box
from camserve_server.targets.values import MaskTarget, SimilarityTarget, Target

_BOX_FIELDS = {"segment": "region", "detection": "box"}  # name of the box in the request, by the kind of target
_FILE_FIELDS = {"similarity": "similarity.image", "mask": "segment.mask"}  # field of a file, by the kind of target


@dataclass(frozen=True, slots=True)
class PreparedPhoto:
    """A decoded photo and the model's input made from it.

    Attributes:
        pixels: the photo as it is shown, uint8 [height, width, 3]; None if it is not kept while its request waits.
        size: height and width of the photo.
        image: the model's input.
        seen: the part of the photo that the model sees.
        job: the request's job, with boxes of targets in pixels of the model's input, and other images as its inputs.
        receipt: the model, the input and the software of the explanations.
    """

    pixels: Pixels | None
    size: tuple[int, int]
    image: Input
    seen: Box
    job: Job
    receipt: Receipt


def memory_to_prepare(request: ExplainRequest, limits: Limits) -> int:
    """Return the bytes of memory to prepare a request's photo, and then the images of its targets, one at a time."""
    files = [request.image, *(kind_of(target).file(target) for target in request.job.targets)]
    return max(memory_of_photo(file, request.job.model.preprocess, limits) for file in files)


def prepare_photo(request: ExplainRequest, limits: Limits) -> Generator[None, None, PreparedPhoto]:
    """Decode the photo and the images of its targets; pause after each image, so that other callers have a turn."""
    _check_pixels(request, limits)
    photo = decoded(request.image, request.job.model.preprocess, limits)
    size = (photo.shape[0], photo.shape[1])
    memory.check_drawn_pixels(request.job, request.rendering, size, limits)
    image, seen = fitting.make_input(photo, request.image, request.job.model.preprocess)
    pixels = shown(photo, request.rendering) if request.rendering.pictures else None
    kept = pixels if pixels is not None and pixels.size <= memory.MAX_WAITING_PHOTO else None
    del photo, pixels  # free their memory during the pauses, unless they are kept
    job = replace(request.job, model=request.job.model.at_size((image.shape[0], image.shape[1])))
    for index, target in enumerate(job.targets):
        if kind_of(target).file(target):
            yield
        if (converted := _to_input(target, index, job.model, (size, seen), limits)) is not target:
            job = replace(job, targets=(*job.targets[:index], converted, *job.targets[index + 1 :]))
    receipt = receipts.receipt_of(job.model, request.image, image, job.interventions)
    return PreparedPhoto(kept, size, image, seen, job, receipt)


def decoded(data: bytes, preprocess: Preprocess, limits: Limits) -> Photo:
    """Decode a photo for a model: with the whole depth of its values, if the request says which become 0 and 1."""
    # The picture of an input that is in the file is RGB, whatever the channels of the input.
    channels = RGB if carries_input(data, preprocess) else preprocess.channels
    return images.decode(data, limits, channels, keep_depth=preprocess.value_range is not None)


def memory_of_photo(data: bytes, preprocess: Preprocess, limits: Limits) -> int:
    """Return the bytes of memory to decode a photo for a model, and then to make the model's input or a picture."""
    channels = RGB if carries_input(data, preprocess) else preprocess.channels
    return headers.memory_to_decode(data, limits, channels, as_float=preprocess.value_range is not None)


def shown(photo: Photo, rendering: Rendering) -> Pixels:
    """Return the photo under the maps, uint8 RGB."""
    return channels.picture(photo, rendering.bands, rendering.window)


def _check_pixels(request: ExplainRequest, limits: Limits) -> None:
    """Check that the photo and the images of its targets together have no more pixels than one photo may have.

    Raises:
        InvalidArgument: they have more, or an image cannot be read.
    """
    files = [
        (index, target, file)
        for index, target in enumerate(request.job.targets)
        if (file := kind_of(target).file(target))
    ]
    total = headers.pixels_of(request.image, limits) if files else 0
    for index, target, file in files:
        with _file_field(index, target):
            total += headers.pixels_of(file, limits)
            if total > limits.pixels:
                raise InvalidArgument(
                    f"the photo and the images of its targets have more than {limits.pixels:,} pixels between them: "
                    "send smaller ones"
                )


@contextmanager
def _file_field(index: int, target: Target) -> Iterator[None]:
    """Name the field of a target's file in the errors of the block."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"targets[{index}].{_FILE_FIELDS[kind_of(target).name]}") from error


def _to_input(
    target: Target, index: int, model: ModelInfo, geometry: tuple[headers.Size, Box], limits: Limits
) -> Target:
    """Convert a target's image, mask or box from photos to the model's input.

    Args:
        target: the target.
        index: its index in the request.
        model: the model, with the input's size for this photo.
        geometry: height and width of the photo, and the part of it that the model sees.
        limits: the limits on one request.
    """
    (size, seen), preprocess = geometry, model.preprocess
    kind = kind_of(target)
    if other := kind.compared(target):
        with _file_field(index, target):
            photo = decoded(other.file, preprocess, limits)
            return SimilarityTarget(image=fitting.make_input(photo, other.file, preprocess)[0])
    if file := kind.file(target):
        with _file_field(index, target):
            return replace(cast("MaskTarget", target), file=b"", part=_read_part(file, size, seen, limits))
    if box := kind.box(target):
        field = f"targets[{index}].{kind.name}.{_BOX_FIELDS[kind.name]}"
        return with_box(target, _box_in_input(box, seen, preprocess.size, field))
    return target


def _box_in_input(box: Box, seen: Box, size: tuple[int, int], field: str) -> Box:
    """Convert a box from the photo's pixels to those of the model's input."""
    moved = carried(box, seen, whole(size))
    if min(moved.right, moved.bottom) <= 0 or moved.left >= size[1] or moved.top >= size[0]:
        raise InvalidArgument(f"the box is outside of what the model sees: {_range_of(seen)}", field=field)
    return moved


def _range_of(seen: Box) -> str:
    return f"from {seen.left:.0f} to {seen.right:.0f} across and from {seen.top:.0f} to {seen.bottom:.0f} down"


def _read_part(file: bytes, size: headers.Size, seen: Box, limits: Limits) -> Part:
    """Decode a mask, which must have the size of the photo, and a pixel that the model sees."""
    pixels = images.decode_mask(file, limits)
    if pixels.shape != size:
        raise InvalidArgument(
            f"the mask has {pixels.shape[1]:,} x {pixels.shape[0]:,} pixels, and the photo {size[1]:,} x {size[0]:,}: "
            "they must have the same size"
        )
    if not pixels.any():
        raise InvalidArgument("every pixel of the mask is 0, so it shows no part of the photo")
    top, left = max(0, int(seen.top)), max(0, int(seen.left))
    if not pixels[top : math.ceil(seen.bottom), left : math.ceil(seen.right)].any():
        raise InvalidArgument(f"the mask is outside of what the model sees: {_range_of(seen)}")
    return Part(np.packbits(pixels, axis=1), size[1], seen)
