"""Host names that a request over HTTP may be addressed to: the API, the web page and the metrics."""

import ipaddress
from collections.abc import Iterable

from camserve_server.api.exposure import is_local

LOCAL_NAME = "localhost"


class Hosts:
    """Host names that a request may be addressed to.

    With TLS every name is allowed: a browser has checked it against the certificate. Without, the address of the server
    decides. On a loopback address only its own names are allowed. On any other one, IP addresses and names without a
    dot are allowed too, which nobody else can register.

    Args:
        address: address that the server listens on.
        origins: origins whose host names are allowed.
        tls: True if the server uses TLS.
    """

    def __init__(self, address: str, origins: Iterable[str], *, tls: bool) -> None:
        self._tls, self._local = tls, is_local(address)
        self._names = {LOCAL_NAME, *(_name(origin.partition("://")[2]) for origin in origins)}

    def allow(self, host: str) -> bool:
        """Return True if a request may have this header Host."""
        name = _name(host)
        if self._tls or name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return not self._local and bool(name) and "." not in name
        return not self._local or address.is_loopback


def _name(host: str) -> str:
    """Return a host without its port, in lower case."""
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdecimal() else host).lower()
