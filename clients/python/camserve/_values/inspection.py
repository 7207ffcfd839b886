"""Results of an inspection: statistics of the layers of a model, and channels of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from camserve._core.errors import FailedPrecondition, InvalidArgument
from camserve._core.files import npy_file, write_file
from camserve._core.text import aligned
from camserve._values import display
from camserve._values.picture import FORMATS, Photo, Picture, encode_picture

if TYPE_CHECKING:
    import os

    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from camserve._values.prediction import Prediction
    from camserve._values.timing import Timing

HEADINGS = ("layer", "type", "output", "mean", "std", "min", "max", "zeros", "norm", "gradient", "")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor's values. Non-finite values are only counted; NaN if no value is finite.

    Attributes:
        mean: Mean.
        std: Population standard deviation: the divisor is the number of values.
        minimum: Smallest value.
        maximum: Largest value.
        zeros: Share of all values that are exactly zero, 0 to 1.
        norm: L2 norm: the square root of the sum of squares.
        non_finite: Number of values that are NaN or infinite.

    Example:
        >>> statistics = client.inspect("cat.jpg", layers=["bn2"]).layers[0].activation
        >>> round(statistics.mean, 2), statistics.maximum, f"{statistics.zeros:.0%}", statistics.non_finite
        (0.13, 6.0, '94%', 0)
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
    """Statistics of one layer's output in the last of its calls.

    Attributes:
        name: Name of the layer.
        type: Class of the module, such as "Conv2d".
        output_shape: Shape of the output for one image, the batch dimension first.
        elements: Number of values in the output; 0 if the layer returns no numeric tensor, and then
            nothing is measured.
        activation: Statistics of the output.
        gradient: Statistics of the score's gradient with respect to the output; zeros if the score
            does not depend on it.
        container: True if the module contains other modules, which have readings of their own.

    Example:
        >>> layer = client.inspect("cat.jpg", layers=["bn2"]).layers[0]
        >>> layer.name, layer.type, layer.output_shape, layer.trouble
        ('bn2', 'BatchNormAct2d', (1, 1280, 7, 7), '')
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
        """Description of a problem with the layer, or an empty string.

        Example:
            >>> silenced = [camserve.silence("bn2")]
            >>> client.inspect("cat.jpg", layers=["bn2"], interventions=silenced).layers[0].trouble
            'dead: all zeros'
        """
        if not self.elements:
            return "no numeric output"
        non_finite = self.activation.non_finite + self.gradient.non_finite
        if non_finite:
            return f"{non_finite} non-finite"
        if not self.activation.norm:
            return "dead: all zeros"
        return "" if self.gradient.norm else "zero gradient"


@dataclass(frozen=True, eq=False, slots=True)
class Inspection:
    """Statistics of the layers of a model for one image.

    Attributes:
        layers: The layers, in the order in which they finish in a forward pass.
        model: Name of the model.
        target: The class whose score was differentiated.
        contrast: For a contrast, the class against it, else None.
        score: The score: a logit, or for a contrast the difference of two.
        request_id: Id of the request in the server's log.
        timing: Duration of each stage of the request.
        predictions: The model's first predictions, up to five, with the interventions of the request.
        unchanged_predictions: Those without interventions; empty for a request without any.

    Example:
        >>> inspection = client.inspect("cat.jpg", target="tabby", layers=["conv_stem", "bn2"])
        >>> inspection.title, round(inspection.score, 1)
        ('efficientnet_lite0 · tabby', 8.1)
        >>> [layer.name for layer in inspection.leaves]  # the batch normalisation contains its activation
        ['conv_stem']
    """

    layers: tuple[LayerReading, ...] = field(repr=False)
    model: str
    target: Prediction
    contrast: Prediction | None
    score: float
    request_id: str
    timing: Timing
    predictions: tuple[Prediction, ...] = ()
    unchanged_predictions: tuple[Prediction, ...] = ()

    @property
    def title(self) -> str:
        """Name of the model and of the target."""
        return f"{self.model} · {target_name(self.target, self.contrast)}"

    @property
    def leaves(self) -> tuple[LayerReading, ...]:
        """The measured layers that contain no other modules."""
        return tuple(layer for layer in self.layers if layer.elements and not layer.container)

    def table(self) -> str:
        """All statistics as text, one line for each layer. Very long names are shortened.

        Example:
            >>> print(client.inspect("cat.jpg", layers=["conv_stem", "bn2"]).table())
            layer      type            output        mean    std    min    max   zeros  norm      gradient
            conv_stem  Conv2dSame      1×32×112×112  ...
            bn2        BatchNormAct2d  1×1280×7×7    ...
        """
        return aligned([HEADINGS, *map(reading_cells, self.layers)], "  ")

    def plot(self) -> Image.Image:
        """Plot the norms of activation and gradient over depth, on logarithmic scales.

        A layer whose values are non-finite or all zero is red.

        Raises:
            FailedPrecondition: There is no measured layer without other modules inside.

        Example:
            >>> client.inspect("cat.jpg", layers=["conv_stem", "conv_head"]).plot().size
            (1000, 156)
        """
        if not self.leaves:
            raise FailedPrecondition("nothing to plot: every measured layer contains other modules")
        return display.plot(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plot (.png, .jpg, .webp) or the table (.txt).

        Returns:
            The path.

        Raises:
            InvalidArgument: The suffix is not supported.
            FailedPrecondition: There is nothing to plot, see ``plot``.
            OSError: The file cannot be written.

        Example:
            >>> inspection = client.inspect("cat.jpg", layers=["conv_stem", "conv_head"])
            >>> inspection.save("layers.png").name, inspection.save("layers.txt").name
            ('layers.png', 'layers.txt')
        """
        destination = Path(path)
        if destination.suffix.lower() == ".txt":
            write_file(destination, f"{self.table()}\n".encode())
        else:
            write_file(destination, encode_picture(self.plot(), _picture_format(destination, ".txt")))
        return destination

    def _repr_html_(self) -> str:
        return display.html(self)


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel of a layer.

    Attributes:
        index: Index of the channel, from 0.
        mean_activation: Mean of the channel over the grid.
        gradient_weight: Mean of the score's gradient over the grid: the channel's weight in Grad-CAM.
            For a component or a concept, that along its vector; 0 for an attention head.
        share: Share of the variance that a component explains; share of a concept in the sum of the
            reconstructed features; share of a head's attention that goes to the patches. 0 for a channel.
        nearest: The likeliest classes of a concept, if the model's last layer takes the mean of the
            layer's features.

    Example:
        >>> channel = client.features("cat.jpg", top=1).channels[0]
        >>> channel.index, round(channel.mean_activation, 1)
        (287, 4.4)
    """

    index: int
    mean_activation: float
    gradient_weight: float
    share: float = 0.0
    nearest: tuple[Prediction, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class FeatureBasis:
    """Principal components of features, to project other photos on. All arrays are float32 and read-only.

    Attributes:
        mean: Mean of the features [C].
        vectors: The components, orthogonal and of length 1 [k, C], the largest variance first.
        shares: Share of the variance that each component explains [k].
        ranges: The scores that a picture shows darkest and brightest, for each component [k, 2].
        background_mean: Mean of the features of all cells, background included [C]; None if no
            background is left out.
        background_vector: The first component of these [C]. Cells with a score of 0 or less are background.

    Example:
        >>> basis = client.features("cat.jpg", rank="pca", top=3).basis
        >>> basis.vectors.shape  # 3 components of 1280 channels
        (3, 1280)
        >>> [round(float(share), 2) for share in basis.shares]
        [0.25, 0.24, 0.08]
    """

    mean: NDArray[np.float32]
    vectors: NDArray[np.float32]
    shares: NDArray[np.float32]
    ranges: NDArray[np.float32]
    background_mean: NDArray[np.float32] | None = None
    background_vector: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Features:
    """Channels of a layer, in the order of their rank; or its components, concepts or attention heads.

    Attributes:
        channels: Indices and weights of the channels.
        maps: The channels' maps, float32 [channels, h, w], read-only; None if they were not requested.
            In the background of components they are NaN.
        picture: A tile for each channel, after a tile of what the model sees; None if it was not
            requested. Each tile is coloured from its own minimum to its own maximum. For components it
            is the photo's size, with the first three as red, green and blue.
        layer: Name of the layer.
        channel_count: Number of channels of the layer, or of attention heads.
        grid: Rows and columns of the layer's grid.
        model: Name of the model.
        target: The class whose score was differentiated; None for a model that returns an embedding and no target.
        contrast: For a contrast, the class against it, else None.
        score: The score: a logit, or for a contrast the difference of two; 0 without a target.
        photo: Geometry of the photo.
        request_id: Id of the request in the server's log.
        timing: Duration of each stage of the request.
        predictions: The model's first predictions, up to five, with the interventions of the request.
        unchanged_predictions: Those without interventions; empty for a request without any.
        basis: The principal components, to project other photos on; None for other ranks.
        rank: The option ``rank`` of the request.

    Example:
        >>> features = client.features("cat.jpg", top=3)
        >>> features.layer, features.grid, features.maps.shape
        ('bn2', (7, 7), (3, 7, 7))
    """

    channels: tuple[Channel, ...]
    maps: NDArray[np.float32] | None = field(repr=False)
    picture: Picture | None = field(repr=False)
    layer: str
    channel_count: int
    grid: tuple[int, int]
    model: str
    target: Prediction | None
    contrast: Prediction | None
    score: float
    photo: Photo
    request_id: str
    timing: Timing
    predictions: tuple[Prediction, ...] = ()
    unchanged_predictions: tuple[Prediction, ...] = ()
    basis: FeatureBasis | None = field(default=None, repr=False)
    rank: str = "activation"

    @property
    def image(self) -> Image.Image:
        """The tiles as a PIL image.

        Raises:
            FailedPrecondition: They were not requested.

        Example:
            >>> client.features("cat.jpg", top=3).image.size
            (502, 436)
        """
        return self._require_picture().open()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the tiles (.png, .jpg, .webp) or the raw maps (.npy).

        Returns:
            The path.

        Raises:
            InvalidArgument: The suffix is not supported.
            FailedPrecondition: The tiles or maps were not requested.
            OSError: The file cannot be written.

        Example:
            >>> features = client.features("cat.jpg", top=3)
            >>> features.save("channels.png").name, features.save("channels.npy").name
            ('channels.png', 'channels.npy')
        """
        destination = Path(path)
        if destination.suffix.lower() != ".npy":
            write_file(destination, self._require_picture().encoded(_picture_format(destination, ".npy")))
        elif self.maps is None:
            raise FailedPrecondition("the result has no raw maps; request them with client.features(..., maps=True)")
        else:
            write_file(destination, npy_file(self.maps))
        return destination

    def _require_picture(self) -> Picture:
        if self.picture is None:
            raise FailedPrecondition('the result has no picture; request it with client.features(..., picture="png")')
        return self.picture

    def _repr_html_(self) -> str:
        return display.html(self)


def reading_cells(reading: LayerReading) -> tuple[str, ...]:
    """Format a reading as the cells of a table, in the order of ``HEADINGS``."""
    if not reading.elements:
        return (reading.name, reading.type, *[""] * (len(HEADINGS) - 3), reading.trouble)
    activation, shape = reading.activation, "×".join(map(str, reading.output_shape))
    numbers = (activation.mean, activation.std, activation.minimum, activation.maximum)
    norms = (f"{activation.norm:.3g}", f"{reading.gradient.norm:.3g}")
    values = (*(f"{number:.3g}" for number in numbers), f"{activation.zeros:.1%}", *norms)
    return (reading.name, reading.type, shape, *values, reading.trouble)


def target_name(target: Prediction, contrast: Prediction | None) -> str:
    """Return the name of a target, with that of the class against it."""
    return target.name + (f", not {contrast.name}" if contrast else "")


def _picture_format(path: Path, other_suffix: str) -> str:
    if path.suffix.lower() not in FORMATS:
        suffixes = ", ".join((*FORMATS, other_suffix))
        raise InvalidArgument(f"cannot save as {path.suffix or path.name!r}: the suffix must be one of {suffixes}")
    return FORMATS[path.suffix.lower()]
