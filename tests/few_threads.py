"""Fixture for tests that compute: torch has one thread, unless OMP_NUM_THREADS sets another number."""

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def few_threads():
    # With two threads, operations as small as these spend more time on synchronization than on work.
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)
