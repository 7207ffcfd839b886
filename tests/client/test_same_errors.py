"""Both clients raise the same errors: same class, message and request id."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

import camserve
from client import hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNPARSABLE = b"\xff" * 9
REQUEST_ID = re.compile("[0-9a-f]{32}")


@pytest.fixture
def malformed() -> Iterator[str]:
    """Address of a server whose responses cannot be parsed."""

    def respond(requests: Iterator[bytes], _context: object) -> Iterator[bytes]:
        for _ in requests:
            yield UNPARSABLE

    with hostile.serving() as server:
        server.replies["Explain"] = UNPARSABLE
        server.replies[hostile.STREAM] = respond
        yield server.address


async def explain(client: Any, **options: Any) -> None:
    await client.explain(b"1", **options)


async def explain_with_progress(client: Any, **options: Any) -> None:
    await client.explain(b"1", on_progress=print, **options)


async def explain_many(client: Any, **options: Any) -> None:
    results = client.explain_many([b"1"], **options)
    try:
        _ = [result async for result in results]
    finally:
        await results.aclose()


CALLS = pytest.mark.parametrize("call", [explain, explain_with_progress, explain_many])


@CALLS
async def test_unparsable_response_raises_internal(connect: Any, malformed: str, call: Callable[..., Any]) -> None:
    with pytest.raises(camserve.Internal) as caught:
        await call(connect(malformed), timeout=60)

    assert caught.value.message == "the server sent a response that cannot be parsed"
    assert REQUEST_ID.fullmatch(caught.value.request_id)


@CALLS
async def test_closing_the_client_cancels_a_call(connect: Any, server: Any, call: Callable[..., Any]) -> None:
    server.hold.clear()
    client = connect(server.address)
    running = asyncio.create_task(call(client))
    await asyncio.to_thread(server.called.wait)

    await client.close()

    with pytest.raises(camserve.Cancelled) as caught:
        await running
    assert caught.value.message == "the client was closed"
    assert caught.value.request_id == server.calls[0].metadata["x-request-id"]


async def test_client_closed_during_a_pause_sends_nothing(
    connect: Any, server: Any, refusal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refusals = [refusal(camserve.Unavailable.code)]
    client = connect(server.address)

    async def close(_seconds: float) -> None:
        await client.close()

    monkeypatch.setattr("camserve._transport.sync.sleep", lambda _seconds: client.client.close())
    monkeypatch.setattr("camserve._transport.aio.sleep", close)

    with pytest.raises(camserve.FailedPrecondition) as caught:
        await client.explain(b"1")
    assert caught.value.message == "the client is closed"
    assert len(server.calls) == 1


async def test_unreadable_image_is_reported_before_an_invalid_option(client: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match="image: it is empty"):
        await client.features(b"", top=0)
    with pytest.raises(camserve.InvalidArgument, match="image: it is empty"):
        await client.inspect(b"", target=object())


def test_both_clients_document_the_same_arguments() -> None:
    for name in ("explain", "replay", "explain_many", "inspect", "features", "evaluate", "load_model", "health"):
        sync, asynchronous = (getattr(kind, name).__doc__ for kind in (camserve.Client, camserve.AsyncClient))
        assert re.findall(r"^ +\**\w+: ", sync, re.MULTILINE) == re.findall(r"^ +\**\w+: ", asynchronous, re.MULTILINE)
        assert "await" not in sync
