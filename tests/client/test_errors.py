"""Errors as values: their words, their fields, and what garbled ones come to."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import camserve
from camserve import _errors
from support import wait_in_loop_until


class Foreign(grpc.RpcError):
    """An error of gRPC's."""

    def __init__(self, code: str, details: str | None, trailers: Any = ()) -> None:
        self._said = grpc.StatusCode[code], details, trailers

    def code(self) -> grpc.StatusCode:
        return self._said[0]

    def details(self) -> str | None:
        return self._said[1]

    def trailing_metadata(self) -> Any:
        return self._said[2]


def translated(*args: Any) -> camserve.CamserveError:
    with pytest.raises(camserve.CamserveError) as caught, _errors.translate_errors("host:1", "sent"):
        raise Foreign(*args)
    return caught.value


def test_every_error_of_ours_has_a_status_of_its_own() -> None:
    assert set(_errors.STATUS.values()) == set(camserve.CamserveError.__subclasses__())
    assert all(error.code is code for code, error in _errors.STATUS.items())


def test_an_error_says_what_where_and_in_which_request() -> None:
    error = camserve.InvalidArgument("wrong", request_id="r", fields={"alpha": "too large"})

    assert str(error) == "wrong (alpha: too large) [request r]"


def test_what_the_message_says_is_not_said_twice() -> None:
    error = camserve.NotFound("no class 'taby'", fields={"targets[0]": "no class 'taby'"})

    assert str(error) == "no class 'taby'"


def test_an_error_survives_pickling() -> None:
    error = camserve.ResourceExhausted("full", request_id="r", fields={"a": "b"}, retry_after=2)

    again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own

    assert type(again) is camserve.ResourceExhausted
    assert vars(again) == vars(error)


def test_a_message_is_there_even_if_the_server_sent_none() -> None:
    assert str(translated("DATA_LOSS", None, None)) == "data loss [request sent]"


async def test_a_call_that_comes_as_the_server_stops_ends_with_unavailable() -> None:
    """gRPC's server cancels calls that it has received and not handed over; a client that retries sends them again."""

    async def answer(_request: bytes, _context: object) -> bytes:
        return b""

    server = grpc.aio.server()
    handlers = {"Check": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    together = threading.Barrier(9)

    def ask() -> str:
        with camserve.Client(f"127.0.0.1:{port}", retries=0) as client:
            client.health()
            together.wait()
            try:
                client.health()
            except camserve.CamserveError as error:
                return type(error).__name__
            return "OK"

    with ThreadPoolExecutor(8) as threads:
        asked = [asyncio.get_running_loop().run_in_executor(threads, ask) for _ in range(8)]
        await wait_in_loop_until(lambda: together.n_waiting == 8)
        together.wait()
        time.sleep(0.3)  # noqa: ASYNC251 -- calls arrive, and the event loop takes none of them
        await server.stop(1)
        outcomes = await asyncio.gather(*asked)

    assert set(outcomes) <= {"OK", "Unavailable"}


def test_a_call_that_is_cancelled_on_this_side_ends_with_cancelled() -> None:
    assert type(translated("CANCELLED", "Channel closed!")) is camserve.Cancelled
    assert type(translated("CANCELLED", "CANCELLED")) is camserve.Unavailable


@pytest.mark.parametrize("packed", [b"\xff\xff", "text", b""])
def test_garbled_details_say_nothing(packed: Any) -> None:
    error = translated("INTERNAL", "broken", ((_errors.DETAILS_TRAILER, packed),))

    assert error.fields == {}
    assert error.request_id == "sent"


@pytest.mark.parametrize(("pushback", "seconds"), [("250", 0.25), (b"0", 0.0), ("-7", -1.0), ("soon", -1.0)])
def test_a_pushback_is_in_seconds(pushback: Any, seconds: float) -> None:
    error = translated("UNAVAILABLE", "later", ((_errors.PUSHBACK_TRAILER, pushback),))

    assert error.retry_after == seconds


def test_a_request_id_may_be_bytes() -> None:
    assert translated("INTERNAL", "x", ((_errors.REQUEST_ID, b"abc"),)).request_id == "abc"


def test_a_field_named_twice_keeps_both() -> None:
    assert _errors.merged([("a", "x"), ("b", "y"), ("a", "z")]) == {"a": "x; z", "b": "y"}


def test_an_unknown_code_is_unknown() -> None:
    assert _errors.code_of(3) is grpc.StatusCode.INVALID_ARGUMENT
    assert _errors.code_of(99) is grpc.StatusCode.UNKNOWN


def test_words_of_grpcs_core_are_made_readable() -> None:
    connect = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1: Connection refused"

    assert translated("UNAVAILABLE", connect).message == ("no server answers at host:1: Connection refused")
    assert translated("DEADLINE_EXCEEDED", "Deadline Exceeded").message == ("host:1 did not answer in time")


def test_other_errors_pass_the_border() -> None:
    with pytest.raises(KeyError), _errors.translate_errors("host:1", ""):
        raise KeyError
