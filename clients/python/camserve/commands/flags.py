"""The options of `camserve explain`, and those of the call that they stand for."""

from __future__ import annotations

from typing import Any, TypedDict, cast

import camserve


class ExplainFlags(TypedDict):
    """Options of `explain` that say what to explain and which files to write."""

    model: str | None
    methods: tuple[camserve.Method, ...]
    targets: tuple[camserve.TargetLike, ...]
    texts: tuple[str, ...]
    interventions: tuple[camserve.Intervention, ...]
    layers: tuple[str, ...]
    fusion: str | None
    top_k: int
    colormap: str | None
    alpha: float
    overlay: str
    heatmap: bool
    intensity: bool
    receipts: bool
    profile: str
    sign: str | None
    scale: str | float
    threshold: float | None
    threshold_value: float | None
    contour_lines: int
    color_bar: bool
    fade: bool
    regions: bool
    region_quantile: float | None
    region_mass: float | None
    max_regions: int | None
    draw_regions: bool
    max_side: int | None
    value_range: tuple[float, float] | None
    bands: tuple[int, ...]
    window: tuple[float, float] | None


_REGION_OPTIONS = {
    "region_quantile": "quantile",
    "region_mass": "mass",
    "max_regions": "max_regions",
    "draw_regions": "draw",
}
"""Fields of ``RegionOptions`` by the flags that set them."""


_OPTIONAL = ("value_range", "bands", "window")
"""Options that a job records only if they are given, so that a newer client continues the jobs of an older one."""


def explain_options(flags: ExplainFlags) -> camserve.ExplainOptions:
    """Return the options of the call."""
    omitted = {"receipts", "regions", *_REGION_OPTIONS}
    options = {name: value for name, value in flags.items() if name not in omitted}
    for name in _OPTIONAL:
        if not options.get(name):
            options.pop(name, None)
    options["regions"] = region_options(flags, masks=True)
    # A receipt contains the raw map, to compare with.
    options["heatmap"] = flags["heatmap"] or flags["receipts"]
    return cast("camserve.ExplainOptions", options)


def region_options(flags: ExplainFlags, *, masks: bool) -> camserve.RegionOptions | None:
    """Return the options of regions; None if no flag asks for them."""
    # A program that runs a job may leave flags out.
    values: dict[str, Any] = {field: flags.get(flag) for flag, field in _REGION_OPTIONS.items()}
    given = {field: value for field, value in values.items() if value is not None and value is not False}
    return camserve.RegionOptions(masks=masks, **given) if given or flags.get("regions") else None
