"""Durations of the stages of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Duration of each stage of a request, in milliseconds, and the size of its largest batch.

    No time is counted twice, even if several batches of the request run at once.

    Attributes:
        decode_ms: Time to decode and resize the photo.
        queue_ms: Time in the queue while none of the request's batches ran.
        compute_ms: Time in which at least one of the request's batches ran.
        render_ms: Time to draw and encode the pictures.
        batch_rows: Number of rows of the largest batch that the request was part of.

    Example:
        >>> timing = client.explain("cat.jpg").timing
        >>> print(f"in a batch of {timing.batch_rows}: {timing.compute_ms:.1f} ms")
        in a batch of 1: ... ms
    """

    decode_ms: float
    queue_ms: float
    compute_ms: float
    render_ms: float
    batch_rows: int
