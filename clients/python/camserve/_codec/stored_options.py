"""Options of an explanation as values for JSON, as jobs and recordings store them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from camserve._codec.explain import explain_request, fusion_name
from camserve._codec.json_messages import from_tree
from camserve._values.methods import Method
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from camserve._values.options import ExplainOptions


def options_to_plain(options: ExplainOptions) -> dict[str, Any]:
    """Return options as values for JSON, in protobuf's mapping; those that have its default are left out.

    Raises:
        InvalidArgument: An option is out of range or has the wrong type.
    """
    plain: dict[str, Any] = json_format.MessageToDict(explain_request(**options))
    return plain


def read_options(plain: Mapping[str, Any]) -> ExplainOptions:
    """Return the methods, layers, fusion and number of targets of ``options_to_plain``.

    Raises:
        InvalidJson: A value does not fit its field.
    """
    request = from_tree(dict(plain), explain_pb2.ExplainRequest())
    methods = [
        Method(
            method.name,
            {name: value.text or value.number for name, value in method.parameters.items()},
            method.augmentation_smoothing,
            method.eigen_smoothing,
        )
        for method in request.methods
    ]
    fusion = fusion_name(request.fusion)
    return {"methods": methods, "layers": list(request.layers), "fusion": fusion, "top_k": request.top_k}
