"""Errors: their messages, their fields, and the translation of malformed ones."""

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
from camserve._core.errors import STATUS, join_faults, status_code
from camserve._transport.errors import DETAILS_TRAILER, PUSHBACK_TRAILER, REQUEST_ID, more_telling, translate_errors
from support import wait_in_loop_until


class FakeRpcError(grpc.RpcError):
    """An error as raised by gRPC."""

    def __init__(self, code: str, details: str | None, trailers: Any = ()) -> None:
        self._status = grpc.StatusCode[code], details, trailers

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str | None:
        return self._status[1]

    def trailing_metadata(self) -> Any:
        return self._status[2]


def translate(*args: Any, address: str = "host:1") -> camserve.CamserveError:
    with pytest.raises(camserve.CamserveError) as caught, translate_errors(address, "sent"):
        raise FakeRpcError(*args)
    return caught.value


def test_every_error_class_has_its_own_status() -> None:
    assert set(STATUS.values()) == set(camserve.CamserveError.__subclasses__())
    assert all(error.code is code for code, error in STATUS.items())


def test_error_shows_its_message_fields_and_request_id() -> None:
    error = camserve.InvalidArgument("wrong", request_id="r7", fields={"alpha": "too large"})

    assert str(error) == "wrong (alpha: too large) [request r7]"
    assert str(camserve.Internal("the log has more under r7", request_id="r7")) == "the log has more under r7"


def test_fault_in_the_message_is_not_repeated() -> None:
    error = camserve.NotFound("no class 'taby'", fields={"targets[0]": "no class 'taby'"})

    assert str(error) == "no class 'taby'"


def test_error_survives_pickling() -> None:
    error = camserve.ResourceExhausted("full", request_id="r", fields={"a": "b"}, retry_after=2)

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 -- pickled above

    assert type(copy) is camserve.ResourceExhausted
    assert vars(copy) == vars(error)


def test_error_without_details_has_a_message() -> None:
    assert str(translate("DATA_LOSS", None, None)) == "data loss [request sent]"


async def test_call_that_arrives_as_the_server_stops_raises_unavailable() -> None:
    """A stopping server cancels calls that it has received and not yet passed to a handler; they are safe to retry."""

    async def answer(_request: bytes, _context: object) -> bytes:
        return b""

    server = grpc.aio.server()
    handlers = {"Check": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    barrier = threading.Barrier(9)

    def check_health() -> str:
        with camserve.Client(f"127.0.0.1:{port}", retries=0) as client:
            client.health()
            barrier.wait()
            try:
                client.health()
            except camserve.CamserveError as error:
                return type(error).__name__
            return "OK"

    with ThreadPoolExecutor(8) as threads:
        calls = [asyncio.get_running_loop().run_in_executor(threads, check_health) for _ in range(8)]
        await wait_in_loop_until(lambda: barrier.n_waiting == 8)
        barrier.wait()
        # The blocked event loop handles none of the calls that arrive.
        time.sleep(0.3)  # noqa: ASYNC251 # real timeout: a call that arrives later is refused
        await server.stop(1)
        outcomes = await asyncio.gather(*calls)

    assert set(outcomes) <= {"OK", "Unavailable"}


def test_call_cancelled_by_the_client_raises_cancelled() -> None:
    assert type(translate("CANCELLED", "Channel closed!")) is camserve.Cancelled
    assert type(translate("CANCELLED", "CANCELLED")) is camserve.Unavailable


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("CANCELLED", "Stream removed (RST_STREAM (Received RST_STREAM with error code 8))"),
        ("CANCELLED", "Received RST_STREAM with error code 8"),
        ("UNKNOWN", "Stream removed (Data frame with END_STREAM flag received)"),
    ],
)
def test_response_that_a_proxy_cuts_off_raises_unavailable(code: str, details: str) -> None:
    assert isinstance(translate(code, details), camserve.Unavailable)
    assert type(translate("DATA_LOSS", details)) is camserve.CamserveError


@pytest.mark.parametrize("packed", [b"\xff\xff", "text", b""])
def test_malformed_details_are_ignored(packed: Any) -> None:
    error = translate("INTERNAL", "broken", ((DETAILS_TRAILER, packed),))

    assert error.fields == {}
    assert error.request_id == "sent"


@pytest.mark.parametrize(("pushback", "seconds"), [("250", 0.25), (b"0", 0.0), ("-7", -1.0), ("soon", -1.0)])
def test_pushback_is_converted_to_seconds(pushback: Any, seconds: float) -> None:
    error = translate("UNAVAILABLE", "later", ((PUSHBACK_TRAILER, pushback),))

    assert error.retry_after == seconds


def test_request_id_may_be_bytes() -> None:
    assert translate("INTERNAL", "x", ((REQUEST_ID, b"abc"),)).request_id == "abc"


def test_faults_of_the_same_field_are_joined() -> None:
    assert join_faults([("a", "x"), ("b", "y"), ("a", "z")]) == {"a": "x; z", "b": "y"}


def test_number_without_a_status_code_is_unknown() -> None:
    assert status_code(3) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_code(99) is grpc.StatusCode.UNKNOWN


def test_messages_of_grpc_are_rephrased() -> None:
    connect = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1: Connection refused"

    assert translate("UNAVAILABLE", connect).message == ("no server answers at host:1: Connection refused")
    assert translate("DEADLINE_EXCEEDED", "Deadline Exceeded").message == ("host:1 did not answer in time")


def test_refusal_names_its_address_if_it_is_one_of_several() -> None:
    connect = "failed to connect to all addresses; last error: UNKNOWN: {}: Failed to connect to remote host: {}"
    refused, closed = "Connection refused", "Socket closed"

    other = translate("UNAVAILABLE", connect.format("ipv6:%5B::1%5D:1", refused), address="localhost:1")
    same = translate("UNAVAILABLE", connect.format("ipv4:127.0.0.1:1", refused), address="127.0.0.1:1")
    hint = translate("UNAVAILABLE", connect.format("ipv4:127.0.0.1:1", closed), address="localhost:1")

    assert other.message == "no server answers at localhost:1: Connection refused at [::1]:1"
    assert same.message == "no server answers at 127.0.0.1:1: Connection refused"
    assert "may want TLS" in hint.message
    assert more_telling(hint, other) is hint
    assert more_telling(other, hint) is hint
    assert more_telling(hint, same) is same
    assert more_telling(None, other) is other


def test_other_exceptions_are_not_translated() -> None:
    with pytest.raises(KeyError), translate_errors("host:1", ""):
        raise KeyError
