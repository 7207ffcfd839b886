"""One row that fails alone or with its whole batch: the seven other rows of the batch are answered as usual."""

import gc
import io
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import camserve
from camserve_server.core.errors import OutOfMemory
from robustness import error_checks, soak_models, tree
from rounding import check_same
from support import give_back_memory, rows_waiting, serving, wait_until

FAILS = {
    "out of memory": camserve.ResourceExhausted,
    "raising hook": camserve.Internal,
    "bad layer": camserve.CamserveError,
}
POISONED = "poisoned=robustness.soak_models:poisoned?size=32"
OPTIONS = {"overlay": None, "targets": 2}


@pytest.fixture(scope="module")
def served():
    with serving(models=(POISONED,), threads=1, max_batch_rows=8) as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def photos():
    return [np.random.default_rng(number).integers(0, 120, (32, 32, 3), np.uint8) for number in range(8)]


@pytest.fixture(scope="module")
def alone(client, photos):
    return [client.explain(photo, **OPTIONS).explanations[0].heatmap for photo in photos]


def in_one_batch(served, client, images):
    """Explain eight images in one batch; return an explanation or an error for each."""
    batcher = served.pipeline.batcher
    served.do(batcher.pause)
    batches, calls = batcher.stats.batches, []
    with ThreadPoolExecutor(8) as threads:
        for number, image in enumerate(images):
            calls.append(threads.submit(client.explain, image, **OPTIONS))
            wait_until(lambda: rows_waiting(served) > number)  # noqa: B023 -- called at once
        served.do(batcher.resume)
        outcomes = [call.exception() or call.result().explanations[0] for call in calls]
    assert batcher.stats.batches == batches + 1
    return outcomes


@pytest.mark.parametrize("colour", [*FAILS, "not a number"])
@pytest.mark.parametrize("position", range(8))
def test_other_rows_of_a_failing_rows_batch_are_right(colour, position, served, client, photos, alone):
    images = [*photos[:position], soak_models.image(colour), *photos[position + 1 :]]
    outcomes = in_one_batch(served, client, images)
    poisoned = outcomes[position]

    if colour in FAILS:
        assert isinstance(poisoned, FAILS[colour])
        assert error_checks.client_faults(poisoned) == []
    else:
        assert poisoned.verdict == "NON_FINITE"
    for number in {*range(8)} - {position}:
        check_same(outcomes[number].heatmap, alone[number], POISONED)


def png(image):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "PNG")
    return packed.getvalue()


def memory():
    give_back_memory()
    return tree.memory(os.getpid())


def run_out_of_memory(client, times):
    """Send requests that run out of memory; return the share by which this process's memory grew, and the errors."""
    image, errors = png(soak_models.image("out of memory")), []

    def fail():
        with pytest.raises(camserve.CamserveError) as caught:
            client.explain(image, **OPTIONS)
        errors.append(type(caught.value))
        assert error_checks.client_faults(caught.value) == []
        caught.value.__traceback__ = None

    for _ in range(5):  # fills caches
        fail()
    before = memory()
    for _ in range(times):
        fail()
    gc.collect()
    return memory() / before - 1, errors


def test_server_serves_after_a_hundred_out_of_memory_errors_in_a_row(client, photos, alone):
    grown, errors = run_out_of_memory(client, 100)
    now = client.explain(photos[0], **OPTIONS).explanations[0].heatmap

    assert set(errors) == {camserve.ResourceExhausted}
    assert abs(grown) <= 0.02
    assert client.health() is camserve.Health.SERVING
    assert np.array_equal(now, alone[0])


def test_kept_error_is_detected_as_a_leak(served, client, monkeypatch):
    """Control of the check above: a kept error keeps its frames and their tensors."""
    engine, leaked = served.pipeline.batcher._workers[0], []
    module = engine.run.__self__._models["poisoned@1"].module

    def leaking_run(*_):
        try:
            return module(torch.tensor([[[[2.0]], [[0.0]], [[0.0]]]]))
        except torch.OutOfMemoryError as error:
            leaked.append(error)
            raise OutOfMemory("no memory") from error

    monkeypatch.setattr(engine, "run", leaking_run)
    grown, errors = run_out_of_memory(client, 2)

    assert len(leaked) == len(errors) == 7
    assert grown > 0.02
