"""Refusal of settings that let anyone call from other machines."""

import ipaddress
import logging

from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError

log = logging.getLogger(__name__)


def check(settings: Settings) -> None:
    """Refuse settings that let anyone call from other machines.

    Raises:
        ConfigError: the address can be reached from other machines, without TLS or without authentication.
    """
    secure = settings.tls_cert and (settings.tokens_file or settings.tls_client_ca)
    for address in filter(None, (settings.address, settings.metrics_address, settings.http_address)):
        if not (secure or is_local(address)):
            _check_insecure(settings, address)


def _check_insecure(settings: Settings, address: str) -> None:
    if not settings.insecure:
        raise ConfigError(
            f"{address} can be reached from other machines: set tls_cert, tls_key and tokens_file (or "
            "tls_client_ca), or listen on 127.0.0.1. If anyone who reaches the port may call, as when a container's "
            "port is published on 127.0.0.1 only, set --insecure (CAMSERVE_INSECURE=true)"
        )
    if address == settings.metrics_address:
        log.warning("insecure: anyone who reaches the port may read the metrics", extra=logs.fields(address=address))
        return
    admin = ", and load and unload models" if settings.admin else ""
    log.warning("insecure: anyone who reaches the port may call%s", admin, extra=logs.fields(address=address))


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an address: a loopback address or a socket in the file system.

    Example:
        >>> is_local("localhost:1"), is_local("[::1]:1"), is_local("unix:/run/camserve"), is_local("0.0.0.0:1")
        (True, True, True, False)
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name: any other than localhost may resolve to any address
        return host == "localhost"
