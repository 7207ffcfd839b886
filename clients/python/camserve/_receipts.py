"""Receipts: what an explanation was computed from and what came out, enough to ask for it again."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from google.protobuf import json_format

from camserve import _local
from camserve._errors import InvalidArgument
from camserve._result import Verdict
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

FORMAT = "camserve receipt 1"

FUSIONS = ("mean", "max", "product")

_FAMILY = FORMAT.rpartition(" ")[0]
_LONGEST_SHOWN = 60


@dataclass(frozen=True, eq=False, slots=True)
class Receipt:
    """What one explanation was computed from and what came out: enough to replay it and compare.

    Attributes:
        model: Name of the model that was asked.
        source: Where it came from, such as "timm:resnet50".
        weights: Which weights it had: "default", "file", or "none" for random ones.
        digest: SHA-256 over the names and values of its parameters and buffers, in hexadecimal.
        precision: That it ran in.
        device: That it ran on.
        versions: Of what computed it, by name.
        image_sha256: Of the photo's file, in hexadecimal.
        input_sha256: Of the pixels that the model saw, uint8 [H, W, RGB], in hexadecimal.
        method: Name of the method.
        parameters: What it ran with, defaults included.
        augmentation_smoothing: Whether it is the mean over augmented copies of the image.
        eigen_smoothing: Whether it is the first principal component instead of the sum.
        layers: That were looked at; none for methods that look at the input.
        fusion: "mean", "max" or "product" of their maps; None for one layer.
        target: What was explained: the message ``Target`` of the API in protobuf's JSON, as the
            server resolved it.
        score: Of the target.
        verdict: Whether the map can be read as an explanation.
        heatmap: The raw map, float32 [h, w]; None if it was not asked for.
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

    @property
    def heatmap_sha256(self) -> str | None:
        """SHA-256 of the raw map's values, float32, little-endian, row by row; None without a map."""
        return None if self.heatmap is None else hashlib.sha256(packed(self.heatmap)).hexdigest()

    def to_json(self) -> str:
        """Write it as JSON; the map's values stand in it in base64."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        said["score"] = _plain_number(self.score)
        said["parameters"] = {name: _plain_number(each) for name, each in self.parameters.items()}
        said["heatmap"] = None if self.heatmap is None else _plain_map(self.heatmap)
        return json.dumps({"format": FORMAT, **said}, indent=2, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> Receipt:
        """Read what ``to_json`` wrote.

        Raises:
            InvalidArgument: It is no receipt, or one of a version that this camserve does not know.
        """
        said = _object(text)
        _check_format(said.get("format"))
        return Receipt(**{each.name: _read(each.name, said) for each in fields(Receipt)})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file; return the path.

        Raises:
            OSError: The file cannot be written.
        """
        to = Path(path)
        _local.write(to, self.to_json().encode())
        return to

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Receipt:
        """Read it from a file.

        Raises:
            InvalidArgument: There is no such file, or it holds no receipt.
        """
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidArgument(f"cannot read {os.fspath(path)!r}: {reason}") from error
        try:
            return Receipt.from_json(data)
        except InvalidArgument as error:
            raise InvalidArgument(f"{os.fspath(path)}: {error.message}") from error


def packed(heatmap: NDArray[np.float32]) -> bytes:
    """Return the values of a map, float32, little-endian, row by row."""
    return np.ascontiguousarray(heatmap, "<f4").tobytes()


def target_message(target: Mapping[str, Any]) -> explain_pb2.Target:
    """Return a receipt's target as protobuf.

    Raises:
        ValueError: It is none.
    """
    try:
        message = json_format.ParseDict(dict(target), explain_pb2.Target())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error
    if message.WhichOneof("kind") is None:
        raise ValueError("it names nothing to explain")
    return message


def target_json(target: explain_pb2.Target) -> Mapping[str, Any]:
    """Return a target as a receipt has it."""
    return json_format.MessageToDict(target, preserving_proto_field_name=True)


def _plain_number(number: float | str) -> float | str:
    # JSON has no word for NaN and infinity; a string of protobuf's stands for them there.
    return number if isinstance(number, str) or np.isfinite(number) else str(number)


def _plain_map(heatmap: NDArray[np.float32]) -> dict[str, Any]:
    data = packed(heatmap)
    height, width = heatmap.shape
    text = base64.b64encode(data).decode()
    return {"height": height, "width": width, "sha256": hashlib.sha256(data).hexdigest(), "data": text}


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"this is no camserve receipt: it is not JSON ({error})") from error
    if not isinstance(said, dict):
        raise InvalidArgument("this is no camserve receipt: it is not a JSON object")
    return cast("dict[str, Any]", said)


def _check_format(said: object) -> None:
    if said == FORMAT:
        return
    if isinstance(said, str) and said.startswith(_FAMILY):
        raise InvalidArgument(f"this is a {_short(said)!r}, and this camserve reads a {FORMAT!r}")
    raise InvalidArgument(f'this is no camserve receipt: its "format" is not {FORMAT!r}')


def _read(name: str, said: Mapping[str, Any]) -> Any:
    wanted, reader = _READERS.get(name, _TEXT)
    if name not in said:
        raise InvalidArgument(f'the receipt has no "{name}"')
    try:
        return reader(said[name])
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        value = _short(json.dumps(said[name], ensure_ascii=False))
        why = f" ({error})" if isinstance(error, ValueError) else ""
        raise InvalidArgument(f'"{name}" of the receipt must be {wanted}, not {value}{why}') from error


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def _a(kind: type) -> Callable[[Any], Any]:
    def check(value: object) -> object:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    return float(value)


def _number_or_word(value: object) -> float | str:
    return value if isinstance(value, str) else _number(value)


def _by_name(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: {name: reader(each) for name, each in value.items()}


def _layers(value: object) -> tuple[str, ...]:
    return tuple(map(_a(str), _a(list)(value)))


def _fusion(value: object) -> object:
    if value is not None and value not in FUSIONS:
        raise TypeError
    return value


def _target(value: Any) -> Mapping[str, Any]:
    target_message(value)
    return cast("Mapping[str, Any]", value)


def _heatmap(value: Any) -> NDArray[np.float32] | None:
    if value is None:
        return None
    data = base64.b64decode(value["data"], validate=True)
    if hashlib.sha256(data).hexdigest() != value["sha256"]:
        raise ValueError("its values are not those of its SHA-256")
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False).reshape(value["height"], value["width"])


_TEXT: tuple[str, Callable[[Any], Any]] = ("a string", _a(str))
_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "versions": ("strings by name", _by_name(_a(str))),
    "parameters": ("numbers and words by name", _by_name(_number_or_word)),
    "augmentation_smoothing": ("true or false", _a(bool)),
    "eigen_smoothing": ("true or false", _a(bool)),
    "layers": ("a list of names", _layers),
    "fusion": (f"null, {', '.join(FUSIONS)}", _fusion),
    "target": ("a target", _target),
    "score": ("a number", _number),
    "verdict": (f"one of {', '.join(Verdict)}", Verdict),
    "heatmap": ("null or a map", _heatmap),
}
