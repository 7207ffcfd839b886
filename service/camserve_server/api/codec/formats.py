"""Names of picture encodings, fusions, profiles and signs by their protobuf values."""

from typing import Literal

from camserve.v1 import explain_pb2
from camserve_server.imaging.values import Profile, Sign
from camserve_server.methods.values import Fusion

FORMATS: dict["explain_pb2.ImageFormat.ValueType", Literal["jpeg", "png", "webp"] | None] = {
    explain_pb2.IMAGE_FORMAT_UNSPECIFIED: None,
    explain_pb2.IMAGE_FORMAT_JPEG: "jpeg",
    explain_pb2.IMAGE_FORMAT_PNG: "png",
    explain_pb2.IMAGE_FORMAT_WEBP: "webp",
}
"""Encodings of pictures by their protobuf values."""

FUSIONS: dict["explain_pb2.Fusion.ValueType", Fusion | None] = {
    explain_pb2.FUSION_UNSPECIFIED: None,
    explain_pb2.FUSION_MEAN: "mean",
    explain_pb2.FUSION_MAX: "max",
    explain_pb2.FUSION_PRODUCT: "product",
    explain_pb2.FUSION_SUM: "sum",
}
"""Fusions by their protobuf values."""

PROFILES: dict["explain_pb2.Profile.ValueType", Profile | Literal["signed"]] = {
    explain_pb2.PROFILE_UNSPECIFIED: "paper",
    explain_pb2.PROFILE_PAPER: "paper",
    explain_pb2.PROFILE_GRAD_CAM: "grad-cam",
    explain_pb2.PROFILE_TORCHCAM: "torchcam",
    explain_pb2.PROFILE_CAPTUM: "captum",
    explain_pb2.PROFILE_SIGNED: "signed",
}
"""Profiles by their protobuf values. "signed" is "paper" with other defaults."""

SIGNS: dict["explain_pb2.Sign.ValueType", Sign | None] = {
    explain_pb2.SIGN_UNSPECIFIED: None,
    explain_pb2.SIGN_POSITIVE: "positive",
    explain_pb2.SIGN_NEGATIVE: "negative",
    explain_pb2.SIGN_BOTH: "both",
    explain_pb2.SIGN_ABSOLUTE: "absolute",
}
"""Signs by their protobuf values; None for the profile's default."""
