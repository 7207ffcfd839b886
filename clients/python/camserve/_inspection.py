"""What comes back of a look inside a model: a reading of every layer, and channels of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from camserve import _html, _local
from camserve._errors import FailedPrecondition, InvalidArgument
from camserve._picture import FORMATS, Photo, Picture, encode
from camserve.terminal import printable

if TYPE_CHECKING:
    import os

    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from camserve._result import Prediction, Timing

HEADINGS = ("layer", "type", "output", "mean", "std", "least", "greatest", "zeros", "norm", "gradient", "")


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a tensor's values are like; all but the last field of those that are finite, NaN where none is.

    Attributes:
        mean: Of the values.
        std: Their standard deviation, dividing by their number.
        minimum: The least.
        maximum: The greatest.
        zeros: Share of all values that are exactly zero, 0 to 1.
        norm: Square root of the sum of their squares.
        non_finite: How many are NaN or infinite.
    """

    mean: float
    std: float
    minimum: float
    maximum: float
    zeros: float
    norm: float
    non_finite: int


@dataclass(frozen=True, slots=True)
class LayerReading:
    """What one layer gave in the last of its calls.

    Attributes:
        name: Of the layer.
        type: Its class, such as "Conv2d".
        output_shape: Of its output for one image, the batch first.
        elements: How many values that has; 0 where it returns no numbers, and nothing was measured.
        activation: What it returned.
        gradient: The score's gradient there; zeros where the score does not depend on it.
        container: Whether other modules are inside it, which have readings of their own.
    """

    name: str
    type: str
    output_shape: tuple[int, ...]
    elements: int
    activation: Statistics
    gradient: Statistics
    container: bool

    @property
    def trouble(self) -> str:
        """What is wrong with it, in words; empty where nothing is."""
        if not self.elements:
            return "returns no numbers"
        wild = self.activation.non_finite + self.gradient.non_finite
        if wild:
            return f"{wild} not finite"
        if not self.activation.norm:
            return "dead: all zeros"
        return "" if self.gradient.norm else "no gradient"


@dataclass(frozen=True, eq=False, slots=True)
class Inspection:
    """What the layers of a model gave for one image.

    Attributes:
        layers: In the order in which they finish when the model runs.
        model: Name of the model.
        target: The class whose score was differentiated.
        contrast: The class against it, if any.
        score: Its logit, or for a contrast the difference of two.
        request_id: What to look for in the server's log.
        timing: Where the time went.
    """

    layers: tuple[LayerReading, ...] = field(repr=False)
    model: str
    target: Prediction
    contrast: Prediction | None
    score: float
    request_id: str
    timing: Timing

    @property
    def title(self) -> str:
        """What was looked at, in words."""
        return f"{self.model} · {_whose(self.target, self.contrast)}"

    @property
    def leaves(self) -> tuple[LayerReading, ...]:
        """The layers that were measured and have no others inside."""
        return tuple(each for each in self.layers if each.elements and not each.container)

    def table(self) -> str:
        """All readings as text, one layer a line."""
        rows = [HEADINGS, *(tuple(map(printable, row(each))) for each in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)) for each in rows)
        return "\n".join(line.rstrip() for line in lines)

    def plot(self) -> Image.Image:
        """Draw the norms of activation and gradient over depth, on logarithmic scales.

        A layer with values that are not finite, or that are all zero, is red.

        Raises:
            FailedPrecondition: No layer was measured that has no others inside.
        """
        from camserve._chart import chart  # noqa: PLC0415 -- fonts are loaded for those who draw

        if not self.leaves:
            raise FailedPrecondition("there is nothing to draw: no layer that was measured is without others inside")
        return chart(self.title, self.leaves)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plot (.png, .jpg, .webp) or the table (.txt).

        Raises:
            InvalidArgument: The suffix is none of these.
            OSError: The file cannot be written.
        """
        to = Path(path)
        if to.suffix.lower() == ".txt":
            _local.write(to, f"{self.table()}\n".encode())
        else:
            _local.write(to, encode(self.plot(), _format(to, ".txt")))
        return to

    def _repr_html_(self) -> str:
        if not self.leaves:
            return f"<pre>{_html.text(self.table())}</pre>"
        image = self.plot()
        picture = Picture("png", encode(image, "png"), *image.size)
        return _html.figure(picture, self.title, f"score {self.score:.3f}", width="none")


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel of a layer.

    Attributes:
        index: Its number, from 0.
        mean_activation: Its mean over the grid.
        gradient_weight: Mean of the score's gradient over the grid: Grad-CAM's weight.
    """

    index: int
    mean_activation: float
    gradient_weight: float


@dataclass(frozen=True, eq=False, slots=True)
class Features:
    """Channels of a layer, first in rank first.

    Attributes:
        channels: Their numbers and weights.
        maps: float32 [channels, h, w], read-only: what each gave; None if it was not asked for.
        picture: A tile for each, after one of what the model sees; None if it was not asked for.
        layer: Name of the layer.
        channel_count: How many channels it has.
        grid: Rows and columns of its grid.
        model: Name of the model.
        target: The class whose score was differentiated.
        contrast: The class against it, if any.
        score: Its logit, or for a contrast the difference of two.
        photo: Geometry of the photo.
        request_id: What to look for in the server's log.
        timing: Where the time went.
    """

    channels: tuple[Channel, ...]
    maps: NDArray[np.float32] | None = field(repr=False)
    picture: Picture | None = field(repr=False)
    layer: str
    channel_count: int
    grid: tuple[int, int]
    model: str
    target: Prediction
    contrast: Prediction | None
    score: float
    photo: Photo
    request_id: str
    timing: Timing

    @property
    def image(self) -> Image.Image:
        """The tiles, decoded.

        Raises:
            FailedPrecondition: They were not asked for.
        """
        return self._tiles().open()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the tiles (.png, .jpg, .webp) or the raw maps (.npy).

        Raises:
            InvalidArgument: The suffix is none of these.
            FailedPrecondition: The part was not asked for.
            OSError: The file cannot be written.
        """
        to = Path(path)
        if to.suffix.lower() != ".npy":
            _local.write(to, self._tiles().encoded(_format(to, ".npy")))
        elif self.maps is None:
            raise FailedPrecondition("there are no raw maps; ask for them: client.features(..., maps=True)")
        else:
            _local.write(to, _local.npy(self.maps))
        return to

    def _tiles(self) -> Picture:
        if self.picture is None:
            raise FailedPrecondition('there is no picture; ask for it: client.features(..., picture="png")')
        return self.picture

    def _repr_html_(self) -> str:
        shown = f"{len(self.channels)} of {self.channel_count} channels · {_whose(self.target, self.contrast)}"
        return _html.figure(self.picture, f"{self.model} · {self.layer}", shown, width="none")


def row(reading: LayerReading) -> tuple[str, ...]:
    """Say a reading in words, as ``HEADINGS`` has it."""
    seen, shape = reading.activation, "×".join(map(str, reading.output_shape))
    if not reading.elements:
        return (reading.name, reading.type, *[""] * (len(HEADINGS) - 3), reading.trouble)
    numbers = (seen.mean, seen.std, seen.minimum, seen.maximum)
    rest = (f"{seen.zeros:.1%}", f"{seen.norm:.3g}", f"{reading.gradient.norm:.3g}", reading.trouble)
    return (reading.name, reading.type, shape, *(f"{each:.3g}" for each in numbers), *rest)


def _whose(target: Prediction, contrast: Prediction | None) -> str:
    return target.name + (f", not {contrast.name}" if contrast else "")


def _format(path: Path, other: str) -> str:
    if path.suffix.lower() not in FORMATS:
        known = ", ".join((*FORMATS, other))
        raise InvalidArgument(f"cannot save as {path.suffix or path.name!r}; there are {known}")
    return FORMATS[path.suffix.lower()]
