"""A full server holds a bounded amount of memory: messages, maps, decoded photos and pictures."""

import contextlib
import io
import math
import socket

import grpc
import pytest
from PIL import Image

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.imaging import images
from camserve_server.scheduling import BYTES_PER_SLOT
from camserve_server.serving.memory import REPLY_COPIES
from robustness.http2_flood import NO_WINDOW, Connection
from support import PHOTOS, serving, wait_until

NET = "net=torchvision:squeezenet1_1?weights=none&size=128"
PHOTO = PHOTOS["rocket"].read_bytes()
DRAWN = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG, max_side=400)
IMAGE = 3 * 128 * 128  # bytes that the model sees
ROWS = 64
REPLY = REPLY_COPIES * 3 * 300 * 200  # bytes of one with a PNG


@pytest.fixture(scope="module")
def served():
    with serving(models=(NET,), device="cpu", threads=1, max_queue_rows=ROWS) as running:
        yield running


@pytest.fixture(scope="module")
def stub(served):
    with grpc.insecure_channel(served.address) as channel:
        yield explain_pb2_grpc.ExplainServiceStub(channel)


@contextlib.contextmanager
def held(served, *calls):
    """Start calls while no batch is formed; yield the calls and the number of slots in use."""
    batcher = served.pipeline.batcher
    served.do(batcher.pause)
    under_way = [call() for call in calls]
    wait_until(lambda: queued(served) + sum(call.done() for call in under_way) == len(calls))
    try:
        yield under_way, served.do(lambda: batcher.admitted)
    finally:
        served.do(batcher.resume)
        for call in under_way:
            call.exception()
    assert served.do(lambda: batcher.admitted) == 0


def queued(served):
    """Return the number of requests with waiting rows."""
    return served.do(lambda: len(list(served.pipeline.batcher._queue)))


def explaining(stub, padding=0, **fields):
    """Return a function that starts a call with `padding` unused bytes after the photo."""
    return lambda: stub.Explain.future(explain_pb2.ExplainRequest(image=PHOTO + bytes(padding), **fields), timeout=60)


def test_edited_images_count_as_their_masks(served, stub):
    masks = {"samples": explain_pb2.Parameter(number=30)}
    methods = [explain_pb2.Method(name="rise", parameters=masks)]
    with held(served, explaining(stub, methods=methods)) as (_, places):
        assert places == math.ceil((IMAGE + 4 * 128 * 128 * 31) / BYTES_PER_SLOT) > 31


def test_full_queue_refuses_a_request_whose_masks_do_not_fit(served, stub):
    masks = {"samples": explain_pb2.Parameter(number=30)}
    call = explaining(stub, methods=[explain_pb2.Method(name="rise", parameters=masks)])
    with held(served, *[call] * 4) as (calls, places):
        assert [call.code() for call in calls if call.done()] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        assert places == 2 * 32


def test_maps_count_towards_the_queue_limit(served, stub):
    """48 of one pass: six for each of eight rows."""
    names = ("gradcam", "hirescam", "layercam", "xgradcam", "gradcam_elementwise", "eigencam")
    maps = 4 * 128 * 128 * (len(names) * 8 - 1)
    methods = [explain_pb2.Method(name=name) for name in names]
    with held(served, explaining(stub, methods=methods, top_k=8)) as (_, places):
        assert places == math.ceil((IMAGE + maps) / BYTES_PER_SLOT) > 8


def test_feature_maps_count_towards_the_queue_limit(served, stub):
    layer = served.pipeline.models["net"].layers["features.0"]
    ask = explain_pb2.ExtractFeaturesRequest(image=PHOTO, layer="features.0", raw=True, top=1)
    with held(served, lambda: stub.ExtractFeatures.future(ask, timeout=60)) as (_, places):
        assert places == math.ceil((IMAGE + 4 * math.prod(layer.shape)) / BYTES_PER_SLOT) > 1


def test_feature_maps_that_a_method_starts_from_count_as_bytes(served, stub):
    shapes = [served.pipeline.models["net"].layers[name].shape for name in ("features.0", "features.1")]
    few = {"samples": explain_pb2.Parameter(number=2)}
    methods = [explain_pb2.Method(name="smoothgradcam_plus_plus", parameters=few)]
    with held(served, explaining(stub, methods=methods, layers=["features.0", "features.1"])) as (_, places):
        features = sum(map(math.prod, shapes))
        assert places == math.ceil((IMAGE + 4 * (128 * 128 + features)) / BYTES_PER_SLOT) > 8


def test_photo_that_was_not_kept_is_decoded_again_with_the_same_result(served, stub):
    photo_budget, call = served.pipeline.photo_budget, explaining(stub, rendering=DRAWN)
    room, first = photo_budget.free, call().result()
    with held(served, call, call) as (calls, _):
        assert photo_budget.free < room
    photo_budget.free = 0
    with held(served, call):
        assert photo_budget.free == 0
    second = call().result()
    photo_budget.free = room

    assert second.explanations[0].overlay.data == first.explanations[0].overlay.data
    assert {call.code() for call in calls} == {grpc.StatusCode.OK}


def test_photos_and_pictures_of_all_requests_are_decoded_and_drawn_within_a_limit(served, stub, monkeypatch):
    image_memory, most = served.pipeline.image_memory, []
    monkeypatch.setattr(image_memory, "_slots", 2_000_000)
    take = image_memory._take
    monkeypatch.setattr(image_memory, "_take", lambda *given: (take(*given), most.append(image_memory.taken)))
    calls = [explaining(stub, rendering=DRAWN, top_k=2)() for _ in range(6)]

    assert {call.code() for call in calls} == {grpc.StatusCode.OK}
    assert len(most) == 2 * 6
    assert 0 < max(most) <= 2_000_000
    assert image_memory.taken == 0


def test_largest_pictures_wait_for_at_most_the_whole_memory_limit(served, stub, monkeypatch):
    monkeypatch.setattr("camserve_server.serving.memory.IMAGE_MEMORY", 100_000)
    monkeypatch.setattr(served.pipeline.image_memory, "_slots", 100_000)

    assert explaining(stub, rendering=DRAWN, top_k=2)().code() is grpc.StatusCode.OK


def test_decoding_counts_with_the_memory_that_it_takes(served, stub, monkeypatch):
    image_memory, most = served.pipeline.image_memory, []
    take = image_memory._take
    monkeypatch.setattr(image_memory, "_take", lambda caller, places: (take(caller, places), most.append(places)))
    looking = [stub.InspectLayers.future(explain_pb2.InspectLayersRequest(image=PHOTO), timeout=60) for _ in range(2)]
    calls = [explaining(stub)() for _ in range(2)]

    assert {call.code() for call in calls + looking} == {grpc.StatusCode.OK}
    assert most == [6 * 640 * 427] * 4


def encoded(kind, **more):
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, kind, **more)
    return file.getvalue()


def unread(served, count):
    """Send `count` requests at once over a connection that never reads a reply. Each reply has a PNG of 300 x 200."""
    request = explain_pb2.ExplainRequest(image=encoded("JPEG"), rendering=DRAWN)
    connection = Connection(*served.address.split(":"), settings=NO_WINDOW)
    for _ in range(count):
        connection.send("camserve.v1.ExplainService/Explain", request.SerializeToString())
    return connection


def leave(served, connection):
    """Close a connection; wait until its replies are no longer counted."""
    connection.socket.shutdown(socket.SHUT_RDWR)
    connection.listener.join()
    connection.socket.close()
    wait_until(lambda: served.pipeline.reply_limit.taken == 0)


def test_reply_that_its_caller_does_not_read_is_counted_until_the_caller_leaves(served, stub):
    connection = unread(served, 2)
    wait_until(lambda: served.pipeline.reply_limit.taken == 2 * REPLY)

    assert explaining(stub, rendering=DRAWN)().code() is grpc.StatusCode.OK
    wait_until(lambda: served.pipeline.reply_limit.taken == 2 * REPLY)
    leave(served, connection)


def test_drawing_waits_for_a_caller_that_does_not_read(served, monkeypatch):
    monkeypatch.setattr(served.pipeline.reply_limit, "_max_alone", 2 * REPLY)
    connection = unread(served, 4)
    wait_until(lambda: served.do(served.pipeline.reply_limit._waiting.total) == 2 * REPLY)

    assert served.pipeline.reply_limit.taken == 2 * REPLY
    leave(served, connection)


@pytest.mark.parametrize(
    ("file", "each"),
    [
        (encoded("JPEG"), 6),
        (encoded("JPEG", progressive=True), 9),
        (encoded("PNG"), 6),
        (encoded("WEBP"), 7),
        (encoded("BMP"), 6),
    ],
    ids=["JPEG", "progressive JPEG", "PNG", "WebP", "BMP"],
)
def test_memory_to_decode_is_known_from_the_header(file, each):
    assert images.memory_to_decode(file) == each * 300 * 200
    assert images.memory_to_decode(file[:12]) == 0


def test_file_that_is_no_picture_needs_no_memory_to_decode():
    assert images.memory_to_decode(b"") == images.memory_to_decode(b"GIF89a") == 0


def test_pictures_of_too_many_bytes_are_refused(stub, monkeypatch):
    monkeypatch.setattr("camserve_server.serving.memory.MAX_PICTURES", 50_000)
    error = explaining(stub, rendering=DRAWN, top_k=2)().exception()

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "set max_side, ask for fewer, or for JPEG" in error.details()
