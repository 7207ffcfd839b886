"""HTML of a result for a notebook: the predictions, and its maps side by side over the photo."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import asdict
from typing import Any

import numpy as np

from camserve._show import html
from camserve._values import display
from camserve._values.picture import Picture, check_total, encode_picture
from camserve._values.result import Explanation, Result
from camserve._values.targets import Finer, Similarity

_SIGNED_METHODS = frozenset({"integrated_gradients"})
_SMALL_PIXELS = 300_000  # of all small pictures together, so that a notebook stays small
_SMALL_SIDES = (96, 256)  # of one of them
_QUALITY = 80


@display.html.register(Explanation)
def explanation_html(explanation: Explanation) -> str:
    """Return the overlay of an explanation with its title as HTML."""
    return html.figure(explanation.overlay_picture, explanation.heading, explanation.note)


@display.html.register(Result)
def result_html(result: Result) -> str:
    """Return a result as HTML.

    Without raw maps, or if the photo is not available any more, it has the overlays instead of the comparison.
    """
    maps = [explanation for explanation in result.explanations if explanation.heatmap is not None]
    receipt = maps[0].receipt_or_none if maps else None
    photo = result.source.thumbnail(receipt.image_sha256) if receipt else None
    rows = [(prediction.name, f"{prediction.probability:.1%}") for prediction in result.predictions]
    rows += [(f"{each.name} (unchanged model)", f"{each.probability:.1%}") for each in result.unchanged_predictions]
    if photo is None:
        return html.page(result.model, rows, [explanation.html() for explanation in result.explanations])
    data = {
        "photo": asdict(result.photo),
        "image": html.data_url(photo, "jpeg"),
        "maps": [_plain(explanation) for explanation in maps],
    }
    check_total(each.overlay_picture for each in maps)
    figures = [html.figure(_small(each.overlay_picture, len(maps)), each.heading, each.note) for each in maps]
    return html.comparison(html.table(("class", "probability"), rows, result.model), data, figures)


def _plain(explanation: Explanation) -> dict[str, Any]:
    heatmap: Any = explanation.heatmap
    values = b64encode(np.ascontiguousarray(heatmap, "<f4").tobytes()).decode()
    return {
        "title": explanation.heading,
        "layer": explanation.layer,
        "warning": explanation.warning,
        "signed": _is_signed(explanation),
        "heatmap": {"height": heatmap.shape[0], "width": heatmap.shape[1], "data": values},
    }


def _is_signed(explanation: Explanation) -> bool:
    """Return True if evidence against the target matters as much as evidence for it."""
    # The server does not send back the target of a similarity.
    is_similarity = explanation.resolved is None and explanation.target.label == "similarity"
    is_comparison = explanation.contrast is not None or isinstance(explanation.resolved, Finer | Similarity)
    return is_similarity or is_comparison or explanation.method in _SIGNED_METHODS


def _small(picture: Picture | None, count: int) -> Picture | None:
    if picture is None:
        return None
    smallest, largest = _SMALL_SIDES
    side = round(min(largest, max(smallest, (_SMALL_PIXELS / count) ** 0.5)))
    image = picture.open()
    image.thumbnail((side, side))
    return Picture("jpeg", encode_picture(image, "jpeg", _QUALITY), *image.size)
