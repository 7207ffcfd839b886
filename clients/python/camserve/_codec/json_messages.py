"""Messages as JSON, after protobuf's JSON mapping."""

from __future__ import annotations

import difflib
import functools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, cast

from google.protobuf import json_format
from google.protobuf.message import Message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from google.protobuf.descriptor import Descriptor, FieldDescriptor

M = TypeVar("M", bound=Message)
Json: TypeAlias = dict[str, Any]

COMPACT: Mapping[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
"""Options of JSON without spaces."""
LONG_TEXT = 2**14
"""A message with a text of more characters, such as a picture, is encoded as JSON value by value."""

MAX_REASON = 300  # characters of a message of the JSON library; it may quote the request


class InvalidJson(ValueError):
    """The JSON is malformed, or does not fit the message.

    Args:
        message: The fault.
        field: Path of the field at fault, such as ``targets[0].label``; empty if no field is.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(_valid(message))
        self.field = _valid(field)


def _valid(text: str) -> str:
    """Replace unpaired surrogates, which JSON may have, and UTF-8 and protobuf may not."""
    return text.encode(errors="replace").decode()


def to_json(message: Message) -> bytes:
    """Return a message as JSON on one line. Names are in lowerCamelCase, and bytes in base64."""
    return dump_json(json_format.MessageToDict(message))


def from_json(data: bytes, message: M) -> M:
    """Fill a message from JSON, and return it. Names may be in lowerCamelCase or in snake_case.

    Raises:
        InvalidJson: The JSON is malformed, or has a field that the message does not have.
    """
    tree = _load(data)
    _check(tree, cast("Descriptor", message.DESCRIPTOR), "")
    return from_tree(tree, message)


def from_tree(tree: object, message: M) -> M:
    """Fill a message from a value that was JSON, and return it.

    Raises:
        InvalidJson: A value does not fit its field, or the message has no such field.

    Example:
        >>> from camserve.v1 import explain_pb2
        >>> from_tree({"classIndex": 3}, explain_pb2.Target()).class_index
        3
    """
    try:
        return json_format.ParseDict(cast("Json", tree), message)
    except json_format.ParseError as error:
        raise InvalidJson(str(error)[:MAX_REASON].rstrip(".")) from None
    except (ValueError, TypeError, OverflowError, SystemError):
        # protobuf raises these for a number of 400 digits, and for 1e400 or an unpaired surrogate as an enum.
        raise InvalidJson("a value does not fit its field") from None


def dump_json(tree: Json) -> bytes:
    if not _has_long_text(tree):
        return json.dumps(tree, **COMPACT).encode()
    # Value by value, so that other threads run in between: at once, 64 pictures of 0.5 MB hold the interpreter's lock
    # for 0.25 s instead of 0.01.
    return b"".join([part.encode() for part in json.JSONEncoder(**COMPACT).iterencode(tree)])


def _has_long_text(tree: object) -> bool:
    """Return whether a tree has a long text. The size of the message is not used: `ByteSize` serializes all of it."""
    if isinstance(tree, str):
        return len(tree) > LONG_TEXT
    if isinstance(tree, dict):
        return any(map(_has_long_text, cast("Json", tree).values()))
    return isinstance(tree, list) and any(map(_has_long_text, cast("list[object]", tree)))


def _load(data: bytes) -> object:
    if not data.strip():
        raise InvalidJson("the message is empty: send {} for a message without fields")
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidJson("the message is not JSON in UTF-8") from None
    except RecursionError:
        raise InvalidJson("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidJson(f"the message is not valid JSON: {error.msg} at {where}") from None
    except InvalidJson:
        raise
    except ValueError:  # a number with thousands of digits
        raise InvalidJson("the JSON has a number that is too long") from None


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise InvalidJson(f'"{repeated[:100]}" is given twice in one object')
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJson(f'{name} is not JSON: write it in quotes, as "{name}"')


def _check(tree: object, message: Descriptor, path: str) -> None:
    """Check that objects and lists are where the message has them, and that it has every field."""
    if not isinstance(tree, dict):
        raise InvalidJson(f"{path or 'the message'} must be an object", path)
    fields, seen = _fields(message), set[str]()
    for name, value in cast("Json", tree).items():
        where = f"{path}.{name}" if path else name
        field = fields.get(name)
        if field is None:
            hint = _did_you_mean(name, [field.json_name for field in message.fields])
            raise InvalidJson(f'unknown field "{where[:100]}" of {message.full_name}{hint}', where[:100])
        if field.name in seen:
            raise InvalidJson(f"{where} is given twice", where)
        seen.add(field.name)
        if value is not None:
            _check_field(value, field, f"{path}.{field.name}" if path else field.name)


def _check_field(value: object, field: FieldDescriptor, path: str) -> None:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        if not isinstance(value, dict):
            raise InvalidJson(f"{path} must be an object", path)
        inner = message.fields_by_name["value"]
        for key, item in cast("Json", value).items():
            _check_value(item, inner, f"{path}[{key[:100]}]")
    elif not field.is_repeated:
        _check_value(value, field, path)
    elif not isinstance(value, list):
        raise InvalidJson(f"{path} must be a list", path)
    else:
        for index, item in enumerate(cast("list[object]", value)):
            _check_value(item, field, f"{path}[{index}]")


def _check_value(value: object, field: FieldDescriptor, path: str) -> None:
    if field.message_type is not None:
        _check(value, field.message_type, path)
    elif field.type == field.TYPE_BYTES:
        if not isinstance(value, str):
            raise InvalidJson(f"{path} must be a text in base64", path)
        if value.startswith("data:"):
            raise InvalidJson(f'{path} must be base64 alone, without "data:…;base64,"', path)


@functools.cache
def _fields(message: Descriptor) -> Mapping[str, FieldDescriptor]:
    """Return the fields of a message by the names that JSON may use."""
    return {name: field for field in message.fields for name in (field.json_name, field.name)}


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    similar = difflib.get_close_matches(name[:100], known, n=1)
    return f' (did you mean "{similar[0]}"?)' if similar else ""
