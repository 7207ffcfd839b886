"""Settings of a client, and its health check. This module does no I/O, so both clients share it."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2  # pyright: ignore[reportMissingTypeStubs]  # it ships no types

from camserve._core.errors import Internal, InvalidArgument
from camserve._transport.access import Access, AccessOptions, check_token_is_protected
from camserve._transport.errors import REQUEST_ID
from camserve._transport.retry import Retry
from camserve._values.models import Health

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

DEFAULT_ADDRESS: Final = "localhost:50051"
DEFAULT_TIMEOUT: Final = 30.0
DEFAULT_IN_FLIGHT: Final = 32

_MAX_MESSAGE: Final = 64 * 2**20
CHANNEL_OPTIONS: Final[tuple[tuple[str, str | int], ...]] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    # gRPC must reconnect as often as Retry retries. Otherwise a retry gets the error of the last connection attempt.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Otherwise all channels of a program to one address would share one connection, and so one process of the server.
    ("grpc.use_local_subchannel_pool", 1),
)
# Call the servers in turn. A server that drains or still starts reports that by its health check and gets no calls.
_ROUND_ROBIN: Final = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)
_MULTI_ADDRESS_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:")
_UNIX_SCHEMES: Final = ("unix:", "unix-abstract:")
HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a client's channel and calls.

    Raises:
        InvalidArgument: The address is not HOST:PORT, or the timeout or the number of connections is not above 0.

    Attributes:
        address: Address of the server.
        timeout: Seconds that a call may take, unless the call has a timeout of its own.
        retry: The rule for sending a request again.
        metadata: Metadata of every call.
        credentials: Credentials of the channel; None for no encryption.
        channel_options: Options of the channel.
        connections: The number of connections; None for one to each process of the server.
    """

    address: str
    timeout: float
    retry: Retry
    metadata: Mapping[str, str] = field(repr=False)  # it may hold a token
    credentials: grpc.ChannelCredentials | None
    channel_options: tuple[tuple[str, str | int], ...]
    connections: int | None = None

    def __post_init__(self) -> None:
        if not self.address or self.address.startswith(("http://", "https://")):
            raise InvalidArgument(f"the address must be HOST:PORT, such as {DEFAULT_ADDRESS}, not {self.address!r}")
        if self.connections is not None and self.connections < 1:
            raise InvalidArgument(f"connections must be at least 1, not {self.connections}")
        self.timeout_for(self.timeout)

    @property
    def one_server(self) -> bool:
        """True if the address stands for one server, as far as gRPC knows."""
        return not self.address.startswith(_MULTI_ADDRESS_SCHEMES)

    def timeout_for(self, timeout: float | None) -> float:
        """Return the timeout of a call in seconds: its own, or else the client's.

        Raises:
            InvalidArgument: It is not above 0.
        """
        seconds = self.timeout if timeout is None else timeout
        if not seconds > 0:
            raise InvalidArgument(f"timeout must be above 0 seconds, not {seconds}")
        return seconds

    def metadata_with(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        return (*self.metadata.items(), (REQUEST_ID, request_id))


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Unchecked arguments of a client's constructor.

    Attributes:
        timeout: Seconds that a call may take.
        retries: The number of retries, or the rule for them.
        credentials: gRPC's channel credentials.
        metadata: Metadata of every call.
        own_channel: True if the caller passed a channel.
        connections: The number of connections; None for as many as the server's processes need.
    """

    timeout: float
    retries: int | Retry
    credentials: grpc.ChannelCredentials | None
    metadata: Mapping[str, str] | None
    own_channel: bool = False
    connections: int | None = None


def make_settings(address: str, options: ClientOptions, access_options: AccessOptions) -> Settings:
    """Check a client's arguments and build its settings.

    Raises:
        InvalidArgument: A value is out of range, TLS options contradict one another or come with a
            channel, or a token would be sent over a network without encryption.
    """
    access = Access(**access_options)
    if options.own_channel and (options.credentials or access.tls):
        raise InvalidArgument(
            "credentials and tls are for a channel that the client opens: encrypt the channel that you pass"
        )
    if options.own_channel and options.connections is not None:
        raise InvalidArgument("connections is for channels that the client opens: pass either connections or a channel")
    if options.credentials and access.tls:
        raise InvalidArgument("credentials and tls both set the encryption: pass only one of them")
    retry = options.retries if isinstance(options.retries, Retry) else Retry(attempts=options.retries)
    credentials = options.credentials or access.credentials()
    metadata = {**(options.metadata or {}), **access.metadata()}
    if credentials is None and not options.own_channel:
        check_token_is_protected(address, metadata)
    channel_options = CHANNEL_OPTIONS + access.channel_options + load_balancing_options(address)
    if credentials is None:
        channel_options += (("grpc.enable_http_proxy", 0),)  # a proxy could read and change unencrypted calls
    connections = options.connections
    if connections is None and (options.own_channel or address.startswith(_UNIX_SCHEMES)):
        connections = 1  # several processes cannot listen on one Unix socket
    return Settings(address, options.timeout, retry, metadata, credentials, channel_options, connections)


def load_balancing_options(address: str) -> tuple[tuple[str, str], ...]:
    """Return the channel options that balance calls, if the address may stand for several servers.

    >>> addresses = "localhost:1", "dns:///camserve:50051", "ipv4:10.0.0.1:1,10.0.0.2:1"
    >>> [bool(load_balancing_options(address)) for address in addresses]
    [False, True, True]
    """
    return (("grpc.service_config", _ROUND_ROBIN),) if address.startswith(_MULTI_ADDRESS_SCHEMES) else ()


def new_request_id() -> str:
    """Return a new id, which the server's log shows for the request."""
    return uuid.uuid4().hex


def encode_health_request(service: str) -> bytes:
    """Encode a request of gRPC's health check."""
    encoded: bytes = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return encoded


def decode_health(response: bytes) -> Health:
    """Decode a response of gRPC's health check.

    Raises:
        Internal: The response is not a valid health status.
    """
    try:
        number = health_pb2.HealthCheckResponse.FromString(response).status
        return Health(health_pb2.HealthCheckResponse.ServingStatus.Name(number))
    except (DecodeError, ValueError) as error:
        raise Internal("the server sent an invalid health status") from error
