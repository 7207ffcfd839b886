"""Expired and cancelled calls run no further batches, and do not change the other rows of their batch."""

import asyncio
import contextlib
import io
import itertools
import math
import sys

import grpc
import numpy as np
import pytest
from PIL import Image

from camserve.v1 import explain_pb2, explain_pb2_grpc
from rounding import check_same
from support import rows_waiting, serving, wait_in_loop_until

NETS = """
import math
import time
from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import nn

GATE = SimpleNamespace(permits=math.inf)


class Gate(nn.Module):
    def forward(self, x):
        while GATE.permits < 1:
            time.sleep(0.001)  # real timeout: it only polls, until the test gives a permit
        GATE.permits -= 1
        return x


def gated():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(
        gate=Gate(), stem=nn.Conv2d(3, 8, 3, 2, 1), act=nn.ReLU(), features=nn.Conv2d(8, 16, 3, 2, 1),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(16, 5),
    ))
"""
GATED = "gated=slow_nets:gated?size=32"
WHITE = np.full((32, 32, 3), 255, np.uint8)
RAW = explain_pb2.Rendering(heatmap=True)
BATCH = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow_nets.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with serving(models=(GATED,), threads=1, max_batch_rows=BATCH) as server:
            yield server


@pytest.fixture
async def explain(served):
    """Function that starts a call on the next of several connections, because each carries 100 calls at most."""
    async with contextlib.AsyncExitStack() as stack:
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(served.address, options)) for _ in range(4)
        ]
        stubs = itertools.cycle([explain_pb2_grpc.ExplainServiceStub(channel) for channel in channels])
        yield lambda request, **options: next(stubs).Explain(request, **options)


def photo(number):
    return np.random.default_rng(number).integers(0, 200, (32, 32, 3), np.uint8)


def request(image, method="gradcam", **parameters):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "PNG")
    values = {name: explain_pb2.Parameter(number=value) for name, value in parameters.items()}
    methods = [explain_pb2.Method(name=method, parameters=values)]
    target = explain_pb2.Target(class_index=1)
    return explain_pb2.ExplainRequest(image=packed.getvalue(), methods=methods, targets=[target], rendering=RAW)


def heatmap(response):
    return np.frombuffer(response.explanations[0].heatmap.data, "<f4")


@contextlib.asynccontextmanager
async def blocker(served, explain):
    """Keep the worker busy with one batch inside the block."""
    gate, batches = sys.modules["slow_nets"].GATE, served.pipeline.batcher.stats.batches
    gate.permits = 0
    try:
        call = explain(request(WHITE))
        await wait_in_loop_until(lambda: served.pipeline.batcher.stats.batches > batches)
        yield
    finally:
        gate.permits = math.inf
    await call


@pytest.fixture
def gate(served):  # noqa: ARG001 -- imports the model
    """Gate that lets as many batches run as it has permits."""
    yield sys.modules["slow_nets"].GATE
    sys.modules["slow_nets"].GATE.permits = math.inf


async def test_200_calls_that_wait_for_a_batch_end_at_their_deadlines(served, explain):
    """All calls end and leave the queue while the batch before them still runs, and none runs."""
    batcher, requests = served.pipeline.batcher, [request(photo(number)) for number in range(20)]

    async def call(number):
        try:
            await explain(requests[number % len(requests)], timeout=1)  # real timeout: the blocked worker answers none
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async with blocker(served, explain):
        rows = batcher.stats.rows
        codes = await asyncio.gather(*map(call, range(200)))
        await wait_in_loop_until(lambda: batcher.admitted == 1)  # the call that blocks the worker
        assert rows_waiting(served) == 0
    await explain(request(photo(0)))

    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert batcher.stats.rows == rows + 1  # the last one alone


async def test_cancelled_queued_calls_never_run_and_leave_the_queue_at_once(served, explain):
    """They leave the queue while the batch before them still runs."""
    batcher = served.pipeline.batcher
    async with blocker(served, explain):
        rows = batcher.stats.rows
        calls = [explain(request(photo(number))) for number in range(100)]
        await wait_in_loop_until(lambda: batcher.admitted == 101)
        for call in calls:
            call.cancel()
        await wait_in_loop_until(lambda: batcher.admitted == 1)
        assert rows_waiting(served) == 0
    await explain(request(photo(0)))

    assert batcher.stats.rows == rows + 1


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("smoothgrad", {"samples": 256}), ("rise", {"samples": 512}), ("integrated_gradients", {"steps": 256})],
)
async def test_cancelled_long_method_runs_no_further_batch(method, parameters, served, explain, gate):
    """At most the batch that is running at the cancellation goes on."""
    batcher, gate.permits = served.pipeline.batcher, 3
    before = batcher.stats.batches
    call = explain(request(photo(1), method, **parameters))
    await wait_in_loop_until(lambda: batcher.stats.batches == before + 4)  # the fourth batch is blocked
    call.cancel()
    await wait_in_loop_until(lambda: batcher.admitted == 0)
    gate.permits = math.inf
    await explain(request(photo(0)))

    assert batcher.stats.batches == before + 5  # only the blocked batch


async def test_cancelled_row_changes_no_bit_of_others_in_its_batch(served, explain, gate):
    """Batches of eight other rows give the expected values: another batch size changes the last bits of float32."""
    batcher = served.pipeline.batcher

    async def in_one_batch(photos, cancelled=None):
        """Explain eight photos in one batch; cancel one while the batch runs."""
        served.do(batcher.pause)
        batches, calls = batcher.stats.batches, []
        for number, image in enumerate(photos):
            calls.append(explain(request(image)))
            await wait_in_loop_until(lambda number=number: rows_waiting(served) == number + 1)
        gate.permits = 0
        served.do(batcher.resume)
        await wait_in_loop_until(lambda: batcher.stats.batches == batches + 1)
        if cancelled is not None:
            calls[cancelled].cancel()
            await wait_in_loop_until(lambda: batcher.admitted == BATCH - 1)
        gate.permits = math.inf
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert batcher.stats.batches == batches + 1
        return [None if isinstance(answer, BaseException) else heatmap(answer) for answer in answers]

    photos = [photo(number) for number in range(BATCH)]
    others = [photo(100 + number) for number in range(BATCH)]
    half = BATCH // 2
    first = await in_one_batch([*photos[:half], *others[half:]])
    second = await in_one_batch([*others[:half], *photos[half:]])
    expected = [*first[:half], *second[half:]]
    alone = heatmap(await explain(request(photos[1])))
    await asyncio.to_thread(check_same, expected[1], alone, GATED)
    for position in (0, 3, 7):
        answers = await in_one_batch(photos, position)
        assert answers[position] is None
        for number in {*range(BATCH)} - {position}:
            assert np.array_equal(answers[number], expected[number]), (position, number)
