"""Plugins that were written for the recorded release still load and work."""

import sys

import numpy as np
import pytest

import camserve
import camserve_server
from camserve_server import methods
from compatibility import calls, comparing, servers, storage

pytestmark = pytest.mark.slow
RECORDED = storage.read("plugin")
LEVEL = 0.25


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server that has the recorded plugins installed."""
    folder, kept = tmp_path_factory.mktemp("plugins"), dict(methods.METHODS)
    groups = RECORDED["entry points"].items()
    lines = [line for group, names in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))]
    servers.install(folder, "recorded", "\n".join(lines), RECORDED["files"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with (
            camserve_server.running("zoo:stripes?weights=none", **servers.PLAIN) as address,
            camserve.Client(address) as client,
        ):
            yield client
    for name in ("camserve_example", "recorded_kinds"):
        sys.modules.pop(name, None)
    methods.METHODS.clear()
    methods.METHODS.update(kept)


def heatmap(client, *names):
    return client.explain(calls.PIXELS, methods=[*names], overlay=None).explanations[0].heatmap


def test_recorded_source_makes_its_model_with_its_labels(client):
    assert client.model().source == "zoo:stripes"
    assert client.model().labels == ("plain", "striped")


def test_recorded_methods_are_listed(client):
    assert RECORDED["entry points"]["camserve.methods"].keys() <= {method.name for method in client.methods()}


def test_recorded_cam_weighs_activations_by_gradients(client):
    """The layer follows a ReLU, where |A| equals A, so that the plugin's formula is that of HiResCAM."""
    layer = client.model().default_layer
    plugin, hirescam = client.explain(
        calls.PIXELS, methods=["signed_layercam", "hirescam"], layers=layer, overlay=None
    ).explanations

    assert comparing.close(hirescam.heatmap, plugin.heatmap)


def test_recorded_saliency_is_given_the_gradient(client):
    assert comparing.close(heatmap(client, "saliency"), heatmap(client, "steepest"))


def test_recorded_perturbation_is_sent_the_scores_of_its_edits(client):
    assert comparing.close(np.ones((64, 64)), heatmap(client, "unchanged"))


def test_recorded_baseline_is_given_its_parameter(client):
    assert comparing.close(np.full((64, 64), LEVEL), heatmap(client, ("level", {"level": LEVEL})))
