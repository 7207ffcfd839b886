"""Access of a client to a server: TLS, certificates and tokens."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import grpc

from camserve._core.errors import InvalidArgument

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

AUTHORIZATION: Final = "authorization"

_TOKEN: Final = re.compile("[!-~]{1,512}")


class AccessOptions(TypedDict, total=False):
    """Options for TLS and tokens. All are optional.

    Attributes:
        tls: True to encrypt and trust the public certificate authorities, or the path of a PEM file
            with the authorities to trust, such as your own. Default: False.
        tls_name: The name in the server's certificate, if it differs from the address.
        client_cert: Path of the client's certificate in PEM, for a server that requires one.
        client_key: Path of the key of the client's certificate in PEM.
        token: A token that `camserve-server token new` printed. It is sent only over TLS or to the
            local machine.

    Example:
        >>> access: camserve.AccessOptions = {"tls": True, "token": "camserve_Zk3v"}
        >>> camserve.Client("explain.example.com:443", **access).close()
        >>> try:
        ...     camserve.Client("explain.example.com:443", token="camserve_Zk3v")
        ... except camserve.InvalidArgument as error:
        ...     print(error)
        the token would be sent to explain.example.com:443 without encryption, ...: pass tls=True or tls=PATH
    """

    tls: bool | str | os.PathLike[str]
    tls_name: str
    client_cert: str | os.PathLike[str] | None
    client_key: str | os.PathLike[str] | None
    token: str


@dataclass(frozen=True, slots=True)
class Access:
    """Checked ``AccessOptions``.

    Raises:
        InvalidArgument: The options contradict one another, or the token is malformed.
    """

    tls: bool | str | os.PathLike[str] = False
    tls_name: str = ""
    client_cert: str | os.PathLike[str] | None = None
    client_key: str | os.PathLike[str] | None = None
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if bool(self.client_cert) != bool(self.client_key):
            raise InvalidArgument("client_cert and client_key must be given together: a certificate and its key")
        if not self.tls and (self.client_cert or self.tls_name):
            raise InvalidArgument(
                "client_cert and tls_name require TLS: pass tls=True, or tls=PATH of the authority's file"
            )
        if self.token and not _TOKEN.fullmatch(self.token):
            raise InvalidArgument("invalid token: a token is one word, as printed by `camserve-server token new`")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of the channel, or None without TLS.

        Raises:
            InvalidArgument: A file cannot be read, or is not a certificate or key in PEM.
        """
        if not self.tls:
            return None
        roots = None if self.tls is True else _read_authority(self.tls)
        if not (self.client_key and self.client_cert):
            return grpc.ssl_channel_credentials(roots)
        return grpc.ssl_channel_credentials(roots, *_read_key_pair(self.client_key, self.client_cert))

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options of the channel: the expected name of the server."""
        return (("grpc.ssl_target_name_override", self.tls_name),) if self.tls_name else ()

    def metadata(self) -> dict[str, str]:
        """Return the metadata of every call."""
        return {AUTHORIZATION: f"Bearer {self.token}"} if self.token else {}


def _read_authority(path: str | os.PathLike[str]) -> bytes:
    pem = _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(f"{path} has no certificate in PEM") from error
    return pem


def _read_key_pair(key: str | os.PathLike[str], cert: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    pems = _read(key), _read(cert)
    try:
        # Without a password argument OpenSSL would prompt for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise InvalidArgument(f"{cert} and {key} are not a certificate and its unencrypted key in PEM") from error
    return pems


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error


def check_token_is_protected(address: str, metadata: Mapping[str, str]) -> None:
    """Check that no token is sent over a network without encryption.

    Raises:
        InvalidArgument: The metadata has a token, and the address is not on this machine.
    """
    if AUTHORIZATION in map(str.lower, metadata) and not is_local(address):
        raise InvalidArgument(
            f"the token would be sent to {address} without encryption, and anyone on the way could read it: "
            "pass tls=True or tls=PATH"
        )


def is_local(address: str) -> bool:
    """Return True if an address is certainly on this machine.

    >>> is_local("localhost:1"), is_local("[::1]:1"), is_local("unix:/run/camserve"), is_local("10.0.0.1:1")
    (True, True, True, False)
    >>> is_local("ipv4:127.0.0.1:1,127.0.0.1:2"), is_local("ipv4:127.0.0.1:1,10.0.0.1:1")
    (True, False)
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    endpoints = address.removeprefix("dns:///").removeprefix("ipv4:").removeprefix("ipv6:")
    return all(_is_loopback(endpoint.rpartition(":")[0].strip("[]")) for endpoint in endpoints.split(","))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
