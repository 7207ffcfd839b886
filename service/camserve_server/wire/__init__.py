"""Between protobuf and the server's own values: requests in, replies out."""

from camserve_server.wire.evaluate import (
    EvaluateOrder,
    describe_metric,
    evaluate_response,
    read_evaluation,
    within_explain,
)
from camserve_server.wire.loading import Loading, read_loading, read_unloading
from camserve_server.wire.predictions import Told
from camserve_server.wire.receipts import receipt
from camserve_server.wire.replies import (
    Answer,
    Seconds,
    describe_layer,
    describe_method,
    describe_model,
    explain_response,
    kind_of,
    photo_of,
)
from camserve_server.wire.requests import DEFAULT_METHOD, Order, find_model, read_model, read_order
from camserve_server.wire.sizes import check_sizes
from camserve_server.wire.xray import (
    Channel,
    Extraction,
    Inspection,
    Rank,
    features_response,
    inspect_response,
    read_extraction,
    read_inspection,
)

__all__ = [
    "DEFAULT_METHOD",
    "Answer",
    "Channel",
    "EvaluateOrder",
    "Extraction",
    "Inspection",
    "Loading",
    "Order",
    "Rank",
    "Seconds",
    "Told",
    "check_sizes",
    "describe_layer",
    "describe_method",
    "describe_metric",
    "describe_model",
    "evaluate_response",
    "explain_response",
    "features_response",
    "find_model",
    "inspect_response",
    "kind_of",
    "photo_of",
    "read_evaluation",
    "read_extraction",
    "read_inspection",
    "read_loading",
    "read_model",
    "read_order",
    "read_unloading",
    "receipt",
    "within_explain",
]
