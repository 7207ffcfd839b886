"""Explain photos for a recording."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import grpc

from camserve._core.errors import CamserveError, Internal
from camserve._transport.photo_errors import is_photo_error, is_request_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from camserve._sync.client import Client
    from camserve._transport.stream import Outcome
    from camserve._values.options import ExplainOptions, ImageWithOptions
    from camserve.diff.recording import Recording

THUMBNAIL_SIDE: Final = 256  # pixels
_MAP: Final[ExplainOptions] = {"heatmap": True, "overlay": None}
_THUMBNAIL: Final[ExplainOptions] = {"overlay": "jpeg", "alpha": 0.0, "max_side": THUMBNAIL_SIDE, "quality": 75}
"""Rendering options for an overlay that is a small copy of the photo alone, which the server has decoded anyway."""


def record(
    client: Client,
    recording: Recording,
    photos: Mapping[str, Path],
    options: ExplainOptions,
    baseline: Recording | None = None,
    on_photo: Callable[[], object] = lambda: None,
) -> dict[str, CamserveError]:
    """Explain photos, and add them to a recording.

    Args:
        client: Client of the server.
        recording: The recording.
        photos: Paths of the photos to explain by name.
        options: The options, with the model.
        baseline: The recording whose targets are explained. The new recording also gets a small copy of each photo.
            None to explain the targets of the options, or the model's own.
        on_photo: Function to call after each photo.

    Returns:
        The errors of the photos that could not be explained.

    Raises:
        CamserveError: The server is unavailable, or every photo would get this error.
        OSError: The recording cannot be written.
    """
    failures: dict[str, CamserveError] = {}
    if baseline is not None:
        options = {**options, **_THUMBNAIL}
    items = (_item(name, path, baseline) for name, path in photos.items())
    with closing(recording), closing(explain_items(client, items, options)) as outcomes:
        for name, outcome in zip(photos, outcomes, strict=True):
            if isinstance(outcome, CamserveError):
                failures[name] = outcome
            else:
                recording.append(name, outcome)
            on_photo()
    return failures


def explain_items(client: Client, items: Iterator[ImageWithOptions], options: ExplainOptions) -> Any:
    """Yield the result or the error of each item, in their order.

    Raises:
        CamserveError: The server is unavailable, or every photo would get this error.
    """
    rendered: ExplainOptions = {**_MAP, **options}
    with closing(client.explain_many(items, on_error="return", **rendered)) as outcomes:
        for outcome in outcomes:
            yield _checked(outcome)


def _checked(outcome: Outcome) -> Outcome:
    if isinstance(outcome, CamserveError):
        queue_is_full = outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not is_photo_error(outcome)
        if is_request_error(outcome) or queue_is_full:
            raise outcome  # the photo is not at fault
        return outcome
    if not outcome.explanations or any(each.heatmap is None for each in outcome.explanations):
        raise Internal("the server sent no map")
    return outcome


def _item(name: str, path: Path, baseline: Recording | None) -> ImageWithOptions:
    return {"image": path} if baseline is None else {"image": path, "targets": baseline.photo(name).targets}
