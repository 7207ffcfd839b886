"""Limits on what one request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; more is refused before it costs anything. SECURITY.md has them as a table.

    Attributes:
        pixels: of a photo.
        side: longer side of a photo, in pixels.
        rows: that it may cost.
        chunk: rows of it that may be under way at once: what it takes up of the queue, and how soon it stops when it is
            cancelled.
        explanations: maps.
        drawn_pixels: of all its pictures together.
        methods: named.
        metrics: named.
        parameters: of one method or metric.
        targets: named.
        against: classes that one target is told from.
        layers: named, to be explained.
        inspected: layers named, to be measured.
        predictions: told.
        channels: told of a layer.
        raw_bytes: of a layer's raw maps; what is larger belongs in smaller pieces than one message.
        text: characters of a name, a label or any other text.
        images: of one ModelInfer.
        tensors: of one ModelInfer, that go in or come out.
        axes: of a tensor's shape.
        asked: parameters of one ModelInfer.
    """

    pixels: int = 16_777_216
    side: int = 16_384
    rows: int = 16_384
    chunk: int = 64
    explanations: int = 64
    drawn_pixels: int = 200_000_000
    methods: int = 16
    metrics: int = 16
    parameters: int = 16
    targets: int = 16
    against: int = 8
    layers: int = 8
    inspected: int = 4096
    predictions: int = 1000
    channels: int = 256
    raw_bytes: int = 32 * 2**20
    text: int = 1000
    images: int = 8
    tensors: int = 16
    axes: int = 8
    asked: int = 32
