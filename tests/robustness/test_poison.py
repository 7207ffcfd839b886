"""One row that brings its batch down, or itself: its seven neighbours are answered as if it had not been there."""

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
ASKED = {"overlay": None, "targets": 2}


@pytest.fixture(scope="module")
def served():
    with serving(models=(POISONED,), threads=1, max_batch_rows=8) as one:
        yield one


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def photos():
    return [np.random.default_rng(number).integers(0, 120, (32, 32, 3), np.uint8) for number in range(8)]


@pytest.fixture(scope="module")
def alone(client, photos):
    return [client.explain(photo, **ASKED).explanations[0].heatmap for photo in photos]


def in_one_batch(served, client, images):
    """Explain eight images that begin in one batch; return explanations, and errors of those that fail."""
    batcher = served.pipeline.batcher
    served.do(batcher.pause)
    batches, asked = batcher.stats.batches, []
    with ThreadPoolExecutor(8) as threads:
        for number, image in enumerate(images):
            asked.append(threads.submit(client.explain, image, **ASKED))
            wait_until(lambda: rows_waiting(served) > number)  # noqa: B023 -- called at once
        served.do(batcher.resume)
        outcomes = [one.exception() or one.result().explanations[0] for one in asked]
    assert batcher.stats.batches == batches + 1
    return outcomes


@pytest.mark.parametrize("colour", [*FAILS, "not a number"])
@pytest.mark.parametrize("position", range(8))
def test_seven_neighbours_of_a_poisoned_row_are_right(colour, position, served, client, photos, alone):
    images = [*photos[:position], soak_models.image(colour), *photos[position + 1 :]]
    outcomes = in_one_batch(served, client, images)
    own = outcomes[position]

    if colour in FAILS:
        assert isinstance(own, FAILS[colour])
        assert error_checks.client_faults(own) == []
    else:
        assert own.verdict == "NON_FINITE"
    for number in {*range(8)} - {position}:
        check_same(outcomes[number].heatmap, alone[number], POISONED)


def png(image):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "PNG")
    return packed.getvalue()


def memory():
    give_back_memory()
    return tree.memory(os.getpid())


def without_memory(client, times):
    """Ask for what takes all memory, so many times; return how far memory rose, as a share, and the errors."""
    image, errors = png(soak_models.image("out of memory")), []

    def ask():
        with pytest.raises(camserve.CamserveError) as told:
            client.explain(image, **ASKED)
        errors.append(type(told.value))
        assert error_checks.client_faults(told.value) == []
        told.value.__traceback__ = None

    for _ in range(5):  # so that what is made once is there
        ask()
    before = memory()
    for _ in range(times):
        ask()
    gc.collect()
    return memory() / before - 1, errors


def test_server_serves_after_a_hundred_out_of_memory_errors_in_a_row(client, photos, alone):
    grown, errors = without_memory(client, 100)
    now = client.explain(photos[0], **ASKED).explanations[0].heatmap

    assert set(errors) == {camserve.ResourceExhausted}
    assert abs(grown) <= 0.02
    assert client.health() is camserve.Health.SERVING
    assert np.array_equal(now, alone[0])


def test_the_measure_of_memory_sees_an_error_that_is_kept_with_its_tensors(served, client, monkeypatch):
    """The detector above is itself shown a leak: an error that is kept holds the frames it came through."""
    engine, kept = served.pipeline.batcher._workers[0], []
    module = engine.run.__self__._models["poisoned@1"].module

    def keeping(*_):
        try:
            return module(torch.tensor([[[[2.0]], [[0.0]], [[0.0]]]]))
        except torch.OutOfMemoryError as error:
            kept.append(error)
            raise OutOfMemory("no memory") from error

    monkeypatch.setattr(engine, "run", keeping)
    grown, errors = without_memory(client, 2)

    assert len(kept) == len(errors) == 7
    assert grown > 0.02
