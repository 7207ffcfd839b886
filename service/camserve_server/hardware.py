"""What this machine has: cores and devices."""

import os
import re
from pathlib import Path

import torch

from camserve_server.errors import ConfigError


def cores() -> int:
    """Return how many cores this process may use: a container's share counts, not the host's."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max" for no limit
        return allowed


def devices_named(names: str) -> list[str]:
    """Return the devices that a setting means, one for each engine.

    Raises:
        ConfigError: one is not there.
    """
    if names == "auto":
        return ["cuda:0" if torch.cuda.is_available() else "cpu"]
    return [device for name in names.split(",") for device in _devices_of(name.strip())]


def _devices_of(name: str) -> list[str]:
    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f'device "{name}": there are cpu, cuda, cuda:N and auto, or some of them with commas between')
    if name != "cpu" and (name not in there if ":" in name else not there):
        raise ConfigError(f'device "{name}": torch sees {len(there)} CUDA devices here')
    return there if name == "cuda" else [name]
