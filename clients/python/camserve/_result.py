"""What comes back: predictions, and a heatmap for every method, layer and target."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from camserve import _html, _local
from camserve._errors import FailedPrecondition, InvalidArgument
from camserve._picture import FORMATS, Box, Photo, Picture, onto_photo

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from camserve._receipts import Receipt
    from camserve._targets import TargetLike

T = TypeVar("T")


class Verdict(StrEnum):
    """Whether a map can be read as an explanation."""

    UNSPECIFIED = "UNSPECIFIED"
    OK = "OK"
    ALL_NEGATIVE = "ALL_NEGATIVE"
    FLAT = "FLAT"
    ZERO_GRADIENT = "ZERO_GRADIENT"
    NON_FINITE = "NON_FINITE"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class and how probable the model finds it.

    Attributes:
        label: Of the class; "class 7" where the model has none.
        probability: After softmax, 0 to 1.
        class_index: Index in the model's output, from 0.
        score: The logit.
        box: Of an object that was detected, where it is in the photo.
        area: Of a class in a segmented image, the share of it that the class covers, 0 to 1.
    """

    label: str
    probability: float
    class_index: int
    score: float
    box: Box | None = None
    area: float = 0.0

    @property
    def name(self) -> str:
        """The label, or "class 7" where there is none."""
        return self.label or f"class {self.class_index}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in milliseconds, and how many rows the largest batch had.

    No moment counts twice: `compute_ms` is time in which at least one of its batches ran, and `queue_ms` the rest of
    the wait for them.
    """

    decode_ms: float
    queue_ms: float
    compute_ms: float
    render_ms: float
    batch_rows: int


@dataclass(frozen=True, eq=False, slots=True)
class Explanation:
    """One method's answer, on one layer, for one target.

    Attributes:
        method: Name of the method.
        layer: Name of the layer, or of several that were fused, joined by " + "; empty for methods
            that look at the input.
        target: The class explained.
        contrast: The class that it was explained against, if any.
        score: The score explained: a logit, or for a contrast the difference of two.
        verdict: Whether the map can be read as an explanation.
        verdict_message: The verdict in words; empty when it is OK.
        parameters: What the method ran with, defaults included.
        photo: Geometry of the photo.
        heatmap: float32 [h, w], read-only: signed, not normalised, on the layer's own grid; None
            if it was not asked for.
        overlay_picture: The overlay with its format and size; None if it was not asked for.
        colored_picture: The heatmap alone in colour; None if it was not asked for.
        resolved: The target as the server understood it, to ask for the same again; None for a
            ``similarity``, whose image is not sent back.
        intensity: float32 [H, W], read-only: what is coloured, 0 to 1, on the pixels of the model's
            input; None if it was not asked for.
        completeness_error: By how much the map fails to add up to the difference between the score
            and that of a baseline, as a share of it; None for methods that do not promise that.
        augmentation_smoothing: Whether it is the mean over augmented copies of the image.
        eigen_smoothing: Whether it is the first principal component instead of the sum.
        fusion: "mean", "max" or "product" of the maps of several layers; None for one layer's.
        receipt_or_none: The receipt, see ``receipt``; None from a server that sends none.
    """

    method: str
    layer: str
    target: Prediction
    contrast: Prediction | None
    score: float
    verdict: Verdict
    verdict_message: str
    parameters: Mapping[str, float | str]
    photo: Photo = field(repr=False)
    heatmap: NDArray[np.float32] | None = field(repr=False)
    overlay_picture: Picture | None = field(repr=False)
    colored_picture: Picture | None = field(repr=False)
    resolved: TargetLike | None = field(default=None, repr=False)
    intensity: NDArray[np.float32] | None = field(default=None, repr=False)
    completeness_error: float | None = None
    augmentation_smoothing: bool = False
    eigen_smoothing: bool = False
    fusion: str | None = None
    receipt_or_none: Receipt | None = field(default=None, repr=False)

    @property
    def title(self) -> str:
        """What is explained, in words."""
        against = f", not {self.contrast.name}" if self.contrast else ""
        return f"{self.target.name}{against}"

    @property
    def how(self) -> str:
        """The method, and what it was smoothed by, in words."""
        smoothed = {"augmentation smoothing": self.augmentation_smoothing, "eigen smoothing": self.eigen_smoothing}
        return ", ".join((self.method, *(name for name, done in smoothed.items() if done)))

    @property
    def receipt(self) -> Receipt:
        """What it was computed from and what came out, for ``Client.replay``.

        Raises:
            FailedPrecondition: The server is older than receipts.
        """
        if self.receipt_or_none is None:
            raise FailedPrecondition("the server sent no receipt: it is older than receipts are")
        return self.receipt_or_none

    @property
    def overlay(self) -> bytes:
        """The file of the heatmap drawn on the photo.

        Raises:
            FailedPrecondition: It was not asked for.
        """
        return _present(self.overlay_picture, "overlay", 'overlay="jpeg"').data

    @property
    def image(self) -> Image.Image:
        """The heatmap drawn on the photo, decoded.

        Raises:
            FailedPrecondition: It was not asked for.
        """
        return _present(self.overlay_picture, "overlay", 'overlay="jpeg"').open()

    @property
    def heatmap_image(self) -> bytes:
        """The file of the heatmap alone, in colour.

        Raises:
            FailedPrecondition: It was not asked for.
        """
        return _present(self.colored_picture, "heatmap image", 'heatmap_image="png"').data

    @property
    def heatmap_on_image(self) -> NDArray[np.float32]:
        """The raw map in the photo's own pixels: float32 [height, width].

        Bilinear, still signed and not normalised; NaN where the model did not look.

        Raises:
            FailedPrecondition: The heatmap was not asked for.
        """
        return onto_photo(_present(self.heatmap, "heatmap", "heatmap=True"), self.photo)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the overlay (.jpg, .png, .webp) or the raw map (.npy).

        The overlay is written as it came, and encoded again only where the suffix asks for
        another format than the one received.

        Returns:
            The path.

        Raises:
            InvalidArgument: The suffix is none of these.
            FailedPrecondition: The part was not asked for.
            OSError: The file cannot be written.
        """
        to = Path(path)
        suffix = to.suffix.lower()
        if suffix == ".npy":
            _local.write(to, _local.npy(_present(self.heatmap, "heatmap", "heatmap=True")))
        elif suffix in FORMATS:
            picture = _present(self.overlay_picture, "overlay", 'overlay="jpeg"')
            _local.write(to, picture.encoded(FORMATS[suffix]))
        else:
            known = ", ".join((*FORMATS, ".npy"))
            raise InvalidArgument(f"cannot save as {to.suffix or to.name!r}; there are {known}")
        return to

    def _repr_png_(self) -> bytes | None:
        return self.overlay_picture.encoded("png") if self.overlay_picture else None

    def html(self) -> str:
        """The overlay with its title, for a notebook."""
        return _html.figure(self.overlay_picture, f"{self.title} · {self.how}", self._note())

    def _repr_html_(self) -> str:
        return self.html()

    def _note(self) -> str:
        trouble = "" if self.verdict is Verdict.OK else f"{self.verdict}: {self.verdict_message}"
        return " · ".join(filter(None, (self.layer, trouble)))


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """The predictions for one image and their explanations.

    Attributes:
        predictions: The most probable classes, most probable first.
        explanations: One for each method, layer and target: all targets of the first layer of the
            first method first.
        model: Name of the model that answered.
        request_id: What to look for in the server's log.
        photo: Geometry of the photo, and of the part that the model saw.
        timing: Where the time went.
    """

    predictions: tuple[Prediction, ...]
    explanations: tuple[Explanation, ...]
    model: str
    request_id: str
    photo: Photo
    timing: Timing

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the photo in pixels, upright."""
        return self.photo.width, self.photo.height

    def _repr_html_(self) -> str:
        rows = [(each.name, f"{each.probability:.1%}") for each in self.predictions]
        return _html.page(self.model, rows, [each.html() for each in self.explanations])


def _present(part: T | None, name: str, option: str) -> T:
    if part is None:
        raise FailedPrecondition(f"the result has no {name}; ask for it: client.explain(..., {option})")
    return part
