"""Between protobuf and the server's own values: requests in, replies out."""

from camserve_server.wire.evaluate import (
    EvaluateOrder,
    describe_metric,
    evaluate_response,
    read_evaluation,
    within_explain,
)
from camserve_server.wire.receipts import receipt
from camserve_server.wire.replies import (
    Answer,
    Seconds,
    describe_layer,
    describe_method,
    describe_model,
    explain_response,
    kind_of,
)
from camserve_server.wire.requests import Order, read_model, read_order

__all__ = [
    "Answer",
    "EvaluateOrder",
    "Order",
    "Seconds",
    "describe_layer",
    "describe_method",
    "describe_metric",
    "describe_model",
    "evaluate_response",
    "explain_response",
    "kind_of",
    "read_evaluation",
    "read_model",
    "read_order",
    "receipt",
    "within_explain",
]
