"""Measure this machine, and choose how a server computes on it.

It may import `app` and the rooms below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from camserve_server.app import server
from camserve_server.core import devices, hardware
from camserve_server.tuning import bench
from camserve_server.tuning.choice import choose
from camserve_server.tuning.report import HEADINGS, Tuned, check_writable, toml, write
from camserve_server.tuning.survey import surveyed


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an operator allows.

    Attributes:
        seconds: that measuring may take.
        latency: seconds that a batch may take.
        any_precision: whether a faster precision may be chosen in place of the one that a model is in.
    """

    seconds: float = 60.0
    latency: float = 1.0
    any_precision: bool = False


def tune(models: Sequence[str], device: str, wishes: Wishes) -> Tuned:
    """Measure models on this machine and choose threads, batches and, if allowed, precisions.

    Args:
        models: as they are named on a command line.
        device: as in the settings.
        wishes: what is allowed.

    Raises:
        ConfigError: a model cannot be loaded, the device is none, or there is too little time.
    """
    specs, cores = server.specs_by_name(models), hardware.cores()
    usual = {name: spec.precision for name, spec in specs.items()}
    with bench.threads_kept():
        torch.set_num_threads(cores)
        place = devices.devices_named(device)[0]  # one engine is measured; another is its equal
        ready = bench.prepare(specs, place)
        threads = tuple(dict.fromkeys((cores, max(1, cores // 2), 1))) if place == "cpu" else (cores,)
        likeness = ready.likenesses()
        found = surveyed(ready.lines(threads, usual), ready.run, wishes.seconds, wishes.latency)
    choice = choose(found, usual, wishes.latency, any_precision=wishes.any_precision)
    return Tuned(found, choice, likeness, dict(zip(specs, models, strict=True)))


__all__ = ["HEADINGS", "Tuned", "Wishes", "check_writable", "toml", "tune", "write"]
