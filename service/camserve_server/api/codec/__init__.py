"""Codec: converts protobuf requests into plain values, and results into protobuf responses."""

from camserve_server.api.codec.evaluate import describe_metric, evaluate_response, read_evaluation, within_explain
from camserve_server.api.codec.inspection import features_response, inspect_response, read_extraction, read_inspection
from camserve_server.api.codec.loading import read_loading, read_unloading
from camserve_server.api.codec.replies import (
    cost_response,
    describe_layer,
    describe_method,
    describe_model,
    explain_response,
    kind_of,
)
from camserve_server.api.codec.requests import DEFAULT_METHOD, find_model, read_explanation, read_model
from camserve_server.api.codec.sizes import check_sizes

__all__ = [
    "DEFAULT_METHOD",
    "check_sizes",
    "cost_response",
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
    "read_evaluation",
    "read_explanation",
    "read_extraction",
    "read_inspection",
    "read_loading",
    "read_model",
    "read_unloading",
    "within_explain",
]
