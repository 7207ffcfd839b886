"""A server that returns bytes chosen by the test from every RPC."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from PIL import Image

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

STREAM = "ExplainStream"
ANSWERS = {
    name: getattr(module, f"{name}Response")
    for module, names in (
        (explain_pb2, ("Explain", "InspectLayers", "ExtractFeatures")),
        (evaluate_pb2, ("Evaluate", "ListMetrics")),
        (models_pb2, ("ListModels", "GetModel", "LoadModel", "UnloadModel", "ListLayers", "ListMethods")),
    )
    for name in names
}


class Hostile(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Handler of all RPCs. ``replies`` has bytes, or a function of the request and its context, for each RPC name."""

    def __init__(self) -> None:
        self.address = ""
        self.replies: dict[str, bytes | Callable[[Any, grpc.ServicerContext], Any]] = {}

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        reply = self.replies.get(name, b"")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            return reply if isinstance(reply, bytes) else reply(request, context)

        make = grpc.stream_stream_rpc_method_handler if name == STREAM else grpc.unary_unary_rpc_method_handler
        return make(answer)

    def stream(self, answers: Callable[[explain_pb2.ExplainStreamRequest], Iterable[Any]]) -> None:
        """Answer each request of a stream with messages."""

        def serve(requests: Iterator[bytes], _context: Any) -> Iterator[bytes]:
            for each in requests:
                for answer in answers(explain_pb2.ExplainStreamRequest.FromString(each)):
                    yield answer.SerializeToString()

        self.replies[STREAM] = serve


@contextmanager
def serving() -> Iterator[Hostile]:
    """Serve on a free port of this machine."""
    hostile, pool = Hostile(), ThreadPoolExecutor(8)
    options = (("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1))
    running = grpc.server(pool, handlers=(hostile,), options=options)
    hostile.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    try:
        yield hostile
    finally:
        running.stop(None).wait()
        pool.shutdown()


def filled(message: Any, text: str, depth: int = 0) -> Any:
    """Put a text into every string of a message, and one item into every list."""
    for field in message.DESCRIPTOR.fields:
        value = text if field.type == FieldDescriptor.TYPE_STRING else None
        if field.message_type and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, field.name), field.message_type.fields_by_name["value"], text)
        elif field.message_type and depth < 5:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner, text, depth + 1)
            if not field.is_repeated:
                inner.SetInParent()
        elif value and field.is_repeated:
            getattr(message, field.name).append(value)
        elif value:
            setattr(message, field.name, value)
    return message


def _fill_map(entries: Any, value: Any, text: str) -> None:
    if value.message_type:
        filled(entries[text], text)
    else:
        entries[text] = text


def explained(text: str = "x", **fields: Any) -> explain_pb2.ExplainResponse:
    """Return a valid response, except for its texts and the given fields of the explanation."""
    response = filled(explain_pb2.ExplainResponse(), text)
    response.photo.CopyFrom(explain_pb2.Photo(width=6, height=4))
    response.class_map.CopyFrom(explain_pb2.ClassMap(height=1, width=2, data=b"\0" * 4))
    (explanation,) = response.explanations
    explanation.target.ClearField("box")
    explanation.regions[0].CopyFrom(region())
    for name, data in {"heatmap": heatmap(), "intensity": heatmap(), "overlay": overlay(), **fields}.items():
        getattr(explanation, name).CopyFrom(data)
    explanation.ClearField("heatmap_image")
    explanation.resolved_target.CopyFrom(explain_pb2.Target(class_index=7))
    return response


def photo(width: int, height: int) -> explain_pb2.ExplainResponse:
    """Return a response about a photo, without explanations."""
    return explain_pb2.ExplainResponse(photo=explain_pb2.Photo(width=width, height=height))


def region() -> explain_pb2.Region:
    """Return the right half of a photo of 6 × 4 pixels. In COCO's encoding, "<" is 12."""
    return explain_pb2.Region(
        box=explain_pb2.Box(left=3, right=6, bottom=4),
        area=12,
        contour=[3, 0, 6, 0, 6, 4, 3, 4],
        peak=explain_pb2.Point(x=4.5, y=1.5),
        peak_value=2,
        share=0.75,
        mask=explain_pb2.RunLengths(height=4, width=6, counts="<<"),
    )


def heatmap() -> explain_pb2.Heatmap:
    return explain_pb2.Heatmap(height=1, width=2, data=b"\0" * 8)


def overlay() -> explain_pb2.Picture:
    return explain_pb2.Picture(format=explain_pb2.IMAGE_FORMAT_JPEG, data=image("JPEG"), width=6, height=4)


def image(kind: str, size: tuple[int, int] = (6, 4)) -> bytes:
    out = io.BytesIO()
    Image.new("1" if max(size) > 1000 else "RGB", size).save(out, kind)
    return out.getvalue()
