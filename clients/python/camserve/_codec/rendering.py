"""Encode the options of pictures and regions as a protobuf message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from camserve._core.checks import check_range, invalid, look_up
from camserve._values.regions import MAX_REGIONS, RegionOptions, RegionsLike
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from camserve._values.options import ExplainArguments

PICTURE_FORMATS: Mapping[str | None, explain_pb2.ImageFormat.ValueType] = {
    None: explain_pb2.IMAGE_FORMAT_UNSPECIFIED,
    "jpeg": explain_pb2.IMAGE_FORMAT_JPEG,
    "png": explain_pb2.IMAGE_FORMAT_PNG,
    "webp": explain_pb2.IMAGE_FORMAT_WEBP,
}
PROFILES: Mapping[str, explain_pb2.Profile.ValueType] = {
    "paper": explain_pb2.PROFILE_PAPER,
    "grad-cam": explain_pb2.PROFILE_GRAD_CAM,
    "torchcam": explain_pb2.PROFILE_TORCHCAM,
    "captum": explain_pb2.PROFILE_CAPTUM,
    "signed": explain_pb2.PROFILE_SIGNED,
}
SIGNS: Mapping[str | None, explain_pb2.Sign.ValueType] = {
    None: explain_pb2.SIGN_UNSPECIFIED,
    "positive": explain_pb2.SIGN_POSITIVE,
    "negative": explain_pb2.SIGN_NEGATIVE,
    "both": explain_pb2.SIGN_BOTH,
    "absolute": explain_pb2.SIGN_ABSOLUTE,
}

_MAX_FLOAT = float(np.finfo(np.float32).max)
_SCALES: Mapping[str, dict[str, Any]] = {"map": {}, "request": {"shared_scale": True}}
_RANGES: Mapping[str, tuple[float, float]] = {
    "alpha": (0, 1),
    "max_side": (16, 16384),
    "quality": (1, 100),
    "threshold": (0, 1),
    "threshold_value": (0, _MAX_FLOAT),
    "contour_lines": (0, 16),
}


def encode_rendering(options: ExplainArguments) -> explain_pb2.Rendering:
    """Encode the options of an explanation that say how its pictures are drawn.

    Raises:
        InvalidArgument: An option is out of range, or two exclude each other.
    """
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(options, name), low, high)
    return explain_pb2.Rendering(
        overlay=look_up(PICTURE_FORMATS, options.overlay, "rendering.overlay"),
        heatmap=options.heatmap,
        heatmap_image=look_up(PICTURE_FORMATS, options.heatmap_image, "rendering.heatmap_image"),
        colormap=options.colormap or _default_colormap(options),
        alpha=options.alpha,
        max_side=options.max_side or 0,
        quality=options.quality or 0,
        profile=look_up(PROFILES, options.profile, "rendering.profile"),
        intensity=options.intensity,
        sign=look_up(SIGNS, options.sign, "rendering.sign"),
        contour_lines=options.contour_lines,
        color_bar=options.color_bar,
        fade=options.fade,
        regions=_encode_regions(options.regions),
        bands=options.bands,
        window=_encode_window(options.window),
        **_encode_scale(options.scale),
        **_encode_threshold(options.threshold, options.threshold_value),
    )


def _encode_window(window: tuple[float, float] | None) -> explain_pb2.Window | None:
    if window is None:
        return None
    centre, width = window
    if not width > 0:
        raise invalid("rendering.window", f"a width of {width} is not above 0")
    return explain_pb2.Window(centre=centre, width=width)


def _default_colormap(options: ExplainArguments) -> str:
    # The server would choose the same.
    is_signed = options.sign == "both" or (options.sign is None and options.profile == "signed")
    return "coolwarm" if is_signed else "jet"


def _encode_scale(scale: str | float) -> dict[str, Any]:
    if isinstance(scale, str):
        return look_up(_SCALES, scale, "rendering.scale")
    if not 0 < scale <= _MAX_FLOAT:
        raise invalid("rendering.scale", f'{scale} is not a number above 0, "map" or "request"')
    return {"scale_value": scale}


def _encode_threshold(quantile: float | None, value: float | None) -> dict[str, Any]:
    if quantile is not None and value is not None:
        raise invalid("threshold", "it cannot be combined with threshold_value")
    return {"threshold_quantile": quantile, "threshold_value": value}


def _encode_regions(regions: RegionsLike) -> explain_pb2.RegionOptions | None:
    if not are_regions_requested(regions):
        return None
    options = _region_options(regions)
    check_range("rendering.regions.quantile", options.quantile, 0, 1)
    check_range("rendering.regions.mass", options.mass, 0, 1)
    check_range("rendering.regions.max_regions", options.max_regions, 1, MAX_REGIONS)
    if options.quantile is not None and options.mass is not None:
        raise invalid("rendering.regions.quantile", "it cannot be combined with mass")
    threshold: dict[str, Any] = {"quantile": options.quantile, "mass": options.mass}
    return explain_pb2.RegionOptions(
        max_regions=options.max_regions, draw=options.draw, masks=options.masks, **threshold
    )


def are_regions_requested(regions: RegionsLike) -> bool:
    """Return False for None and False; 0 is a quantile."""
    return regions is not None and regions is not False


def _region_options(regions: RegionsLike) -> RegionOptions:
    if isinstance(regions, RegionOptions):
        return regions
    return RegionOptions() if regions is True else RegionOptions(quantile=regions)
