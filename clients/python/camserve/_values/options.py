"""Options of the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Required, TypeAlias, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from camserve._values.inspection import FeatureBasis
    from camserve._values.interventions import Intervention
    from camserve._values.methods import Method
    from camserve._values.regions import RegionsLike
    from camserve._values.targets import TargetLike

_Value: TypeAlias = "np.uint8 | np.uint16 | np.float32"  # of a pixel
ImageLike: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[_Value]"
MethodLike: TypeAlias = "str | Method | tuple[str, Mapping[str, float | str]]"


class ExplainOptions(TypedDict, total=False):
    """Options of an explanation: what to explain and what to return. All are optional.

    Attributes:
        model: Name of a loaded model. Default: the server's first model.
        methods: One method or several, up to 16. Each is a name, a ``Method``, or a pair of name
            and parameters. Default: gradcam.
        targets: One target or several, up to 16: labels, class indices, ``contrast(a, b)``,
            ``finer(a)``, ``probability(a)``, ``segment(a)``, ``mask(a, image)``, ``detection(a)``,
            ``similarity(image)`` or ``text(a)``. Default: the ``top_k`` most probable classes.
        layers: One layer or several, up to 8, by name; or "pyramid": all scales of a detector in one
            map. Default: the pyramid, if the model has one, or else its default layer.
        fusion: How to combine the maps of several layers into one: "mean", "max", "product" or
            "sum". Each map is resized bilinearly to the finest grid. For a sum it stays signed, and
            is divided by the area of its cells; otherwise it is first cut at zero, and scaled from
            its minimum and maximum to 0 and 1. Default: None, which is "sum" for the pyramid, or
            else one map for each layer.
        top_k: Number of classes to explain if there are no targets, 1 to 16: the most probable ones;
            for a segmentation the largest ones, for a detector the objects with the highest scores.
            Default: 1.
        heatmap: True to return the raw map. Default: True.
        overlay: Format of the overlay: "jpeg", "png", "webp", or None for no overlay.
            Default: "jpeg".
        heatmap_image: Format of a picture of the heatmap alone, in colour and in the size of the
            overlay. Default: None.
        colormap: Name of the colour map. Default: None, which is "coolwarm" if positive and negative
            values are shown, otherwise "jet".
        alpha: Opacity of the heatmap over the photo, 0 to 1. Default: 0.5.
        max_side: Maximum length of a picture's longer side in pixels, 16 to 16384. Pictures are
            never enlarged. Default: the photo's own size.
        quality: Quality of JPEG and WebP pictures, 1 to 100. Default: 90.
        max_predictions: Number of predictions to return, 0 to 1000. Default: 5.
        profile: Convention that converts raw values to colours: "paper", "grad-cam" (that of
            pytorch-grad-cam), "torchcam", "captum", or "signed" for evidence for and against the
            target, in two colours around zero. The raw values stay the same. Default: "paper".
        intensity: True to return the intensities that are coloured, 0 to 1, at the resolution of
            the model's input; -1 to 1 if positive and negative values are shown. With "torchcam"
            they can slightly exceed that range, because it interpolates bicubically.
            Default: False.
        sign: The values to show: "positive", "negative", "both" or "absolute". Default: None, which
            is "both" for the profile "signed", otherwise "positive".
        scale: Raw value that gets the strongest colour: "map" for each map's own, "request" for the
            largest of all maps of this request, or a number above 0, such as ``Explanation.scale``
            of an earlier result, to compare the pictures. Default: "map".
        threshold: Quantile of the shown values, 0 to 1, below which nothing is drawn: 0.8 draws
            the strongest fifth. Default: None, which draws every value.
        threshold_value: Raw value, 0 or more, below which nothing is drawn, instead of
            ``threshold``. Default: None.
        contour_lines: Number of contour lines at equally spaced intensities, 0 to 16. Default: 0.
        color_bar: True to add a bar with the colours and their raw values to the right of the
            picture, which becomes wider than the photo. Default: False.
        fade: True to multiply the opacity by the intensity, so that the photo shows where the map is
            weak. Default: False.
        regions: The regions of each map to return: True for those above the quantile 0.8, another
            quantile, or ``RegionOptions``. Default: False.
        class_map: True to return the predicted class of each cell, for models of semantic
            segmentation. Default: False.
        texts: Texts that are the classes of this request, up to 1000, for models that compare images
            with texts, such as CLIP: ``result.predictions`` are then these texts, and targets may name
            them as labels. Default: the labels of the model.
        value_range: Values of the photo that the model takes as 0 and 1, such as ``(0, 4095)`` for 12
            bits in a file of 16. Default: those of the values' type: 0 and 255, 0 and 65,535, or 0 and 1.
        bands: Channels of the photo to show under the map, one as grey or three as red, green and blue.
            Default: the first three, or the first if there are fewer.
        window: Centre and width of the values of the photo to show, from black to white. Default: all
            values of 8 bits, otherwise from the smallest to the largest value.
        interventions: Changes to what layers return while the request is computed, up to 16, in this
            order: ``silence(layer, channels)``, ``scale``, ``clamp``, ``replace_mean`` or
            ``clip_gradient``. ``result.predictions`` are those of the changed model, and
            ``result.unchanged_predictions`` those of the model itself. Default: none.

    Example:
        >>> options: camserve.ExplainOptions = {"methods": ["gradcam"], "targets": ["tabby"], "max_side": 200}
        >>> explanation = client.explain("cat.jpg", **options).explanations[0]
        >>> explanation.heading, explanation.image.size
        ('tabby · gradcam', (200, 133))
    """

    model: str | None
    methods: MethodLike | Sequence[MethodLike]
    targets: TargetLike | Iterable[TargetLike] | None
    layers: str | Sequence[str] | None
    fusion: str | None
    top_k: int
    heatmap: bool
    overlay: str | None
    heatmap_image: str | None
    colormap: str | None
    alpha: float
    max_side: int | None
    quality: int | None
    max_predictions: int
    profile: str
    intensity: bool
    sign: str | None
    scale: str | float
    threshold: float | None
    threshold_value: float | None
    contour_lines: int
    color_bar: bool
    fade: bool
    regions: RegionsLike
    class_map: bool
    texts: Sequence[str]
    value_range: tuple[float, float] | None
    bands: Sequence[int]
    window: tuple[float, float] | None
    interventions: Sequence[Intervention]


class ImageWithOptions(ExplainOptions):
    """An image for ``explain_many``, and options for this image alone.

    Attributes:
        image: The image, as for ``explain``.

    Example:
        >>> item: camserve.ImageWithOptions = {"image": "cat.jpg", "targets": ["tiger cat"]}
        >>> results = client.explain_many(["cat.jpg", item])
        >>> [result.explanations[0].title for result in results]
        ['Egyptian cat', 'tiger cat']
    """

    image: Required[ImageLike]


ImageItem: TypeAlias = "ImageLike | ImageWithOptions"
"""An item of ``explain_many``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainArguments:
    """The fields of ``ExplainOptions`` with their defaults."""

    model: str | None = None
    methods: MethodLike | Sequence[MethodLike] = ("gradcam",)
    targets: TargetLike | Iterable[TargetLike] | None = None
    layers: str | Sequence[str] | None = None
    fusion: str | None = None
    top_k: int = 1
    heatmap: bool = True
    overlay: str | None = "jpeg"
    heatmap_image: str | None = None
    colormap: str | None = None
    alpha: float = 0.5
    max_side: int | None = None
    quality: int | None = None
    max_predictions: int = 5
    profile: str = "paper"
    intensity: bool = False
    sign: str | None = None
    scale: str | float = "map"
    threshold: float | None = None
    threshold_value: float | None = None
    contour_lines: int = 0
    color_bar: bool = False
    fade: bool = False
    regions: RegionsLike = False
    class_map: bool = False
    texts: Sequence[str] = ()
    value_range: tuple[float, float] | None = None
    bands: Sequence[int] = ()
    window: tuple[float, float] | None = None
    interventions: Sequence[Intervention] = ()


class InspectOptions(TypedDict, total=False):
    """Options of an inspection: what to measure. All are optional.

    Attributes:
        model: Name of a loaded model. Default: the server's first model.
        target: The target whose score is differentiated: a label, a class index, or
            ``contrast(a, b)``. Default: the class that the model predicts.
        layers: One layer or several, by name. Default: every module that runs.
        texts: Texts that are the classes of this request: see ``ExplainOptions``.
        value_range: Values of the photo that the model takes as 0 and 1: see ``ExplainOptions``.
        interventions: Changes to what layers return: see ``ExplainOptions``.

    Example:
        >>> options: camserve.InspectOptions = {"target": "tabby", "layers": ["conv_stem", "bn2"]}
        >>> inspection = client.inspect("cat.jpg", **options)
        >>> inspection.target.label, [layer.name for layer in inspection.layers]
        ('tabby', ['conv_stem', 'bn2'])
    """

    model: str | None
    target: TargetLike | None
    layers: str | Sequence[str] | None
    texts: Sequence[str]
    value_range: tuple[float, float] | None
    interventions: Sequence[Intervention]


class FeaturesOptions(TypedDict, total=False):
    """Options of a request for channels: which channels to return, and how. All are optional.

    Attributes:
        layer: Name of the layer. Default: the model's default layer; for "heads", the last attention.
        model: Name of a loaded model. Default: the server's first model.
        target: The target that the gradient weights are computed for: see ``InspectOptions``.
        rank: Order of the channels: "activation", by their mean; or "gradient", by the absolute
            value of their Grad-CAM weight. The greatest is first. Or what to return instead of
            channels: "pca", the principal components of the features; "factors", the concepts of a
            deep feature factorisation; "heads", the heads of an attention. Default: "activation".
        top: Number of channels, 1 to 256. A layer with fewer returns all. Default: 16; 3 components;
            5 concepts, of which 32 is the limit; all heads.
        maps: True to return the raw maps. Default: True.
        picture: Format of a picture with a tile for each channel: "png", "jpeg", "webp", or None
            for no picture. Default: "png".
        colormap: Name of the tiles' colour map. Default: "viridis".
        texts: Texts that are the classes of this request: see ``ExplainOptions``.
        value_range: Values of the photo that the model takes as 0 and 1: see ``ExplainOptions``.
        interventions: Changes to what layers return: see ``ExplainOptions``.
        fit: With "pca", up to 15 further photos, whose features the components describe too.
        basis: With "pca", the ``basis`` of an earlier result to project the features on, instead of
            computing components.
        foreground: With "pca", True to leave out the background, found by the first component.

    Example:
        >>> options: camserve.FeaturesOptions = {"layer": "bn2", "rank": "gradient", "top": 4, "picture": None}
        >>> client.features("cat.jpg", **options).maps.shape
        (4, 7, 7)
    """

    layer: str | None
    model: str | None
    target: TargetLike | None
    rank: str
    top: int | None
    maps: bool
    picture: str | None
    colormap: str
    texts: Sequence[str]
    value_range: tuple[float, float] | None
    interventions: Sequence[Intervention]
    fit: Sequence[ImageLike]
    basis: FeatureBasis | None
    foreground: bool
