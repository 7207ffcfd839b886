"""Media types of calls: the form of their messages, and the framing of streams."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.message import Message

from camserve.web import connect
from camserve.web.connect import InvalidJson, from_json, to_json
from camserve_server.api.codec.footprint import COPIES, ELEMENT, Shape
from camserve_server.api.deserialization import Form, Parse
from camserve_server.core.errors import InvalidArgument

JSON_GROWTH = 4 / 3 + 0.01  # base64 takes four characters for three bytes; the rest is for the other fields
JSON_INLINE_FIELDS = 100  # fields of a JSON message that is parsed on the event loop, in about a millisecond

Encode: TypeAlias = Callable[[Message], bytes]
Splitter: TypeAlias = connect.Envelopes | connect.Lines


@dataclass(frozen=True, slots=True)
class Media:
    """A media type of requests and replies.

    Attributes:
        name: the media type.
        json: True for JSON, False for protobuf's own form.
        framing: class that splits a stream into messages; None for calls with one message.
    """

    name: str
    json: bool
    framing: type[connect.Envelopes] | type[connect.Lines] | None = None

    @property
    def form(self) -> Callable[[Shape, Parse], Form]:
        """The function that returns the form of messages; see `Deserialization`."""
        return json_form if self.json else Form

    @property
    def growth(self) -> float:
        """The length of a message, as a multiple of the serialized message."""
        return JSON_GROWTH if self.json else 1.0

    def parse(self, message: type[Message]) -> Parse:
        """Return the function that parses a message."""
        return partial(_from_json, message) if self.json else message.FromString

    def encode(self, reply: Message) -> bytes:
        """Return a reply in this form."""
        return to_json(reply) if self.json else reply.SerializeToString()


UNARY = {media.name: media for media in (Media(connect.JSON, json=True), Media(connect.PROTO, json=False))}
"""The media types of calls with one message."""

STREAMS = {
    media.name: media
    for media in (
        Media(connect.CONNECT_JSON, json=True, framing=connect.Envelopes),
        Media(connect.CONNECT_PROTO, json=False, framing=connect.Envelopes),
        Media(connect.NDJSON, json=True, framing=connect.Lines),
    )
}
"""The media types of streams."""


def json_form(shape: Shape, parse: Parse) -> Form:
    """Return the form of JSON messages."""
    return Form(shape, parse, count_json, JSON_INLINE_FIELDS, JSON_GROWTH)


def count_json(data: bytes, _shape: Shape, max_fields: int) -> int | None:
    """Return an upper bound of the memory that a JSON message takes, or None if it has too many values.

    Each value but the first follows a comma or an opening bracket. Those within texts are counted too.
    """
    values = 1 + sum(map(data.count, (b",", b"{", b"[")))
    return None if values > max_fields else COPIES * len(data) + ELEMENT * values


def _from_json(message: type[Message], data: bytes) -> Any:
    try:
        return from_json(data, message())
    except InvalidJson as error:
        raise InvalidArgument(str(error), field=error.field) from None
