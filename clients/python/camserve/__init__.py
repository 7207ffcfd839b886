"""Client of camserve, a server that explains the predictions of vision models.

    import camserve

    with camserve.Client("localhost:50051") as client:
        result = client.explain("cat.jpg", methods=["gradcam", "layercam"], targets=["tabby"])
        print(result.predictions[0].label, result.predictions[0].probability)
        result.explanations[0].save("why.jpg")
        for result in client.explain_many(paths, progress=True):
            print(result.predictions[0].label, result.explanations[0].verdict)

``AsyncClient`` has the same methods as coroutines.
"""

from camserve import _show
from camserve._access import AccessOptions
from camserve._async.client import AsyncClient
from camserve._codec import ExplainOptions, ImageItem, ImageLike, ImageWithOptions, MethodLike
from camserve._comparison import Comparison, ResultComparison
from camserve._errors import (
    CamserveError,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from camserve._evaluation import Curve, Evaluation, Metric, MetricInfo, Reading
from camserve._inspection import Channel, FeatureBasis, Features, Inspection, LayerReading, Statistics
from camserve._inspection_codec import FeaturesOptions, InspectOptions
from camserve._interventions import Intervention, clamp, clip_gradient, replace_mean, scale, silence
from camserve._metrics import MetricLike
from camserve._picture import Box, Photo, Picture
from camserve._receipts import Receipt
from camserve._regions import Region, RunLengths
from camserve._replay import Check, Replay
from camserve._result import Explanation, Result, Timing, Verdict
from camserve._retry import Retry
from camserve._sync.client import Client
from camserve._targets import (
    BoxLike,
    ClassLike,
    Contrast,
    Detection,
    Finer,
    Mask,
    Probability,
    Segment,
    Similarity,
    TargetLike,
    Text,
    contrast,
    detection,
    finer,
    mask,
    probability,
    segment,
    similarity,
    text,
)
from camserve._values import (
    Cost,
    Health,
    Layer,
    Method,
    MethodInfo,
    Model,
    ModelState,
    ParameterInfo,
    Prediction,
    RegionOptions,
    RegionsLike,
)

__all__ = [
    "AccessOptions",
    "AsyncClient",
    "Box",
    "BoxLike",
    "CamserveError",
    "Cancelled",
    "Channel",
    "Check",
    "ClassLike",
    "Client",
    "Comparison",
    "Contrast",
    "Cost",
    "Curve",
    "DeadlineExceeded",
    "Detection",
    "Evaluation",
    "ExplainOptions",
    "Explanation",
    "FailedPrecondition",
    "FeatureBasis",
    "Features",
    "FeaturesOptions",
    "Finer",
    "Health",
    "ImageItem",
    "ImageLike",
    "ImageWithOptions",
    "InspectOptions",
    "Inspection",
    "Internal",
    "Intervention",
    "InvalidArgument",
    "Layer",
    "LayerReading",
    "Mask",
    "Method",
    "MethodInfo",
    "MethodLike",
    "Metric",
    "MetricInfo",
    "MetricLike",
    "Model",
    "ModelState",
    "NotFound",
    "ParameterInfo",
    "PermissionDenied",
    "Photo",
    "Picture",
    "Prediction",
    "Probability",
    "Reading",
    "Receipt",
    "Region",
    "RegionOptions",
    "RegionsLike",
    "Replay",
    "ResourceExhausted",
    "Result",
    "ResultComparison",
    "Retry",
    "RunLengths",
    "Segment",
    "Similarity",
    "Statistics",
    "TargetLike",
    "Text",
    "Timing",
    "Unauthenticated",
    "Unavailable",
    "Verdict",
    "clamp",
    "clip_gradient",
    "contrast",
    "detection",
    "finer",
    "mask",
    "probability",
    "replace_mean",
    "scale",
    "segment",
    "silence",
    "similarity",
    "text",
]
