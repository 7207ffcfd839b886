"""Short-lived program that prints the free memory of GPUs, so that a supervisor need not import torch."""

import json
import sys
from typing import NoReturn

from camserve_server.core import logs, process
from camserve_server.core.errors import ConfigError


def run(device: str) -> NoReturn:
    """Print the free bytes of each GPU that a setting means, or the error of the setting, as JSON.

    Args:
        device: the setting.
    """
    process.follow_parent()
    logs.configure("error", "text")
    from camserve_server.core.device_names import parse_devices  # noqa: PLC0415 -- it imports torch
    from camserve_server.core.devices import device_for  # noqa: PLC0415 -- the same

    try:
        devices = [device_for(name) for name in dict.fromkeys(parse_devices(device))]
        found: dict[str, object] = {"free": [each.free_memory() for each in devices if not each.is_cpu]}
    except (ConfigError, RuntimeError) as error:
        found = {"error": str(error)}
    print(json.dumps(found))  # noqa: T201 -- the result
    sys.exit()
