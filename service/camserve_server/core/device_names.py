"""Names of devices in the settings."""

import logging
import re

from camserve_server.core.devices import KINDS, Cuda, device_for
from camserve_server.core.errors import ConfigError
from camserve_server.core.hardware import has_nvidia_gpu

log = logging.getLogger(__name__)


def parse_devices(names: str) -> list[str]:
    """Return the devices that a setting means, one per worker.

    It may start a driver, which may take minutes. Do not call it on the event loop.

    Raises:
        ConfigError: a device does not exist, or cannot be used.
    """
    if names == "auto":
        return [_automatic()]
    return [device for name in names.split(",") for device in _devices_of(name.strip())]


def _automatic() -> str:
    """Return the first usable GPU, or the CPU. Log a warning if the machine has a GPU that cannot be used."""
    faults = {name: device_for(name).fault() for name in _available("cuda")}
    for name, fault in faults.items():
        if not fault:
            return name
    reason = "; ".join(f"{name}: {fault}" for name, fault in faults.items()) or Cuda.why_none()
    if faults or has_nvidia_gpu():
        log.warning("this machine has a GPU that cannot be used: %s. Models run on the CPU instead", reason)
    return "cpu"


def _devices_of(name: str) -> list[str]:
    """Return the devices that one name in the setting means."""
    match = re.fullmatch(r"(\w+?)(:(?:0|[1-9]\d*))?", name)
    if not match or match[1] not in KINDS or (match[1] == "cpu" and match[2]):
        existing = ", ".join(["cpu", *(device for kind in KINDS if kind != "cpu" for device in _available(kind))])
        hint = "name one, several with commas between, cuda for every GPU, or auto"
        raise ConfigError(f'device "{name}": torch sees {existing} here; {hint}')
    if name == "cpu":
        return [name]
    kind, index = match[1], match[2]
    available = _available(kind)
    if name not in available if index else not available:
        details = ", ".join(available) or KINDS[kind].why_none()
        summary = f"torch sees {len(available)} {kind.upper()} devices here" + (f": {details}" if details else "")
        raise ConfigError(f'device "{name}": {summary}')
    devices = [name] if index else available
    for device in devices:
        if fault := device_for(device).fault():
            raise ConfigError(f'device "{device}": {fault}')
    return devices


def _available(kind: str) -> list[str]:
    """Return the names of all devices of a kind."""
    return [f"{kind}:{number}" for number in range(KINDS[kind].count())]
