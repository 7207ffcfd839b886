"""What every call of a client has in common: pure, so that both clients share it."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2  # pyright: ignore[reportMissingTypeStubs]  # it ships no types

from camserve._access import Access, AccessOptions, check_clear
from camserve._errors import REQUEST_ID, Internal, InvalidArgument
from camserve._retry import Retry
from camserve._values import Health

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

LOCAL: Final = "localhost:50051"
TIMEOUT: Final = 30.0
IN_FLIGHT: Final = 32

_MAX_MESSAGE: Final = 64 * 2**20
CHANNEL_OPTIONS: Final[tuple[tuple[str, str | int], ...]] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    # Connecting again keeps pace with Retry, or its tries would meet the last one's failure.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
# Servers in turn; one that drains, or is not warm yet, says so by its health and is left out.
_IN_TURN: Final = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})
_SEVERAL: Final = ("dns:", "ipv4:", "ipv6:")
HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach a server, and how long and how often to try; without credentials, in the clear."""

    address: str
    timeout: float
    retry: Retry
    metadata: Mapping[str, str] = field(repr=False)  # it may hold a token
    credentials: grpc.ChannelCredentials | None
    channel_options: tuple[tuple[str, str | int], ...]

    def __post_init__(self) -> None:
        if not self.address or self.address.startswith(("http://", "https://")):
            raise InvalidArgument(f"an address is HOST:PORT, as {LOCAL}, not {self.address!r}")
        self.patience(self.timeout)

    def patience(self, timeout: float | None) -> float:
        """Return the seconds that a call may take: those given for it, or else the client's.

        Raises:
            InvalidArgument: They are not above 0.
        """
        seconds = self.timeout if timeout is None else timeout
        if not seconds > 0:
            raise InvalidArgument(f"timeout must be above 0 seconds, not {seconds}")
        return seconds

    def metadata_with(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        return (*self.metadata.items(), (REQUEST_ID, request_id))


@dataclass(frozen=True, slots=True)
class Given:
    """What a client was given, besides the address, to be checked and gathered by ``settings``."""

    timeout: float
    retries: int | Retry
    credentials: grpc.ChannelCredentials | None
    metadata: Mapping[str, str] | None
    own_channel: bool = False


def settings(address: str, given: Given, options: AccessOptions) -> Settings:
    """Gather what a client was given.

    Raises:
        InvalidArgument: Something is out of range, or the address is none; what is said of TLS does
            not go together, or is given with a channel; or a token would go over a network in the clear.
    """
    access = Access(**options)
    if given.own_channel and (given.credentials or access.tls):
        raise InvalidArgument("credentials and tls are for a channel to the address: encrypt the channel that you give")
    if given.credentials and access.tls:
        raise InvalidArgument("credentials and tls say the same: give one of them")
    retry = given.retries if isinstance(given.retries, Retry) else Retry(attempts=given.retries)
    credentials = given.credentials or access.credentials()
    metadata = {**(given.metadata or {}), **access.metadata()}
    if credentials is None and not given.own_channel:
        check_clear(address, metadata)
    channel = CHANNEL_OPTIONS + access.channel_options + balancing(address)
    if credentials is None:
        channel += (("grpc.enable_http_proxy", 0),)  # a proxy could read and change what is not encrypted
    return Settings(address, given.timeout, retry, metadata, credentials, channel)


def balancing(address: str) -> tuple[tuple[str, str], ...]:
    """Return what a channel must know to take several servers in turn, where an address may name several.

    >>> [bool(balancing(one)) for one in ("localhost:1", "dns:///camserve:50051", "ipv4:10.0.0.1:1,10.0.0.2:1")]
    [False, True, True]
    """
    return (("grpc.service_config", _IN_TURN),) if address.startswith(_SEVERAL) else ()


def new_request_id() -> str:
    """Make an id by which a request is found in the server's log."""
    return uuid.uuid4().hex


def health_request(service: str) -> bytes:
    """Encode the question whether a service takes requests."""
    packed: bytes = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return packed


def health(packed: bytes) -> Health:
    """Read the answer.

    Raises:
        Internal: The answer is not a valid health status.
    """
    try:
        number = health_pb2.HealthCheckResponse.FromString(packed).status
        return Health(health_pb2.HealthCheckResponse.ServingStatus.Name(number))
    except (DecodeError, ValueError) as error:
        raise Internal("the server sent an invalid health status") from error
