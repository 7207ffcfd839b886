"""One row that fails alone or with its whole batch: the seven other rows of the batch are answered as usual."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import camserve
from robustness import error_checks, process_audit, soak_models
from robustness.out_of_memory import OPTIONS, POISONED
from rounding import check_same
from support import rows_waiting, serving, wait_until

FAILS = {
    "out of memory": camserve.ResourceExhausted,
    "raising hook": camserve.FailedPrecondition,
    "bad layer": camserve.CamserveError,
}


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
@pytest.mark.parametrize(
    "position", [0, 3, 7, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 4, 5, 6))]
)
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


# --- many errors in a row, in a process whose memory is measured ---

LEFT = 8 * 2**20
"""Bytes that errors may leave. Each error keeps more if its frames stay: `soak_models.MEMORY_BEFORE_FAILURE`."""


@pytest.fixture(scope="module")
def outcome():
    return process_audit.run_module("out_of_memory")


def test_server_serves_after_thirty_out_of_memory_errors_in_a_row(outcome):
    assert (set(outcome["sound"]["errors"]), outcome["sound"]["wrong"]) == ({"ResourceExhausted"}, [])
    assert len(outcome["sound"]["errors"]) == 35
    assert outcome["sound"]["left"] <= LEFT
    assert (outcome["health"], outcome["same"]) == ("SERVING", True)


def test_kept_error_is_detected_as_a_leak(outcome):
    """Control of the check above: a kept error keeps its frames and their tensors."""
    assert len(outcome["leaking"]["errors"]) == 7
    assert outcome["leaking"]["left"] > LEFT
