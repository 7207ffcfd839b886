"""One server with real weights for all the tests here."""

import pytest

from support import serving

collect_ignore = ["with_tritonclient.py"]  # it runs in a venv of its own


@pytest.fixture(scope="session")
def served():
    models = (
        "efficientnet_lite0",
        "torchvision:resnet18?weights=none",
        "small=torchvision:mobilenet_v3_small?weights=none&size=64",
    )
    with serving(models=models, max_batch_mib=1024) as one:  # full batches, in which neighbours could be confused
        yield one
