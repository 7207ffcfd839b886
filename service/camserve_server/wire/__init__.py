"""Between protobuf and the server's own values: requests in, replies out."""

from camserve_server.wire.evaluate import (
    EvaluateOrder,
    describe_metric,
    evaluate_response,
    read_evaluation,
    within_explain,
)
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
from camserve_server.wire.requests import Order, read_model, read_order
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
    "Answer",
    "Channel",
    "EvaluateOrder",
    "Extraction",
    "Inspection",
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
    "inspect_response",
    "kind_of",
    "photo_of",
    "read_evaluation",
    "read_extraction",
    "read_inspection",
    "read_model",
    "read_order",
    "receipt",
    "within_explain",
]
