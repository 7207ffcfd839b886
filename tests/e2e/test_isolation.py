"""A row that fails in the model, on a whole server: the other rows of its batch are answered as if alone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import camserve
from rounding import check_same
from support import rows_waiting, serving, wait_until

CODE = '''
import torch
from torch import nn


class Moody(nn.Module):
    """Fails the whole batch if one image in it is white."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        if (x.amin((1, 2, 3)) > 1.5).any():
            raise RuntimeError("a white image")
        return self.head(self.features(x).mean((2, 3)))
'''
MOODY = "moody=moody_nets:Moody?size=64"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moody")
    (folder / "moody_nets.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with serving(models=(MOODY,), max_batch_rows=8) as server:
            yield server


@pytest.mark.parametrize(
    "position", [0, 3, 7, *(pytest.param(middle, marks=pytest.mark.slow) for middle in (1, 2, 4, 5, 6))]
)
def test_failing_row_of_a_batch_of_eight_fails_alone(served, position):
    chance = np.random.default_rng(position)
    photos = [chance.integers(0, 120, (64, 64, 3), np.uint8) for _ in range(8)]
    batcher, options = served.pipeline.batcher, {"overlay": None, "targets": 2}
    with camserve.Client(served.address, retries=0) as client, ThreadPoolExecutor(8) as threads:
        alone = [client.explain(photo, **options).explanations[0].heatmap for photo in photos]
        photos[position] = np.full((64, 64, 3), 255, np.uint8)
        served.do(batcher.pause)
        calls = []
        for number, photo in enumerate(photos):
            calls.append(threads.submit(client.explain, photo, **options))
            wait_until(lambda: rows_waiting(served) > number)  # noqa: B023 -- called at once
        batches = batcher.stats.batches
        served.do(batcher.resume)
        outcomes = [call.exception() or call.result().explanations[0] for call in calls]

    assert batcher.stats.batches - batches == 1
    for number, outcome in enumerate(outcomes):
        if number == position:
            assert isinstance(outcome, camserve.FailedPrecondition)
            assert "moody failed in its own forward (Moody): a white image" in str(outcome)
        else:
            check_same(outcome.heatmap, alone[number], MOODY)
