"""Receipts: the inputs, versions and results of an explanation, from which it can be computed again."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
from google.protobuf import json_format

from camserve import _interventions, _local, connect
from camserve._checks import MAX_CHANNEL
from camserve._errors import InvalidArgument
from camserve._result import Verdict
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from camserve._interventions import Intervention

FORMAT = "camserve receipt 1"

FUSIONS = ("mean", "max", "product", "sum")

_OPTIONAL: Mapping[str, Any] = {"texts": (), "value_range": None, "interventions": (), "input_channel": None}
"""Fields that a receipt lacks where they are empty, with that value."""

_FORMAT_NAME = FORMAT.rpartition(" ")[0]
_MAX_SHOWN = 60  # characters of a value in an error message


class ReceiptFormat(Protocol):
    """A format of receipts as text."""

    def to_json(self, receipt: Receipt) -> str:
        """Return a receipt as JSON."""
        ...

    def from_json(self, text: str | bytes) -> Receipt:
        """Read a receipt from JSON."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Receipt:
    """Record of one explanation: its inputs, the versions that computed it, and its results.

    Attributes:
        model: Name of the model.
        source: Source of the model, such as "timm:resnet50".
        weights: Kind of the weights, as in ``Model``.
        digest: SHA-256 over the names and values of the model's parameters and buffers, in hexadecimal.
        precision: Precision of the computation, such as "float32".
        device: Device of the computation, such as "cpu".
        versions: Versions of the software, by name.
        image_sha256: SHA-256 of the photo's file, in hexadecimal.
        input_sha256: SHA-256 of the pixels that the model saw, in hexadecimal.
        method: Name of the method.
        parameters: Parameters of the method, defaults included.
        augmentation_smoothing: True if the map is the mean over augmented copies of the image.
        eigen_smoothing: True if the map is the first principal component instead of the sum.
        layers: Names of the layers; empty for methods that do not use a layer.
        fusion: "mean", "max", "product" or "sum" if the maps of several layers were fused, else None.
        target: The explained target: the API's message ``Target`` in protobuf's JSON, as the
            server resolved it.
        score: The score of the target.
        verdict: Result of the check that the map can be read as an explanation.
        heatmap: The raw map, float32 [h, w]; None if it was not requested.
        texts: The texts that were the model's classes, if it compares images with texts.
        value_range: The values of the photo that were taken as 0 and 1; None for those of their type.
        interventions: The changes to what layers returned.
        input_channel: Channel of the model's input that the map is of; None for a map of all channels.

    Example:
        >>> receipt = client.explain("cat.jpg", targets=["tabby"]).explanations[0].receipt
        >>> receipt.model, receipt.method, receipt.layers, receipt.target
        ('efficientnet_lite0', 'gradcam', ('bn2',), {'class_index': 281})
        >>> client.replay(receipt, "cat.jpg").same
        True
    """

    model: str
    source: str
    weights: str
    digest: str
    precision: str
    device: str
    versions: Mapping[str, str] = field(repr=False)
    image_sha256: str
    input_sha256: str
    method: str
    parameters: Mapping[str, float | str]
    augmentation_smoothing: bool
    eigen_smoothing: bool
    layers: tuple[str, ...]
    fusion: str | None
    target: Mapping[str, Any] = field(repr=False)
    score: float
    verdict: Verdict
    heatmap: NDArray[np.float32] | None = field(repr=False)
    texts: tuple[str, ...] = field(default=(), repr=False)
    value_range: tuple[float, float] | None = None
    interventions: tuple[Intervention, ...] = ()
    input_channel: int | None = None

    format: ClassVar[ReceiptFormat]
    """The format of files, which ``_codec`` sets: it has messages of the wire."""

    @property
    def heatmap_sha256(self) -> str | None:
        """SHA-256 of the raw map's values as little-endian float32, row by row; None without a map.

        Example:
            >>> first, second = (client.explain("cat.jpg").explanations[0].receipt for _ in range(2))
            >>> first.heatmap_sha256 == second.heatmap_sha256  # the maps are equal in every bit
            True
        """
        return None if self.heatmap is None else hashlib.sha256(packed(self.heatmap)).hexdigest()

    def to_json(self) -> str:
        """Return the receipt as JSON, with the values of the map in base64.

        Example:
            >>> import json
            >>> receipt = client.explain("cat.jpg").explanations[0].receipt
            >>> content = json.loads(receipt.to_json())
            >>> content["format"], content["method"], content["verdict"]
            ('camserve receipt 1', 'gradcam', 'OK')
        """
        return self.format.to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> Receipt:
        """Read a receipt from JSON that ``to_json`` wrote.

        Raises:
            InvalidArgument: The text is not a receipt, or has a version that this client does not support.

        Example:
            >>> receipt = client.explain("cat.jpg").explanations[0].receipt
            >>> camserve.Receipt.from_json(receipt.to_json()).digest == receipt.digest
            True
        """
        return Receipt.format.from_json(text)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the receipt to a file; return the path.

        Raises:
            OSError: The file cannot be written.

        Example:
            >>> receipt = client.explain("cat.jpg").explanations[0].receipt
            >>> receipt.save("why.receipt.json").name
            'why.receipt.json'
        """
        destination = Path(path)
        _local.write(destination, self.to_json().encode())
        return destination

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Receipt:
        """Read a receipt from a file.

        Raises:
            InvalidArgument: The file cannot be read, or is not a receipt.

        Example:
            >>> client.explain("cat.jpg").explanations[0].receipt.save("why.receipt.json").name
            'why.receipt.json'
            >>> receipt = camserve.Receipt.load("why.receipt.json")
            >>> client.replay(receipt, "cat.jpg").same
            True
        """
        try:
            data = _local.read_regular(path)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidArgument(f"cannot read {os.fspath(path)!r}: {reason}") from error
        try:
            return Receipt.from_json(data)
        except InvalidArgument as error:
            raise InvalidArgument(f"{os.fspath(path)}: {error.message}") from error


class _Json:
    """The format of receipts: JSON, with targets and interventions in protobuf's JSON."""

    def to_json(self, receipt: Receipt) -> str:
        """Return a receipt as JSON, with the values of the map in base64."""
        content = {field.name: getattr(receipt, field.name) for field in fields(receipt)}
        content["score"] = _json_number(receipt.score)
        content["parameters"] = {name: _json_number(value) for name, value in receipt.parameters.items()}
        content["value_range"] = receipt.value_range and tuple(map(_json_number, receipt.value_range))
        content["heatmap"] = None if receipt.heatmap is None else _json_map(receipt.heatmap)
        content["interventions"] = [_interventions.to_json(each) for each in receipt.interventions]
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


Receipt.format = _Json()


def packed(heatmap: NDArray[np.float32]) -> bytes:
    """Return the values of a map as little-endian float32, row by row."""
    return np.ascontiguousarray(heatmap, "<f4").tobytes()


def target_message(target: Mapping[str, Any]) -> explain_pb2.Target:
    """Decode a receipt's target.

    Raises:
        ValueError: The mapping is not a valid target.
    """
    message = connect.from_tree(dict(target), explain_pb2.Target())
    if message.WhichOneof("kind") is None:
        raise ValueError("it names no target")
    return message


def target_json(target: explain_pb2.Target) -> Mapping[str, Any]:
    """Encode a target for a receipt: in protobuf's JSON, with the field names of the .proto file."""
    return json_format.MessageToDict(target, preserving_proto_field_name=True)


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
    return tuple(map(_interventions.from_json, _instance_of(list)(value)))


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
