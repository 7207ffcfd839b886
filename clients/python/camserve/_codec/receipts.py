"""The format of receipts, and the request that computes one again."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from camserve._codec.explain import explain_request
from camserve._codec.interventions import intervention_from_json, intervention_to_json
from camserve._codec.targets import target_message
from camserve._core.checks import MAX_CHANNEL
from camserve._core.errors import InvalidArgument
from camserve._values.methods import Method
from camserve._values.receipt import Receipt, packed
from camserve._values.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from camserve._values.interventions import Intervention
    from camserve.v1 import explain_pb2

FORMAT = "camserve receipt 1"

FUSIONS = ("mean", "max", "product", "sum")

_OPTIONAL: Mapping[str, Any] = {"texts": (), "value_range": None, "interventions": (), "input_channel": None}
"""Fields that a receipt lacks where they are empty, with that value."""

_FORMAT_NAME = FORMAT.rpartition(" ")[0]
_MAX_SHOWN = 60  # characters of a value in an error message


class _Json:
    """The format of receipts: JSON, with targets and interventions in protobuf's JSON."""

    def to_json(self, receipt: Receipt) -> str:
        """Return a receipt as JSON, with the values of the map in base64."""
        content = {field.name: getattr(receipt, field.name) for field in fields(receipt)}
        content["score"] = _json_number(receipt.score)
        content["parameters"] = {name: _json_number(value) for name, value in receipt.parameters.items()}
        content["value_range"] = receipt.value_range and tuple(map(_json_number, receipt.value_range))
        content["heatmap"] = None if receipt.heatmap is None else _json_map(receipt.heatmap)
        content["interventions"] = [intervention_to_json(each) for each in receipt.interventions]
        for name in _OPTIONAL:  # a receipt without them is as older clients write it
            if content[name] in (None, (), []):  # 0 is a channel
                del content[name]
        return json.dumps({"format": FORMAT, **content}, indent=2, ensure_ascii=False, allow_nan=False)

    def from_json(self, text: str | bytes) -> Receipt:
        """Read a receipt from JSON.

        Raises:
            InvalidArgument: The text is not a receipt, or has a version that this client does not support.
        """
        content = _parse_object(text)
        _check_format(content.get("format"))
        return Receipt(**{field.name: _read_field(field.name, content) for field in fields(Receipt)})


Receipt._format = _Json()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # it is for this room


def _json_number(number: float | str) -> float | str:
    # JSON has no NaN and infinity. As in protobuf's JSON, they are strings.
    return number if isinstance(number, str) or np.isfinite(number) else str(number)


def _json_map(heatmap: NDArray[np.float32]) -> dict[str, Any]:
    data = packed(heatmap)
    height, width = heatmap.shape
    text = base64.b64encode(data).decode()
    return {"height": height, "width": width, "sha256": hashlib.sha256(data).hexdigest(), "data": text}


def _parse_object(text: str | bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not a camserve receipt: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise InvalidArgument("not a camserve receipt: it is not a JSON object")
    return cast("dict[str, Any]", content)


def _check_format(name: object) -> None:
    if name == FORMAT:
        return
    if isinstance(name, str) and name.startswith(_FORMAT_NAME):
        raise InvalidArgument(f"the receipt has the format {_truncate(name)!r}; this client reads {FORMAT!r}")
    raise InvalidArgument(f'not a camserve receipt: its "format" is not {FORMAT!r}')


def _read_field(name: str, content: Mapping[str, Any]) -> Any:
    expected, read = _READERS.get(name, _STRING)
    if name in _OPTIONAL and name not in content:
        return _OPTIONAL[name]
    if name not in content:
        raise InvalidArgument(f'the receipt has no "{name}"')
    try:
        return read(content[name])
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        value = _truncate(json.dumps(content[name], ensure_ascii=False))
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise InvalidArgument(f'"{name}" of the receipt must be {expected}, not {value}{reason}') from error


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _instance_of(kind: type) -> Callable[[Any], Any]:
    def check(value: object) -> object:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    return float(value)


def _read_number_or_string(value: object) -> float | str:
    return value if isinstance(value, str) else _read_number(value)


def _mapping_of(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda mapping: {name: read(value) for name, value in mapping.items()}


def _read_strings(value: object) -> tuple[str, ...]:
    return tuple(map(_instance_of(str), _instance_of(list)(value)))


def _read_interventions(value: object) -> tuple[Intervention, ...]:
    return tuple(map(intervention_from_json, _instance_of(list)(value)))


def _read_fusion(value: object) -> object:
    if value is not None and value not in FUSIONS:
        raise TypeError
    return value


def _read_target(value: Any) -> Mapping[str, Any]:
    target_message(value)
    return cast("Mapping[str, Any]", value)


def _read_heatmap(value: Any) -> NDArray[np.float32] | None:
    if value is None:
        return None
    data = base64.b64decode(value["data"], validate=True)
    if hashlib.sha256(data).hexdigest() != value["sha256"]:
        raise ValueError("its data does not match its SHA-256")
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False).reshape(value["height"], value["width"])


def _read_range(value: Any) -> tuple[float, float]:
    low, high = map(_read_number, _instance_of(list)(value))
    return low, high


def _read_channel(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_CHANNEL:
        raise TypeError
    return value


_STRING: tuple[str, Callable[[Any], Any]] = ("a string", _instance_of(str))
_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "versions": ("an object of strings", _mapping_of(_instance_of(str))),
    "parameters": ("an object of numbers and strings", _mapping_of(_read_number_or_string)),
    "augmentation_smoothing": ("true or false", _instance_of(bool)),
    "eigen_smoothing": ("true or false", _instance_of(bool)),
    "layers": ("a list of names", _read_strings),
    "texts": ("a list of texts", _read_strings),
    "value_range": ("two numbers", _read_range),
    "interventions": ("a list of interventions", _read_interventions),
    "input_channel": ("the index of a channel", _read_channel),
    "fusion": (f"null, {', '.join(FUSIONS)}", _read_fusion),
    "target": ("a target", _read_target),
    "score": ("a number", _read_number),
    "verdict": (f"one of {', '.join(Verdict)}", Verdict),
    "heatmap": ("null or a map", _read_heatmap),
}


def replay_request(receipt: Receipt) -> explain_pb2.ExplainRequest:
    """Return the request for a receipt's explanation, without its image.

    Raises:
        InvalidArgument: A value of the receipt is not valid in a request.
    """
    options = receipt.augmentation_smoothing, receipt.eigen_smoothing
    per_channel = False if receipt.input_channel is None else (receipt.input_channel,)
    request = explain_request(
        model=receipt.model,
        methods=Method(receipt.method, receipt.parameters, *options, per_channel),
        layers=receipt.layers,
        fusion=receipt.fusion,
        texts=receipt.texts,
        value_range=receipt.value_range,
        interventions=receipt.interventions,
    )
    request.targets.append(target_message(receipt.target))
    return request
