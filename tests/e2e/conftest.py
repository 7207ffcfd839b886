"""Server with real weights that the tests of this folder share."""

import pytest

from support import serving

collect_ignore = ["triton_calls.py", "with_tritonclient.py"]  # they run in another environment


@pytest.fixture(scope="session")
def served():
    """Server with three models; the default one is efficientnet_lite0."""
    models = (
        "efficientnet_lite0",
        "resnet=timm:test_resnet?weights=none&size=64",
        "small=torchvision:mobilenet_v3_small?weights=none&size=64",
    )
    with serving(models=models, max_batch_mib=1024) as server:  # full batches, in which rows could be confused
        yield server


@pytest.fixture(scope="session")
def address(served):
    """Address of the server."""
    return served.address
