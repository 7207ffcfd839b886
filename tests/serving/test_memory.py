"""A full server holds a bounded amount of memory: messages, maps, decoded photos and pictures."""

import contextlib
import io
import math
import socket
import struct
from types import SimpleNamespace

import grpc
import pytest
from PIL import Image

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import headers, images
from camserve_server.imaging.values import Preprocess
from camserve_server.serving import photos, replies
from camserve_server.serving.memory import REPLY_COPIES
from camserve_server.targets.values import MaskTarget, SimilarityTarget
from robustness.http2_flood import NO_WINDOW, Connection
from support import PHOTOS, serving, wait_until

NET = "net=torchvision:squeezenet1_1?weights=none&size=128"
PHOTO = PHOTOS["rocket"].read_bytes()
DRAWN = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG, max_side=400)
IMAGE = 3 * 128 * 128  # bytes that the model sees
ROWS = 512
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
    """Start calls while no batch is formed; yield the calls, and the bytes of inputs and maps that they hold."""
    batcher = served.pipeline.batcher
    served.do(batcher.pause)
    under_way = [call() for call in calls]
    wait_until(lambda: queued(served) + sum(call.done() for call in under_way) == len(calls))
    try:
        yield under_way, served.do(lambda: batcher._memory.taken)
    finally:
        served.do(batcher.resume)
        for call in under_way:
            call.exception()
    assert served.do(lambda: (batcher.admitted, batcher._memory.taken)) == (0, 0)


def queued(served):
    """Return the number of requests with waiting rows."""
    return served.do(lambda: len(list(served.pipeline.batcher._queue)))


def explaining(stub, padding=0, **fields):
    """Return a function that starts a call with `padding` unused bytes after the photo."""
    return lambda: stub.Explain.future(explain_pb2.ExplainRequest(image=PHOTO + bytes(padding), **fields), timeout=60)


def test_edited_images_count_as_their_masks(served, stub):
    masks = {"samples": explain_pb2.Parameter(number=30)}
    methods = [explain_pb2.Method(name="rise", parameters=masks)]
    with held(served, explaining(stub, methods=methods)) as (_, taken):
        assert taken == IMAGE + 4 * 128 * 128 * 31


def test_full_queue_refuses_a_request_whose_masks_do_not_fit(served, stub):
    masks = {"samples": explain_pb2.Parameter(number=30)}
    call = explaining(stub, methods=[explain_pb2.Method(name="rise", parameters=masks)])
    with held(served, *[call] * 20) as (calls, taken):
        assert [call.code() for call in calls if call.done()] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 10
        assert taken == 10 * (IMAGE + 4 * 128 * 128 * 31)  # two thirds of 64 KiB for each row


def test_maps_count_towards_the_queue_limit(served, stub):
    """48 of one pass: six for each of eight rows."""
    names = ("gradcam", "hirescam", "layercam", "xgradcam", "gradcam_elementwise", "eigencam")
    maps = 4 * 128 * 128 * (len(names) * 8 - 1)
    methods = [explain_pb2.Method(name=name) for name in names]
    with held(served, explaining(stub, methods=methods, top_k=8)) as (_, taken):
        assert taken == IMAGE + maps


def test_feature_maps_count_towards_the_queue_limit(served, stub):
    layer = served.pipeline.models["net"].layers["features.0"]
    ask = explain_pb2.ExtractFeaturesRequest(image=PHOTO, layer="features.0", raw=True, top=1)
    with held(served, lambda: stub.ExtractFeatures.future(ask, timeout=60)) as (_, taken):
        assert taken == IMAGE + 4 * math.prod(layer.shape)


def test_feature_maps_that_a_method_starts_from_count_as_bytes(served, stub):
    shapes = [served.pipeline.models["net"].layers[name].shape for name in ("features.0", "features.1")]
    few = {"samples": explain_pb2.Parameter(number=2)}
    methods = [explain_pb2.Method(name="smoothgradcam_plus_plus", parameters=few)]
    with held(served, explaining(stub, methods=methods, layers=["features.0", "features.1"])) as (_, taken):
        features = sum(map(math.prod, shapes))
        assert taken == IMAGE + 4 * (128 * 128 + features)


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


def unread(served, count, rpc="camserve.v1.ExplainService/Explain", request=None, source="127.0.0.1"):
    """Send `count` requests at once over a connection that never reads a reply. Each reply has a PNG of 300 x 200."""
    request = request or explain_pb2.ExplainRequest(image=encoded("JPEG"), rendering=DRAWN)
    connection = Connection(*served.address.split(":"), settings=NO_WINDOW, source=source)
    for _ in range(count):
        connection.send(rpc, request.SerializeToString())
    return connection


def leave(served, connection):
    """Close a connection; wait until its replies are no longer counted."""
    connection.socket.shutdown(socket.SHUT_RDWR)
    connection.listener.join()
    connection.socket.close()
    wait_until(lambda: served.pipeline.replies.limit.taken == 0)


def test_reply_that_its_caller_does_not_read_is_counted_until_the_caller_leaves(served, stub):
    connection = unread(served, 2)
    wait_until(lambda: served.pipeline.replies.limit.taken == 2 * REPLY)

    assert explaining(stub, rendering=DRAWN)().code() is grpc.StatusCode.OK
    wait_until(lambda: served.pipeline.replies.limit.taken == 2 * REPLY)
    leave(served, connection)


def test_drawing_waits_for_a_caller_that_does_not_read(served, monkeypatch):
    """Meanwhile the requests hold neither room in the queue nor the model, and a new caller is answered."""
    monkeypatch.setattr(served.pipeline.replies.limit, "_slots", 3 * REPLY)
    connection = unread(served, 4, source="127.0.0.2")
    wait_until(lambda: served.do(served.pipeline.replies.limit._waiting.total) == 2 * REPLY)
    batcher, held = served.pipeline.batcher, served.pipeline.repository._registry

    assert served.pipeline.replies.limit.taken == 2 * REPLY
    wait_until(lambda: served.do(lambda: (batcher.admitted, batcher._memory.taken)) == (0, 2 * IMAGE))
    assert not served.do(lambda: sum(held._holders.values()))
    with grpc.insecure_channel(served.address) as channel:
        small = explain_pb2.ExplainRequest(image=encoded("JPEG"))
        assert explain_pb2_grpc.ExplainServiceStub(channel).Explain(small).explanations
    leave(served, connection)


def test_reply_does_not_wait_for_ever_for_others_to_be_read(served, stub, monkeypatch):
    monkeypatch.setattr(served.pipeline.replies.limit, "_slots", 3 * REPLY)
    connection = unread(served, 2)
    wait_until(lambda: served.pipeline.replies.limit.taken == 2 * REPLY)
    monkeypatch.setattr(replies, "REPLY_TIMEOUT", 0)
    error = explaining(stub, rendering=DRAWN)().exception()

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "earlier replies have not been read" in error.details()
    leave(served, connection)


def test_caller_that_does_not_read_loses_its_connection_when_others_wait(served, monkeypatch):
    monkeypatch.setattr(served.pipeline.replies.limit, "_slots", 3 * REPLY)
    connection = unread(served, 2, source="127.0.0.2")
    wait_until(lambda: connection.statuses == 2)  # both replies are on their way
    times = {"STALL_TIME": 0, "STALL_RATE": math.inf, "CHECK_INTERVAL": 0.01}  # real timeout: it expires, early or late
    for name, value in times.items():
        monkeypatch.setattr(replies, name, value)
    with grpc.insecure_channel(served.address) as channel:
        call = explaining(explain_pb2_grpc.ExplainServiceStub(channel), rendering=DRAWN)()

        assert call.code() is grpc.StatusCode.OK
    connection.listener.join()
    connection.socket.close()
    wait_until(lambda: served.pipeline.replies.limit.taken == 0)


def test_reply_counts_as_unread_only_after_the_time_that_a_slow_caller_needs():
    size = 4 * replies.STALL_RATE
    slow = replies.UntilSent("ipv4:127.0.0.2:1")
    slow.ready = 100.0
    unsent = replies._Unsent(size, "slow", slow)

    assert not unsent.is_stalled(100 + replies.STALL_TIME + 4)
    assert unsent.is_stalled(100 + replies.STALL_TIME + 4.1)
    assert not replies._Unsent(size, "drawing", replies.UntilSent()).is_stalled(1e9)


def inference(count, channels=3):
    """Return a ModelInfer request of `count` images."""
    shape, image = (count, 32, 32, channels), bytes(32 * 32 * channels)
    tensor = inference_pb2.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=shape)
    return inference_pb2.ModelInferRequest(inputs=[tensor], raw_input_contents=[image * count])


def test_reply_of_modelinfer_is_counted_until_the_caller_leaves(served):
    connection = unread(served, 2, "inference.GRPCInferenceService/ModelInfer", inference(3))
    wait_until(lambda: connection.statuses == 2)  # both replies are on their way

    assert served.pipeline.replies.limit.taken >= 2 * 3 * REPLY_COPIES * 32 * 32
    leave(served, connection)


def test_stream_of_modelinfer_is_answered_in_order_though_replies_wait_for_memory(served, monkeypatch):
    """A later reply never holds memory that an earlier one waits for."""
    limit, sizes = served.pipeline.replies.limit, []
    take = limit._take
    monkeypatch.setattr(limit, "_take", lambda caller, size: (take(caller, size), sizes.append(size)))
    requests = [inference(1 + 7 * (number % 2)) for number in range(12)]
    for number, request in enumerate(requests):
        request.id = str(number)
    with grpc.insecure_channel(served.address) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            inference_pb2.ModelInferRequest.SerializeToString,
            inference_pb2.ModelStreamInferResponse.FromString,
        )
        list(call(iter([inference(8)])))
        monkeypatch.setattr(limit, "_slots", 3 * max(sizes))  # two at a time
        replies = list(call(iter(requests)))

    assert [reply.infer_response.id for reply in replies] == [request.id for request in requests]
    assert not any(reply.error_message for reply in replies)
    wait_until(lambda: served.pipeline.replies.limit.taken == 0)


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
    assert headers.memory_to_decode(file, Limits()) == each * 300 * 200
    assert headers.memory_to_decode(file[:12], Limits()) == 0


def jpeg(marker, components, in_first_scan):
    """Return the headers of a JPEG of 300 x 200 pixels."""
    frame = struct.pack(">HBHHB", 8 + 3 * components, 8, 200, 300, components) + bytes(3 * components)
    scan = struct.pack(">HB", 6 + 2 * in_first_scan, in_first_scan) + bytes(3 + 2 * in_first_scan)
    return b"\xff\xd8\xff" + bytes((marker,)) + frame + b"\xff\xda" + scan


@pytest.mark.parametrize(
    ("file", "each"),
    [
        (jpeg(0xC0, 3, 3), 6),
        (jpeg(0xC0, 3, 1), 9),
        (jpeg(0xC0, 4, 4), 6),
        (jpeg(0xC0, 4, 3), 11),
        (jpeg(0xC2, 4, 4), 11),
        (jpeg(0xC2, 1, 1), 6),
        (encoded("WEBP", save_all=True, append_images=[Image.new("RGB", (300, 200), "white")]), 11),
    ],
)
def test_memory_of_coefficients_and_of_frames_counts(file, each):
    assert headers.memory_to_decode(file, Limits()) == each * 300 * 200


def test_memory_of_grey_made_by_pillow_counts():
    assert headers.memory_to_decode(encoded("JPEG"), Limits(), 1) == 8 * 300 * 200


def test_memory_for_the_images_of_targets_counts():
    preprocess = Preprocess((224, 224), 256, "bilinear", (0, 0, 0), (1, 1, 1), value_range=(0, 255))
    targets = SimilarityTarget(file=encoded("PNG")), MaskTarget(0)
    request = SimpleNamespace(
        image=b"",
        job=SimpleNamespace(model=SimpleNamespace(preprocess=preprocess), targets=targets),
    )

    assert photos.memory_to_prepare(request, Limits()) == (3 + 12) * 300 * 200


class Searches:
    """A pattern that records where it searches."""

    def __init__(self, pattern):
        self.pattern, self.bytes = pattern, 0

    def search(self, data, start, end):
        found = self.pattern.search(data, start, end)
        self.bytes += (found.end() if found else end) - start
        return found


@pytest.mark.parametrize("step", [1 << 12, 1 << 23])
def test_bytes_between_the_segments_of_a_jpeg_are_not_searched_for_long(step, monkeypatch):
    monkeypatch.setattr(headers, "_MARKER", searches := Searches(headers._MARKER))
    comment = b"\xff\xfe\0\2"
    file = b"\xff\xd8" + (b"\xff" * step + comment) * ((1 << 23) // step) + encoded("JPEG")[2:]

    assert headers.memory_to_decode(file, Limits()) == 0
    assert searches.bytes <= headers._MAX_FILL + 2 * len(comment) * ((1 << 16) // step + 1)
    with pytest.raises(InvalidArgument):
        images.decode(file, Limits())


def test_some_bytes_between_the_segments_of_a_jpeg_are_skipped():
    file = encoded("JPEG")
    more = file[:2] + b"\xff" * 60_000 + file[2:]

    assert headers.memory_to_decode(more, Limits()) == headers.memory_to_decode(file, Limits())


def test_file_that_is_no_picture_needs_no_memory_to_decode():
    assert headers.memory_to_decode(b"", Limits()) == headers.memory_to_decode(b"GIF89a", Limits()) == 0


def test_pictures_of_too_many_bytes_are_refused(stub, monkeypatch):
    monkeypatch.setattr("camserve_server.serving.memory.MAX_PICTURES", 50_000)
    error = explaining(stub, rendering=DRAWN, top_k=2)().exception()

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "set max_side, ask for fewer, or for JPEG" in error.details()
