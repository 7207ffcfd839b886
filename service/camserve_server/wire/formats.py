"""Names of picture encodings, here and on the wire."""

from typing import Literal

from camserve.v1 import explain_pb2

FORMATS: dict["explain_pb2.ImageFormat.ValueType", Literal["jpeg", "png", "webp"] | None] = {
    explain_pb2.IMAGE_FORMAT_UNSPECIFIED: None,
    explain_pb2.IMAGE_FORMAT_JPEG: "jpeg",
    explain_pb2.IMAGE_FORMAT_PNG: "png",
    explain_pb2.IMAGE_FORMAT_WEBP: "webp",
}
"""Ours by theirs."""
