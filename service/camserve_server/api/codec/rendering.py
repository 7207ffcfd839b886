"""Codec of the rendering of a request: pictures, scales, thresholds and regions."""

import math
from collections.abc import Sequence
from typing import Literal

from camserve.v1 import explain_pb2
from camserve_server.api.codec.checks import MAX_FLOAT, MAX_SIDE, check_range
from camserve_server.api.codec.formats import FORMATS, PROFILES, SIGNS
from camserve_server.core.errors import InvalidArgument
from camserve_server.imaging.channels import MAX_CHANNELS
from camserve_server.imaging.values import Profile, RegionOptions, Rendering, Sign, Threshold

MIN_SIDE = 16  # pixels of the longer side of a picture
MAX_CONTOUR_LINES = 16
MAX_REGIONS = 64
MIN_MAX_PROFILES: tuple[Profile, ...] = ("grad-cam", "torchcam")
"""Profiles that scale each map from its minimum to its maximum, so that no other scale and no middle fits them."""


def read_rendering(message: explain_pb2.Rendering) -> Rendering:
    """Check the rendering of a request, and fill in the defaults.

    Raises:
        InvalidArgument: a field is out of range, or does not fit the profile.
    """
    alpha = message.alpha if message.HasField("alpha") else 0.5
    check_range(alpha, 0.0, 1.0, "rendering.alpha")
    if message.max_side:
        check_range(message.max_side, MIN_SIDE, MAX_SIDE, "rendering.max_side")
    check_range(message.quality, 0, 100, "rendering.quality")
    check_range(message.contour_lines, 0, MAX_CONTOUR_LINES, "rendering.contour_lines")
    profile, sign = _read_profile(message)
    return Rendering(
        overlay=read_format(message.overlay, "rendering.overlay"),
        heatmap_image=read_format(message.heatmap_image, "rendering.heatmap_image"),
        heatmap=message.heatmap,
        colormap=message.colormap or ("coolwarm" if sign == "both" else "jet"),
        alpha=alpha,
        max_side=message.max_side or None,
        quality=message.quality or 90,
        profile=profile,
        intensity=message.intensity,
        sign=sign,
        scale=_read_scale(message, profile),
        threshold=_read_threshold(message),
        contour_lines=message.contour_lines,
        color_bar=message.color_bar,
        fade=message.fade,
        regions=_read_regions(message.regions) if message.HasField("regions") else None,
        bands=_read_bands(message.bands),
        window=_read_window(message.window) if message.HasField("window") else None,
    )


def _read_bands(bands: Sequence[int]) -> tuple[int, ...]:
    if len(bands) not in (0, 1, 3):
        fault = f"are one channel, shown as grey, or three, shown as colours, and not {len(bands)}"
        raise InvalidArgument.of_field("rendering.bands", fault)
    for index, band in enumerate(bands):
        check_range(band, 0, MAX_CHANNELS - 1, f"rendering.bands[{index}]")
    return tuple(bands)


def _read_window(message: explain_pb2.Window) -> tuple[float, float]:
    centre, width = message.centre, message.width
    check_range(centre, -MAX_FLOAT, MAX_FLOAT, "rendering.window.centre")
    if not 0 < width <= MAX_FLOAT:
        raise InvalidArgument.of_field("rendering.window.width", f"is a finite number above 0, not {width:g}")
    return centre - width / 2, centre + width / 2


def _read_profile(message: explain_pb2.Rendering) -> tuple[Profile, Sign]:
    if message.profile not in PROFILES:
        raise InvalidArgument(f"unknown profile {message.profile}", field="rendering.profile")
    if message.sign not in SIGNS:
        raise InvalidArgument(f"unknown sign {message.sign}", field="rendering.sign")
    name = PROFILES[message.profile]
    sign: Sign = SIGNS[message.sign] or ("both" if name == "signed" else "positive")
    profile: Profile = "paper" if name == "signed" else name
    if sign == "both" and profile in MIN_MAX_PROFILES:
        raise InvalidArgument(
            f'the profile "{profile}" scales each map from its minimum to its maximum, so that 0 is not in the middle: '
            "choose another sign or profile",
            field="rendering.sign",
        )
    return profile, sign


def _read_scale(message: explain_pb2.Rendering, profile: Profile) -> float | Literal["own", "shared"]:
    field = message.WhichOneof("scale")
    if field is None or (field == "shared_scale" and not message.shared_scale):
        return "own"
    if profile in MIN_MAX_PROFILES:
        raise InvalidArgument(
            f'the profile "{profile}" scales each map from its minimum to its maximum: choose another profile',
            field=f"rendering.{field}",
        )
    if field == "shared_scale":
        return "shared"
    if not (message.scale_value > 0 and math.isfinite(message.scale_value)):
        raise InvalidArgument.of_field(
            "rendering.scale_value", f"is a finite number above 0, not {message.scale_value:g}"
        )
    return message.scale_value


def _read_threshold(message: explain_pb2.Rendering) -> Threshold | None:
    match message.WhichOneof("threshold"):
        case "threshold_quantile":
            check_range(message.threshold_quantile, 0.0, 1.0, "rendering.threshold_quantile")
            return Threshold("quantile", message.threshold_quantile)
        case "threshold_value":
            value = message.threshold_value
            if not (value >= 0 and math.isfinite(value)):
                raise InvalidArgument.of_field("rendering.threshold_value", f"is a finite number from 0, not {value:g}")
            return Threshold("value", value)
        case None:
            return None


def _read_regions(message: explain_pb2.RegionOptions) -> RegionOptions:
    default = RegionOptions()
    most = message.max_regions if message.HasField("max_regions") else default.most
    check_range(most, 1, MAX_REGIONS, "rendering.regions.max_regions")
    threshold = default.threshold
    if kind := message.WhichOneof("threshold"):
        share: float = getattr(message, kind)
        check_range(share, 0.0, 1.0, f"rendering.regions.{kind}")
        threshold = Threshold(kind, share)
    return RegionOptions(threshold, most, message.draw, message.masks)


def read_format(value: "explain_pb2.ImageFormat.ValueType", field: str) -> Literal["jpeg", "png", "webp"] | None:
    """Return the name of a picture's encoding, or None for no picture.

    Raises:
        InvalidArgument: the encoding is unknown.
    """
    if value not in FORMATS:
        raise InvalidArgument(f"unknown image format {value}", field=field)
    return FORMATS[value]
