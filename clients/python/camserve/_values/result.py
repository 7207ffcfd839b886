"""Results: predictions, and an explanation for each method, layer and target."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from camserve._core.errors import FailedPrecondition, InvalidArgument
from camserve._core.files import npy_file, write_file
from camserve._values import display
from camserve._values.comparison import Comparison, compare_explanations
from camserve._values.photo_source import PhotoSource
from camserve._values.picture import FORMATS, Photo, Picture
from camserve._values.resampling import classes_onto_photo, onto_photo
from camserve._values.verdict import Verdict

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from camserve._values.prediction import Prediction
    from camserve._values.receipt import Receipt
    from camserve._values.regions import Region
    from camserve._values.targets import BoxLike, TargetLike
    from camserve._values.timing import Timing

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Explanation:
    """Explanation of one target, by one method, on one layer.

    Attributes:
        method: Name of the method.
        layer: Name of the layer, "pyramid", or the names of several fused layers, joined by " + "; empty for
            methods that do not use a layer.
        target: The explained class or object.
        contrast: For a contrast, the class that it was explained against, else None.
        score: The explained score: a logit, the difference of two for a contrast, or the value of
            another target.
        verdict: Result of the check that the map can be read as an explanation.
        verdict_message: Description of the verdict; empty if it is OK.
        parameters: Parameters of the method, defaults included.
        photo: Geometry of the photo.
        heatmap: The raw map, float32 [h, w], read-only: signed, not normalised, on the grid of the
            layer, or of the model's input for methods without a layer. None if it was not requested.
        overlay_picture: The overlay; None if it was not requested.
        colored_picture: The heatmap alone in colour; None if it was not requested.
        resolved: The target as the server resolved it, to request the same again; None for a
            ``similarity`` or a ``mask``, whose image is not sent back.
        intensity: The intensities that are coloured, float32 [H, W], read-only, 0 to 1, at the
            resolution of the model's input; None if they were not requested.
        completeness_error: For methods whose maps must add up to the score minus a baseline's score,
            such as integrated gradients: the amount by which the map misses that difference, as a
            share of it. None for other methods.
        augmentation_smoothing: True if the map is the mean over augmented copies of the image.
        eigen_smoothing: True if the map is the first principal component instead of the sum.
        fusion: "mean", "max", "product" or "sum" if the maps of several layers were fused, else None.
        receipt_or_none: The receipt, see ``receipt``; None if the server sent none.
        scale: Raw value with the strongest colour, for the option ``scale`` of another request.
            0 if no value is shown, or if no picture, intensity or region was requested.
        regions: The regions of the map, if requested, the one with the largest sum first.
        input_channel: Channel of the model's input that the map is of, if ``Method.per_channel`` was
            set; None for a map of all channels.

    Example:
        >>> explanation = client.explain("cat.jpg", methods=["gradcam"], targets=["tabby"]).explanations[0]
        >>> explanation.title, explanation.how, explanation.heading, explanation.note
        ('tabby', 'gradcam', 'tabby · gradcam', 'bn2')
        >>> explanation.heatmap.shape, explanation.heatmap.dtype  # the grid of the layer
        ((7, 7), dtype('float32'))
        >>> explanation.image.size  # the overlay, which explanation.overlay has as a file
        (451, 300)
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
    scale: float = 0.0
    regions: tuple[Region, ...] = field(default=(), repr=False)
    input_channel: int | None = None

    @property
    def title(self) -> str:
        """Name of the explained class, and of the class that it was explained against.

        Example:
            >>> target = camserve.contrast("tabby", "tiger cat")
            >>> client.explain("cat.jpg", targets=[target]).explanations[0].title
            'tabby, not tiger cat'
        """
        against = f", not {self.contrast.name}" if self.contrast else ""
        return f"{self.target.name}{against}"

    @property
    def how(self) -> str:
        """Name of the method, the smoothing that was used, and the channel of the input, if the map is of one.

        Example:
            >>> method = camserve.Method("gradcam", eigen_smoothing=True)
            >>> client.explain("cat.jpg", methods=[method]).explanations[0].how
            'gradcam, eigen smoothing'
        """
        options = {
            "augmentation smoothing": self.augmentation_smoothing,
            "eigen smoothing": self.eigen_smoothing,
            f"channel {self.input_channel}": self.input_channel is not None,
        }
        return ", ".join((self.method, *(name for name, used in options.items() if used)))

    @property
    def receipt(self) -> Receipt:
        """The receipt: inputs, versions and results of the explanation, for ``Client.replay``.

        Raises:
            FailedPrecondition: The server does not support receipts.

        Example:
            >>> receipt = client.explain("cat.jpg", targets=["tabby"]).explanations[0].receipt
            >>> receipt.model, receipt.method, receipt.layers
            ('efficientnet_lite0', 'gradcam', ('bn2',))
        """
        if self.receipt_or_none is None:
            raise FailedPrecondition("the server sent no receipt: its version does not support them")
        return self.receipt_or_none

    @property
    def overlay(self) -> bytes:
        """File of the overlay: the heatmap drawn on the photo.

        Raises:
            FailedPrecondition: It was not requested.

        Example:
            >>> explanation = client.explain("cat.jpg", overlay="jpeg").explanations[0]
            >>> explanation.overlay[:2].hex()  # every JPEG file begins with these bytes
            'ffd8'
        """
        return _present(self.overlay_picture, "overlay", 'overlay="jpeg"').data

    @property
    def image(self) -> Image.Image:
        """The overlay as a PIL image.

        Raises:
            FailedPrecondition: It was not requested.
        """
        return _present(self.overlay_picture, "overlay", 'overlay="jpeg"').open()

    @property
    def heatmap_image(self) -> bytes:
        """File of the heatmap alone, in colour.

        Raises:
            FailedPrecondition: It was not requested.

        Example:
            >>> explanation = client.explain("cat.jpg", heatmap_image="png", overlay=None).explanations[0]
            >>> explanation.heatmap_image[1:4]
            b'PNG'
        """
        return _present(self.colored_picture, "heatmap image", 'heatmap_image="png"').data

    @property
    def heatmap_on_image(self) -> NDArray[np.float32]:
        """The raw map at the resolution of the photo: float32 [height, width].

        It is interpolated bilinearly, signed and not normalised, and NaN outside of ``photo.seen``.

        Raises:
            FailedPrecondition: The heatmap was not requested.

        Example:
            >>> heatmap = client.explain("cat.jpg").explanations[0].heatmap_on_image
            >>> heatmap.shape
            (300, 451)
            >>> heatmap[150, 0], heatmap[150, 200] > 0  # the model does not see the left edge of this photo
            (np.float32(nan), np.True_)
        """
        return onto_photo(_present(self.heatmap, "heatmap", "heatmap=True"), self.photo)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the overlay (.jpg, .png, .webp) or the raw map (.npy).

        The overlay is encoded again only if the suffix stands for another format than the received one.

        Returns:
            The path.

        Raises:
            InvalidArgument: The suffix is not supported.
            FailedPrecondition: The overlay or map was not requested.
            OSError: The file cannot be written.

        Example:
            >>> explanation = client.explain("cat.jpg").explanations[0]
            >>> explanation.save("why.png").name, explanation.save("why.npy").name
            ('why.png', 'why.npy')
            >>> import numpy as np
            >>> np.load("why.npy").shape
            (7, 7)
        """
        destination = Path(path)
        suffix = destination.suffix.lower()
        if suffix == ".npy":
            write_file(destination, npy_file(_present(self.heatmap, "heatmap", "heatmap=True")))
        elif suffix in FORMATS:
            picture = _present(self.overlay_picture, "overlay", 'overlay="jpeg"')
            write_file(destination, picture.encoded(FORMATS[suffix]))
        else:
            suffixes = ", ".join((*FORMATS, ".npy"))
            name = destination.suffix or destination.name
            raise InvalidArgument(f"cannot save as {name!r}: the suffix must be one of {suffixes}")
        return destination

    def compare(self, candidate: Explanation, box: BoxLike | None = None) -> Comparison:
        """Compare this map with one of the same photo, such as that of another model.

        Args:
            candidate: The other explanation.
            box: Position of the object in pixels of the photo, to compare the evidence in it: a ``Box``,
                or left, top, right, bottom.

        Raises:
            FailedPrecondition: A heatmap was not requested.
            InvalidArgument: The photos have different sizes, the models see no common part, or the box is
                invalid.

        Example:
            >>> tabby, tiger_cat = client.explain("cat.jpg", targets=["tabby", "tiger cat"]).explanations
            >>> comparison = tabby.compare(tiger_cat)
            >>> comparison.same_target, round(comparison.spearman, 2)  # they look at the same places
            (False, 0.98)
        """
        return compare_explanations(self, candidate, box)

    def _repr_png_(self) -> bytes | None:
        return self.overlay_picture.encoded("png") if self.overlay_picture else None

    @property
    def heading(self) -> str:
        """The title and the method."""
        return f"{self.title} · {self.how}"

    @property
    def warning(self) -> str:
        """The verdict with its description; empty if it is OK.

        Example:
            >>> silenced = client.explain("cat.jpg", interventions=[camserve.silence("bn2")])  # all features are zero
            >>> silenced.explanations[0].warning
            'FLAT: the map has the same value everywhere'
        """
        return "" if self.verdict is Verdict.OK else f"{self.verdict}: {self.verdict_message}"

    @property
    def note(self) -> str:
        """The layer and the warning."""
        return " · ".join(filter(None, (self.layer, self.warning)))

    def html(self) -> str:
        """The overlay with its title as HTML, for a notebook.

        Example:
            >>> print(client.explain("cat.jpg").explanations[0].html())
            <figure ...<img ...Egyptian cat · gradcam...</figure>
        """
        return display.html(self)

    def _repr_html_(self) -> str:
        return self.html()


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """Predictions and explanations of one image.

    Attributes:
        predictions: The most probable classes, most probable first. For a segmentation, the classes
            in the image, largest first and the background last. For a detector, the objects, highest
            score first. Empty for a model that returns embeddings.
        explanations: One for each method, layer and target: all targets of the first layer of the
            first method first. A method with ``per_channel`` has channels of the input instead of layers.
        model: Name of the model.
        request_id: Id of the request in the server's log.
        photo: Geometry of the photo, and of the part that the model saw.
        timing: Duration of each stage of the request.
        class_map: The predicted class of each cell of a segmentation, uint16 [h, w], read-only, over
            the part of the photo that the model saw; None if it was not requested.
        source: Reference to the photo, for the display in a notebook.
        unchanged_predictions: The predictions of the model without the request's interventions, as many
            as ``predictions``; empty for a request without interventions.

    Example:
        >>> result = client.explain("cat.jpg", methods=["gradcam", "layercam"], top_k=2)
        >>> [(prediction.label, round(prediction.probability, 2)) for prediction in result.predictions[:2]]
        [('Egyptian cat', 0.38), ('tiger cat', 0.32)]
        >>> [explanation.heading for explanation in result.explanations]
        ['Egyptian cat · gradcam', 'tiger cat · gradcam', 'Egyptian cat · layercam', 'tiger cat · layercam']
        >>> result.size
        (451, 300)
    """

    predictions: tuple[Prediction, ...]
    explanations: tuple[Explanation, ...]
    model: str
    request_id: str
    photo: Photo
    timing: Timing
    class_map: NDArray[np.uint16] | None = field(default=None, repr=False)
    source: PhotoSource = field(default_factory=PhotoSource, repr=False)
    unchanged_predictions: tuple[Prediction, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the photo in pixels, upright."""
        return self.photo.width, self.photo.height

    @property
    def class_map_on_image(self) -> NDArray[np.int32]:
        """The predicted class of each pixel of the photo: int32 [height, width].

        It is that of the cell that the pixel's centre lies in, and -1 outside of ``photo.seen``.

        Raises:
            FailedPrecondition: The class map was not requested.

        Example:
            >>> result = client.explain("cat.jpg", model="segmenter", class_map=True)
            >>> classes = result.class_map_on_image
            >>> classes.shape, client.model("segmenter").labels[classes[250, 350]]
            ((300, 451), 'red')
        """
        return classes_onto_photo(_present(self.class_map, "class map", "class_map=True"), self.photo)

    def html(self) -> str:
        """The predictions, and a comparison of the maps over the photo, as HTML for a notebook.

        It needs no server. If the maps were not requested, or the photo is not available any more, it
        has the overlays instead.

        Example:
            >>> from pathlib import Path
            >>> page = client.explain("cat.jpg").html()
            >>> Path("why.html").write_text(page, encoding="utf-8") == len(page)
            True
        """
        return display.html(self)

    def _repr_html_(self) -> str:
        return self.html()


def _present(part: T | None, name: str, option: str) -> T:
    if part is None:
        raise FailedPrecondition(f"the result has no {name}; request it with client.explain(..., {option})")
    return part
