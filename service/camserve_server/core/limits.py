"""Limits on what one request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one request, checked before any computation. SECURITY.md lists them in a table.

    Attributes:
        pixels: pixels in a photo.
        side: longer side of a photo, in pixels.
        rows: rows that a request may need.
        chunk: rows of one request that are queued or running at the same time. It bounds the share of the queue that a
            request takes, and the work left to do when the request is cancelled.
        explanations: maps.
        drawn_pixels: pixels in all pictures of a request together.
        methods: methods.
        metrics: metrics.
        parameters: parameters of one method or metric.
        targets: targets.
        against: classes that one target is compared with.
        layers: layers to explain.
        inspected: layers to inspect.
        interventions: interventions.
        changed_channels: channels that one intervention names.
        bands: channels of the photo that are shown.
        predictions: predictions in a response.
        channels: channels of a layer in a response.
        fit_images: further photos whose cells principal components are computed from.
        factors: concepts that the features of a layer are factorised into.
        feature_values: values of the features that are decomposed: cells times channels, of all photos together. The
            product with the number of concepts may be four times as large.
        raw_bytes: bytes of a layer's raw maps in one response. Callers request fewer channels at a time above it.
        text: characters of a name, a label or any other text.
        texts: texts that are the classes of one request.
        images: images in one ModelInfer request.
        tensors: inputs or outputs of one ModelInfer request.
        axes: axes of a tensor's shape.
        asked: parameters of one ModelInfer request.
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
    interventions: int = 16
    changed_channels: int = 8192
    bands: int = 3
    predictions: int = 1000
    channels: int = 256
    fit_images: int = 15
    factors: int = 32
    feature_values: int = 8_388_608
    raw_bytes: int = 32 * 2**20
    text: int = 1000
    texts: int = 1000
    images: int = 8
    tensors: int = 16
    axes: int = 8
    asked: int = 32
