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
def detector():
    """Spec of the default model of `tasks_served`, which has a pyramid."""
    return "torchvision:ssdlite320_mobilenet_v3_large?weights=none&classes=3&size=128"


@pytest.fixture(scope="session")
def tasks_served(detector, tmp_path_factory):
    """Server with models of every task, also over HTTP."""
    labels = tmp_path_factory.mktemp("labels") / "colours.txt"
    labels.write_text("background\nred\ngreen\n")
    models = (
        f"detector={detector}",
        f"colours=coloured:Colours?size=64&labels={labels}",
        f"finder=coloured:Finder?size=64&labels={labels}",
        "pooled=coloured:Pooled?size=64&task=embed",
        "proportional=coloured:proportional",
        "lraspp=torchvision:lraspp_mobilenet_v3_large?weights=none&size=64",
        "resnet=timm:test_resnet?weights=none&size=64",
    )
    with serving(models=models, threads=1, http_address="0") as server:
        yield server


@pytest.fixture(scope="session")
def address(served):
    """Address of the server."""
    return served.address
