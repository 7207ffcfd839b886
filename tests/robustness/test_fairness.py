"""Fairness between a caller that floods the server and a modest one, told apart by their tokens."""

import contextlib
import itertools
import threading
from collections import Counter

import grpc
import numpy as np
import PIL.Image
import pytest

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.api import tokens
from camserve_server.imaging import images
from robustness import error_checks, nets
from support import PHOTOS, jpeg, serving, wait_until

ROWS = 32
OK, REFUSED = grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED
SMALL, PHOTO = jpeg(np.zeros((32, 32, 3), np.uint8)), PHOTOS["rocket"].read_bytes()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    created = {name: tokens.new(name, ("explain",)) for name in ("greedy", "modest")}
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text("".join(f"{known.line()}\n" for _, known in created.values()))
    return path, {name: secret for name, (secret, _) in created.items()}


def test_greedy_caller_causes_no_refusal_of_a_modest_one(secrets):
    """No row is computed meanwhile, so that the queue stays full."""
    path, known = secrets
    settings = {"models": (nets.TINY,), "device": "cpu", "threads": 1, "tokens_file": str(path)}
    with serving(**settings, max_queue_rows=ROWS) as served, contextlib.ExitStack() as stack:
        # Separate connections. The greedy caller's four never carry more than 50 calls besides the 32 that wait: with
        # more than 100, gRPC may refuse a call because an earlier one has not quite ended.
        stubs = [
            explain_pb2_grpc.ExplainServiceStub(
                stack.enter_context(grpc.insecure_channel(served.address, options=[("connection", number)]))
            )
            for number in range(5)
        ]
        stubs_of = {"modest": itertools.cycle(stubs[:1]), "greedy": itertools.cycle(stubs[1:])}

        def ask(caller, count):
            metadata = (("authorization", f"Bearer {known[caller]}"),)
            request = explain_pb2.ExplainRequest(image=SMALL)
            return [next(stubs_of[caller]).Explain.future(request, metadata=metadata) for _ in range(count)]

        served.do(served.pipeline.batcher.pause)
        admission = served.pipeline.batcher._admission
        greedy = ask("greedy", 200)
        wait_until(lambda: sum(call.done() for call in greedy) == 200 - ROWS)
        modest = ask("modest", 6)
        wait_until(lambda: served.do(admission._waiting.total) == 6)
        greedy += ask("greedy", 200)
        wait_until(lambda: sum(call.done() for call in greedy) == 400 - ROWS)
        early = [call for call in modest if call.done()]
        served.do(served.pipeline.batcher.resume)
        codes = [Counter(call.code() for call in calls) for calls in (modest, greedy)]

    assert early == []
    assert codes == [{OK: 6}, {OK: ROWS, REFUSED: 400 - ROWS}]
    assert [fault for call in greedy if call.code() is REFUSED for fault in error_checks.faults(call)] == []


# --- turns at decoding ---

GREEDY, MODEST = PHOTO, PHOTOS["china"].read_bytes()
MANY = 17  # images of one request: a photo and sixteen targets


def many():
    """Return a request with the largest allowed number of images."""
    target = explain_pb2.Target(similarity=explain_pb2.Similarity(image=GREEDY))
    return explain_pb2.ExplainRequest(image=GREEDY, targets=[target] * (MANY - 1))


def test_at_most_one_image_is_decoded_before_that_of_a_new_caller(secrets, monkeypatch):
    """One thread decodes, and two requests of seventeen images each wait for it."""
    path, known = secrets
    order, started, go, decode = [], threading.Event(), threading.Event(), images.decode

    def decode_slowly(data, *args, **options):
        order.append("modest" if data == MODEST else "greedy")
        started.set()
        assert go.wait(60)
        return decode(data, *args, **options)

    def ask(caller, request):
        metadata = (("authorization", f"Bearer {known[caller]}"),)
        return stub.Explain.future(request, metadata=metadata)

    settings = {"models": (nets.TINY,), "device": "cpu", "threads": 1, "tokens_file": str(path)}
    with serving(**settings) as served, grpc.insecure_channel(served.address) as channel:
        monkeypatch.setattr(images, "decode", decode_slowly)
        stub = explain_pb2_grpc.ExplainServiceStub(channel)
        calls = [ask("greedy", many()) for _ in range(2)]
        assert started.wait(60)
        wait_until_admitted(served, 2 * 2 * (MANY - 1))
        calls.append(ask("modest", explain_pb2.ExplainRequest(image=MODEST)))
        wait_until_admitted(served, 2 * 2 * (MANY - 1) + 1)
        go.set()
        codes = {call.code() for call in calls}

    assert codes == {grpc.StatusCode.OK}
    assert order.index("modest") <= 1
    assert order.count("greedy") == 2 * MANY


def wait_until_admitted(served, rows):
    wait_until(lambda: served.do(lambda: served.pipeline.batcher.admitted) >= rows)


def test_photo_and_images_of_its_targets_share_one_limit_of_pixels(secrets):
    path, known = secrets
    with PIL.Image.open(PHOTOS["rocket"]) as photo:
        pixels = MANY * photo.width * photo.height
    codes = []
    for limit in (pixels, pixels - 1):
        settings = {"models": (nets.TINY,), "device": "cpu", "threads": 1, "tokens_file": str(path)}
        with serving(**settings, max_pixels=limit) as served, grpc.insecure_channel(served.address) as channel:
            call = explain_pb2_grpc.ExplainServiceStub(channel).Explain.future(
                many(), metadata=(("authorization", f"Bearer {known['greedy']}"),)
            )
            codes.append(call.code())

    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT]
    assert "between them" in call.details()
