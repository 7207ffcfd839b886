"""Networks in float64, and programs whose default type is float64."""

import numpy as np
import pytest
import torch

import camserve
import camserve_server
from as_written import PREPROCESS, plain
from camserve_server import Explainer
from camserve_server.models import Source
from methods.tools import doubled, error_ratio
from models.test_as_written import IMAGE, OPTIONS, as_input, check_equal, gradcam, maps, offered, saliency


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_right(client, **model):
    """Check the score and two maps of a network in float64: they are rounded to float32 at the end."""
    methods = ["gradcam", "saliency"]
    result = client.explain(IMAGE, methods=methods, targets=3, overlay=None, heatmap=True, **model)
    reference, truth = plain(), doubled(plain())
    with torch.no_grad():
        score = truth(as_input(truth))[0, 3].item()
    cam, pixels = result.explanations

    assert cam.score == pytest.approx(score, rel=1e-6)
    assert error_ratio(cam.heatmap, gradcam(reference, reference.body), gradcam(truth, truth.body)) <= 1
    assert error_ratio(pixels.heatmap, saliency(reference), saliency(truth)) <= 1


def test_network_in_float64_is_explained_in_float64():
    with Explainer(plain(), **OPTIONS) as explainer:
        methods = offered(explainer)
    with Explainer(plain().double(), **OPTIONS) as explainer:
        assert explainer.model().precision == "float64"
        assert offered(explainer) == methods
        check_right(explainer)


def test_network_in_float64_is_served():
    source = Source(plain().double(), PREPROCESS)
    with camserve_server.running({"net": source}) as address, camserve.Client(address) as client:
        check_right(client, model="net")


@pytest.mark.slow
@pytest.mark.usefixtures("double_by_default")
def test_default_type_of_a_program_changes_no_map():
    network = plain().float()
    with Explainer(network, accelerate=False, **OPTIONS) as explainer:
        # Captum solves the equations of kernel_shap in that type.
        methods = [name for name in offered(explainer) if name != "kernel_shap"]
        found = maps(explainer, methods)
    torch.set_default_dtype(torch.float32)
    with Explainer(network, accelerate=False, **OPTIONS) as explainer:
        assert offered(explainer) == [
            *methods[: methods.index("lime")],
            "kernel_shap",
            *methods[methods.index("lime") :],
        ]
        check_equal(found, maps(explainer, methods))


@pytest.mark.usefixtures("double_by_default")
def test_network_that_is_made_with_that_default_is_in_float64():
    with Explainer(plain(), **OPTIONS) as explainer:
        assert explainer.model().precision == "float64"
        heatmap = explainer.explain(IMAGE).explanations[0].heatmap

    assert heatmap.dtype == np.float32
