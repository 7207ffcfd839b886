"""How a client and its server know one another: TLS, certificates and tokens."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import grpc

from camserve._errors import InvalidArgument

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

AUTHORIZATION: Final = "authorization"

_TOKEN: Final = re.compile("[!-~]{1,512}")


class AccessOptions(TypedDict, total=False):
    """How a client and its server know one another; everything may be left out.

    Attributes:
        tls: Whether to encrypt, trusting the public authorities; or the path of a PEM file of those
            to trust, such as your own. Default: False.
        tls_name: The name that the server's certificate is for, where it is not that of the address.
        client_cert: Path of a PEM file: the client's certificate, for a server that asks for one.
        client_key: Path of a PEM file: its key.
        token: What `camserve-server token new` gave out. It is sent over TLS, or to this machine.
    """

    tls: bool | str | os.PathLike[str]
    tls_name: str
    client_cert: str | os.PathLike[str] | None
    client_key: str | os.PathLike[str] | None
    token: str


@dataclass(frozen=True, slots=True)
class Access:
    """``AccessOptions``, checked.

    Raises:
        InvalidArgument: They do not go together, or the token is none.
    """

    tls: bool | str | os.PathLike[str] = False
    tls_name: str = ""
    client_cert: str | os.PathLike[str] | None = None
    client_key: str | os.PathLike[str] | None = None
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if bool(self.client_cert) != bool(self.client_key):
            raise InvalidArgument("client_cert and client_key go together: a certificate and its key")
        if not self.tls and (self.client_cert or self.tls_name):
            raise InvalidArgument(
                "client_cert and tls_name are for TLS: say tls=True, or tls=PATH of the authority's file"
            )
        if self.token and not _TOKEN.fullmatch(self.token):
            raise InvalidArgument("the token is none: it is one word, as `camserve-server token new` prints it")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return what gRPC encrypts with, or None without TLS.

        Raises:
            InvalidArgument: A file cannot be read, or is not what it should be.
        """
        if not self.tls:
            return None
        roots = None if self.tls is True else _authority(self.tls)
        key, cert = _pair(self.client_key, self.client_cert) if self.client_key and self.client_cert else (None, None)
        return grpc.ssl_channel_credentials(roots, key, cert)

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """What a channel must know besides."""
        return (("grpc.ssl_target_name_override", self.tls_name),) if self.tls_name else ()

    def metadata(self) -> dict[str, str]:
        """Return what goes with every call."""
        return {AUTHORIZATION: f"Bearer {self.token}"} if self.token else {}


def _authority(path: str | os.PathLike[str]) -> bytes:
    pem = _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(f"{path} holds no certificate in PEM") from error
    return pem


def _pair(key: str | os.PathLike[str], cert: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    pems = _read(key), _read(cert)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise InvalidArgument(f"{cert} and {key} are no certificate and its key in PEM, not encrypted") from error
    return pems


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error


def check_clear(address: str, metadata: Mapping[str, str]) -> None:
    """Keep a token from going over a network in the clear.

    Raises:
        InvalidArgument: It would.
    """
    if AUTHORIZATION in map(str.lower, metadata) and not is_local(address):
        raise InvalidArgument(
            f"a token would go to {address} in the clear, where anyone on the way can read it: say tls=True or tls=PATH"
        )


def is_local(address: str) -> bool:
    """Say whether an address surely leads to this machine.

    >>> is_local("localhost:1"), is_local("[::1]:1"), is_local("unix:/run/camserve"), is_local("10.0.0.1:1")
    (True, True, True, False)
    >>> is_local("ipv4:127.0.0.1:1,127.0.0.1:2"), is_local("ipv4:127.0.0.1:1,10.0.0.1:1")
    (True, False)
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    named = address.removeprefix("dns:///").removeprefix("ipv4:").removeprefix("ipv6:")
    return all(_is_loopback(one.rpartition(":")[0].strip("[]")) for one in named.split(","))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
