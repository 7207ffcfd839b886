"""Warm-up of the server's own process: everything but the model runs once before the first request."""

from dataclasses import replace

import pytest

from camserve_server import jobs, running
from camserve_server.api import codec, warmup
from camserve_server.models.values import UnavailableModel
from camserve_server.serving import receipts


@pytest.fixture
def replies(monkeypatch):
    """The photos' sizes and the explanations that were encoded."""
    encoded, encode = [], codec.explain_response

    def record(request, result):
        encoded.append((result.size, list(result.explanations)))  # encoding empties the list
        return encode(request, result)

    monkeypatch.setattr(codec, "explain_response", record)
    return encoded


async def test_warm_up_draws_and_encodes_a_reply_without_a_batch(server, replies):
    receipts._versions.cache_clear()
    before = replace(server.pipeline.batcher.stats)

    await warmup.warm_up(server.pipeline)

    ((size, (explanation,)),) = replies
    assert explanation.overlay.data[:2] == b"\xff\xd8"
    assert explanation.heatmap.all()
    assert size == warmup.SIDES
    assert receipts._versions.cache_info().currsize == 1
    assert server.pipeline.batcher.stats == before
    assert server.pipeline.batcher.admitted == 0
    assert server.pipeline.image_memory.taken == server.pipeline.replies.limit.taken == 0


async def test_server_is_warm_before_the_first_request(serving, replies):
    receipts._versions.cache_clear()
    async with serving():
        assert len(replies) == 1
        assert receipts._versions.cache_info().currsize == 1


@pytest.mark.parametrize("channels", [1, 3, 12])
async def test_photo_of_the_warm_up_has_the_channels_of_the_model(channels, replies, caplog):
    spec = f"any=timm:test_resnet?weights=none&size=32&channels={channels}&mean=0.4&std=0.25"
    with running(spec, log_level="warning"):
        assert [size for size, _ in replies] == [warmup.SIDES]
        assert "warm-up" not in caplog.text


async def test_failing_warm_up_is_logged_and_the_server_starts(serving, monkeypatch, caplog):
    def fail(*_, **__):
        raise ValueError("planted")

    monkeypatch.setattr(jobs, "explain", fail)
    async with serving():
        assert "the server's warm-up failed" in caplog.text
        assert "planted" in caplog.text


@pytest.mark.parametrize("state", ["unavailable", "another task"])
async def test_warm_up_needs_a_classifier(state, server, replies, monkeypatch):
    (name, model) = next(iter(server.pipeline.models.items()))
    other = UnavailableModel(name, "", "failed") if state == "unavailable" else replace(model, task="embed")
    monkeypatch.setitem(server.pipeline.repository.models, name, other)

    await warmup.warm_up(server.pipeline)

    assert replies == []
