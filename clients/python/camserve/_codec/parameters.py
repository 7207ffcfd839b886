"""Encode and decode the parameters of methods and metrics."""

from __future__ import annotations

from camserve._core.checks import invalid
from camserve._values.methods import ParameterInfo
from camserve.v1 import explain_pb2, models_pb2


def encode_parameter(name: str, number_or_text: object, owner: str = "methods") -> explain_pb2.Parameter:
    """Encode the value of a parameter.

    Args:
        name: Name of the parameter, for the error.
        number_or_text: Its value.
        owner: Name of the request's field that has the parameter, for the error.

    Raises:
        InvalidArgument: The value is neither a number nor a string.
    """
    if isinstance(number_or_text, str):
        return explain_pb2.Parameter(text=number_or_text)
    try:
        return explain_pb2.Parameter(number=number_or_text)  # type: ignore[arg-type]  # protobuf checks it
    except TypeError as error:
        kind = type(number_or_text).__name__
        raise invalid(f"{owner}.{name}", f"it must be a number or a string, not {kind}") from error


def decode_parameter(message: explain_pb2.Parameter) -> float | str:
    """Decode the value of a parameter."""
    return message.text if message.WhichOneof("value") == "text" else message.number


def decode_parameter_info(message: models_pb2.ParameterInfo) -> ParameterInfo:
    """Decode the description of a parameter."""
    return ParameterInfo(
        name=message.name,
        summary=message.summary,
        default=decode_parameter(message.default_value) if message.HasField("default_value") else None,
        minimum=message.minimum,
        maximum=message.maximum,
        integer=message.integer,
        choices=tuple(message.choices),
    )
