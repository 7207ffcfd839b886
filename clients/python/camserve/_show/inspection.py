"""Plot and HTML of an inspection, and HTML of channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve._show import html
from camserve._values import display
from camserve._values.inspection import Features, Inspection, target_name
from camserve._values.picture import Picture, encode_picture

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL import Image

_SHOWN: Mapping[str, str] = {
    "pca": "components: {shown}, of {count} channels",
    "factors": "concepts: {shown}, in {count} channels",
    "heads": "{shown} of {count} heads",
}
"""What a result shows in a notebook, by rank."""


@display.plot.register(Inspection)
def plot_inspection(inspection: Inspection) -> Image.Image:
    """Plot the norms of activation and gradient over depth."""
    from camserve._show.plots.norms import plot_norms  # noqa: PLC0415 -- the fonts are only loaded for a plot

    return plot_norms(inspection.title, inspection.leaves)


@display.html.register(Inspection)
def inspection_html(inspection: Inspection) -> str:
    """Return the plot, or the table if there is nothing to plot."""
    if not inspection.leaves:
        return f"<pre>{html.text(inspection.table())}</pre>"
    image = inspection.plot()
    picture = Picture("png", encode_picture(image, "png"), *image.size)
    return html.figure(picture, inspection.title, f"score {inspection.score:.3f}", width="none")


@display.html.register(Features)
def features_html(features: Features) -> str:
    """Return the tiles, with a note of what they are."""
    note = _SHOWN.get(features.rank, "{shown} of {count} channels").format(
        shown=len(features.channels), count=features.channel_count
    )
    if features.target and features.rank != "heads":
        note += f" · {target_name(features.target, features.contrast)}"
    return html.figure(features.picture, f"{features.model} · {features.layer}", note, width="none")
