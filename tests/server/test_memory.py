"""What a full server holds in memory is bounded: messages, maps, decoded photos and pictures."""

import contextlib
import io
import math

import grpc
import pytest
from PIL import Image

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server import images
from camserve_server.batcher import PLACE
from support import PHOTOS, serving, wait_until

NET = "net=torchvision:squeezenet1_1?weights=none&size=128"
PHOTO = PHOTOS["rocket"].read_bytes()
DRAWN = explain_pb2.Rendering(overlay=explain_pb2.IMAGE_FORMAT_PNG, max_side=400)
ROWS = 64


@pytest.fixture(scope="module")
def served():
    with serving(models=(NET,), device="cpu", threads=1, max_queue_rows=ROWS) as one:
        yield one


@pytest.fixture(scope="module")
def stub(served):
    with grpc.insecure_channel(served.address) as channel:
        yield explain_pb2_grpc.ExplainServiceStub(channel)


@contextlib.contextmanager
def held(served, *calls):
    """Begin calls while no batch is formed; yield what the queue then holds."""
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
    """Return how many requests have rows that wait."""
    return served.do(lambda: len(list(served.pipeline.batcher._queue)))


def explaining(stub, padding=0, **fields):
    """A call with so many bytes behind its photo, which belong to no picture."""
    return lambda: stub.Explain.future(explain_pb2.ExplainRequest(image=PHOTO + bytes(padding), **fields), timeout=60)


def test_a_full_queue_holds_no_more_than_so_many_bytes_of_messages(served, stub):
    """2 MiB each, and a little: nine places of 64."""
    call = explaining(stub, padding=8 * PLACE)
    with held(served, *[call] * 20) as (calls, places):
        refused = [one for one in calls if one.done()]
        assert (len(refused), places) == (13, 63)
        assert {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert [one.code() for one in calls].count(grpc.StatusCode.OK) == 7


def test_maps_count_too(served, stub):
    """48 of one pass: six for each of eight rows."""
    names = ("gradcam", "hirescam", "layercam", "xgradcam", "gradcam_elementwise", "eigencam")
    maps = 4 * 128 * 128 * (len(names) * 8 - 1)
    methods = [explain_pb2.Method(name=name) for name in names]
    with held(served, explaining(stub, methods=methods, top_k=8)) as (_, places):
        assert places == math.ceil((len(PHOTO) + maps) / PLACE) > 8


def test_feature_maps_count_too(served, stub):
    layer = served.pipeline.models["net"].layers["features.0"]
    ask = explain_pb2.ExtractFeaturesRequest(image=PHOTO, layer="features.0", raw=True, top=1)
    with held(served, lambda: stub.ExtractFeatures.future(ask, timeout=60)) as (_, places):
        assert places == math.ceil((len(PHOTO) + 4 * math.prod(layer.shape)) / PLACE) > 1


def test_feature_maps_that_a_method_starts_from_count(served, stub):
    shapes = [served.pipeline.models["net"].layers[name].shape for name in ("features.0", "features.1")]
    few = {"samples": explain_pb2.Parameter(number=2)}
    methods = [explain_pb2.Method(name="smoothgradcam_plus_plus", parameters=few)]
    with held(served, explaining(stub, methods=methods, layers=["features.0", "features.1"])) as (_, places):
        features = sum(map(math.prod, shapes))
        assert places == math.ceil((len(PHOTO) + 4 * (128 * 128 + features)) / PLACE) > 8


def test_a_photo_for_which_there_is_no_room_is_decoded_again_with_the_same_picture(served, stub):
    shelf, call = served.pipeline.shelf, explaining(stub, rendering=DRAWN)
    room, first = shelf.free, call().result()
    with held(served, call, call) as (calls, _):
        assert shelf.free < room
    shelf.free = 0
    with held(served, call):
        assert shelf.free == 0
    second = call().result()
    shelf.free = room

    assert second.explanations[0].overlay.data == first.explanations[0].overlay.data
    assert {one.code() for one in calls} == {grpc.StatusCode.OK}


def test_photos_and_pictures_of_all_requests_are_decoded_and_drawn_within_a_limit(served, stub, monkeypatch):
    easel, most = served.pipeline.easel, []
    monkeypatch.setattr(easel, "_places", 500_000)
    take = easel._take
    monkeypatch.setattr(easel, "_take", lambda *given: (take(*given), most.append(easel.taken)))
    calls = [explaining(stub, rendering=DRAWN, top_k=2)() for _ in range(12)]

    assert {call.code() for call in calls} == {grpc.StatusCode.OK}
    assert len(most) == 2 * 12
    assert 0 < max(most) <= 500_000
    assert easel.taken == 0


def test_a_request_whose_pictures_are_the_largest_allowed_waits_for_no_more_than_there_is(served, stub, monkeypatch):
    monkeypatch.setattr("camserve_server.pipeline.DRAWN_TOGETHER", 100_000)
    monkeypatch.setattr(served.pipeline.easel, "_places", 100_000)

    assert explaining(stub, rendering=DRAWN, top_k=2)().code() is grpc.StatusCode.OK


def test_a_photo_of_the_largest_size_is_decoded_alone(served, stub, monkeypatch):
    easel, most = served.pipeline.easel, []
    monkeypatch.setattr("camserve_server.pipeline.DRAWN_TOGETHER", 300_000)  # the photo has 273,280 pixels
    monkeypatch.setattr(easel, "_places", 300_000)
    take = easel._take
    monkeypatch.setattr(easel, "_take", lambda caller, places: (take(caller, places), most.append(places)))
    looking = [stub.InspectLayers.future(explain_pb2.InspectLayersRequest(image=PHOTO), timeout=60) for _ in range(4)]
    calls = [explaining(stub)() for _ in range(4)]

    assert {call.code() for call in calls + looking} == {grpc.StatusCode.OK}
    assert most == [640 * 427] * 8


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_the_pixels_that_a_file_claims_are_known_before_it_is_decoded(kind):
    file = io.BytesIO()
    Image.new("RGB", (300, 200)).save(file, kind)

    assert images.claimed(file.getvalue()) == 60_000
    assert images.claimed(file.getvalue()[:12]) == images.claimed(b"") == images.claimed(b"GIF89a") == 0
