"""`camserve_server.running`: a server inside a `with` block, for tests and notebooks."""

import asyncio

import cv2
import pytest
import timm
import torch
from torch import nn

import camserve
import camserve_server
from camserve_server.core.errors import ConfigError
from camserve_server.models import Preprocess, Source
from camserve_server.models.source import IMAGENET_MEAN, IMAGENET_STD
from methods.tools import error_ratio, noise
from networks import changes, gradcam, state_of, trained
from support import PHOTOS

SMALL = "small=timm:test_resnet?weights=none&size=64"


def test_server_runs_only_inside_the_block():
    with camserve_server.running(models=[SMALL], max_batch_rows=4) as address:
        host, port = address.split(":")
        with camserve.Client(address) as client:
            assert client.explain(PHOTOS["flower"]).model == "small"

    assert host == "127.0.0.1"
    assert int(port) > 0
    with camserve.Client(address, retries=0) as client, pytest.raises(camserve.Unavailable):
        client.models()


def test_async_client_gets_the_same_predictions():
    async def ask(address):
        async with camserve.AsyncClient(address) as client:
            result = await client.explain(PHOTOS["flower"])
            many = [each async for each in client.explain_many([PHOTOS["flower"]] * 3)]
            return result, many

    with camserve_server.running(models=[SMALL]) as address:
        result, many = asyncio.run(ask(address))

    assert [each.predictions[0].class_index for each in many] == [result.predictions[0].class_index] * 3


def test_invalid_setting_or_model_is_reported_at_once():
    with pytest.raises(ConfigError, match='unknown setting "max_rows"'), camserve_server.running(max_rows=3):
        pass
    with pytest.raises(ConfigError, match='"resnet50" needs a source'), camserve_server.running(models=["resnet50"]):
        pass


def test_running_ignores_the_environment(monkeypatch):
    monkeypatch.setenv("CAMSERVE_ADDRESS", "0.0.0.0:1")
    monkeypatch.setenv("CAMSERVE_MODELS", "nonsense")

    with camserve_server.running(models=[SMALL]) as address:
        assert address.startswith("127.0.0.1:")


# --- networks of this process ---


def test_network_of_this_process_is_explained_and_left_as_it_was():
    module, image = trained(), noise(1, 64)
    calls = []
    module.fc.register_forward_hook(lambda *_: calls.append(1))
    before = state_of(module)
    photo = cv2.imencode(".png", image[..., ::-1])[1].tobytes()
    source = Source(module, Preprocess((64, 64), 64, "bilinear", IMAGENET_MEAN, IMAGENET_STD), tuple("abcde"))
    with camserve_server.running(models={"custom": source}) as address, camserve.Client(address) as client:
        result = client.explain(photo, targets=3, overlay=None, heatmap=True)
        (model,) = client.models()
    changed = changes(before, state_of(module))
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)

    assert (result.model, model.name) == ("custom", "custom")
    assert {prediction.label for prediction in result.predictions} <= set("abcde")
    assert (
        error_ratio(
            result.explanations[0].heatmap, gradcam(module, pixels.float()), gradcam(module.double(), pixels.double())
        )
        <= 1
    )
    assert changed == []


@pytest.mark.slow
def test_network_can_be_trained_on_after_it_was_served():
    module = trained()
    with camserve_server.running(models={"custom": Source(module)}) as address, camserve.Client(address) as client:
        client.explain(PHOTOS["flower"], overlay=None)
    weights = module.fc.weight.clone()
    optimizer = torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1)
    module(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()

    assert not torch.equal(module.fc.weight, weights)


@pytest.mark.slow
def test_models_may_be_specs_or_networks():
    models = {"small": SMALL.partition("=")[2], "custom": timm.create_model("test_resnet", num_classes=5)}
    with camserve_server.running(models=models) as address, camserve.Client(address) as client:
        assert [model.name for model in client.models()] == ["small", "custom"]


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        ({"custom": 3}, {}, 'model "custom" is of type int: give a torch.nn.Module or a Source'),
        ({"custom": nn.Linear(2, 2)}, {"isolation": "process"}, "can only be served in this process"),
        ({"custom": "resnet50"}, {}, '"resnet50" needs a source'),
    ],
)
def test_invalid_model_is_refused_in_one_line(models, settings, message):
    with pytest.raises(ConfigError, match=message) as refused, camserve_server.running(models=models, **settings):
        pass

    assert len(str(refused.value)) < 300
