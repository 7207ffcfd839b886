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

import camserve._show  # noqa: F401 # pyright: ignore[reportUnusedImport]  # it registers how values are shown
from camserve._async.client import AsyncClient
from camserve._core.errors import (
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
from camserve._sync.client import Client
from camserve._transport.access import AccessOptions
from camserve._transport.retry import Retry
from camserve._values.comparison import Comparison
from camserve._values.evaluation import Curve, Evaluation, Metric, MetricInfo, MetricLike, Reading
from camserve._values.inspection import Channel, FeatureBasis, Features, Inspection, LayerReading, Statistics
from camserve._values.interventions import Intervention, clamp, clip_gradient, replace_mean, scale, silence
from camserve._values.methods import Cost, Method, MethodInfo, ParameterInfo
from camserve._values.models import Health, Layer, Model, ModelState
from camserve._values.options import (
    ExplainOptions,
    FeaturesOptions,
    ImageItem,
    ImageLike,
    ImageWithOptions,
    InspectOptions,
    MethodLike,
)
from camserve._values.picture import Box, Photo, Picture
from camserve._values.prediction import Prediction
from camserve._values.receipt import Receipt
from camserve._values.regions import Region, RegionOptions, RegionsLike, RunLengths
from camserve._values.replay import Check, Replay
from camserve._values.result import Explanation, Result
from camserve._values.result_comparison import ResultComparison
from camserve._values.targets import (
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
from camserve._values.timing import Timing
from camserve._values.verdict import Verdict

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
