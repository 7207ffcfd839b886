"""A server for as long as a `with` block: what tests and notebooks use."""

import asyncio

import pytest

import camserve
import camserve_server
from camserve_server.errors import ConfigError
from support import PHOTOS

SMALL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"


def test_running_serves_inside_the_block_and_not_after_it():
    with camserve_server.running(models=[SMALL], max_batch_rows=4) as address:
        host, port = address.split(":")
        with camserve.Client(address) as client:
            assert client.explain(PHOTOS["flower"]).model == "small"

    assert host == "127.0.0.1"
    assert int(port) > 0
    with camserve.Client(address, retries=0) as client, pytest.raises(camserve.Unavailable):
        client.models()


def test_the_async_client_is_the_same_awaited():
    async def ask(address):
        async with camserve.AsyncClient(address) as client:
            result = await client.explain(PHOTOS["flower"])
            many = [one async for one in client.explain_many([PHOTOS["flower"]] * 3)]
            return result, many

    with camserve_server.running(models=[SMALL]) as address:
        result, many = asyncio.run(ask(address))

    assert [one.predictions[0].class_index for one in many] == [result.predictions[0].class_index] * 3


def test_a_setting_or_model_that_cannot_be_used_is_said_at_once():
    with pytest.raises(ConfigError, match='unknown setting "max_rows"'), camserve_server.running(max_rows=3):
        pass
    with pytest.raises(ConfigError, match='"resnet50" needs a source'), camserve_server.running(models=["resnet50"]):
        pass


def test_the_environment_does_not_reach_into_it(monkeypatch):
    monkeypatch.setenv("CAMSERVE_ADDRESS", "0.0.0.0:1")
    monkeypatch.setenv("CAMSERVE_MODELS", "nonsense")

    with camserve_server.running(models=[SMALL]) as address:
        assert address.startswith("127.0.0.1:")
