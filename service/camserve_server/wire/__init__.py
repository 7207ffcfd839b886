"""Between protobuf and the server's own values: requests in, replies out."""

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
    "Order",
    "Seconds",
    "describe_layer",
    "describe_method",
    "describe_model",
    "explain_response",
    "kind_of",
    "read_model",
    "read_order",
    "receipt",
]
