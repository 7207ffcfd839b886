"""One caller that floods the server, and one that does not, known by their tokens."""

import contextlib
import itertools
import time
from collections import Counter

import grpc
import pytest

from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server import tokens
from robustness import hygiene, nets
from support import PHOTOS, serving

ROWS = 32
PHOTO = PHOTOS["rocket"].read_bytes()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    made = {name: tokens.new(name, ("explain",)) for name in ("greedy", "modest")}
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text("".join(f"{known.line()}\n" for _, known in made.values()))
    return path, {name: secret for name, (secret, _) in made.items()}


@pytest.fixture(scope="module")
def ask(secrets):
    """Explain a photo as somebody, by a server that takes 5 ms a batch; returns a call under way."""
    path, known = secrets
    with serving(models=(nets.TINY,), device="cpu", threads=1, max_queue_rows=ROWS, tokens_file=str(path)) as served:
        (engine,) = served.pipeline.batcher._engines
        run = engine.run

        def slow(*batch):
            time.sleep(0.005)
            return run(*batch)

        engine.run = slow
        # Connections of their own, two for the greedy one: each has room for 100 calls.
        with contextlib.ExitStack() as stack:
            stubs = [
                explain_pb2_grpc.ExplainServiceStub(
                    stack.enter_context(grpc.insecure_channel(served.address, options=[("mine", number)]))
                )
                for number in range(3)
            ]
            lines = {"modest": itertools.cycle(stubs[:1]), "greedy": itertools.cycle(stubs[1:])}
            yield lambda caller: next(lines[caller]).Explain.future(
                explain_pb2.ExplainRequest(image=PHOTO),
                metadata=(("authorization", f"Bearer {known[caller]}"),),
                timeout=30,
            )


def test_a_caller_with_200_requests_outstanding_has_none_of_anothers_refused(ask):
    codes, outstanding, wrong = Counter(), [], []
    for _ in range(12):
        outstanding += [ask("greedy") for _ in range(200 - len(outstanding))]
        codes["modest", ask("modest").code()] += 1
        for call in [one for one in outstanding if one.done()]:
            codes["greedy", call.code()] += 1
            wrong += hygiene.faults(call) if call.code() is not grpc.StatusCode.OK else []
            outstanding.remove(call)
    for call in outstanding:
        codes["greedy", call.code()] += 1

    assert codes["modest", grpc.StatusCode.OK] == 12
    assert {code for _, code in codes} == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes["greedy", grpc.StatusCode.OK] >= ROWS
    assert codes["greedy", grpc.StatusCode.RESOURCE_EXHAUSTED] > 200
    assert wrong == []
