"""Measure this machine, and choose settings for a server on it.

It may import `app` and the rooms below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from camserve_server.app import server
from camserve_server.app.sharing import Machine, fitting_processes
from camserve_server.core import device_names, devices, hardware
from camserve_server.tuning import bench
from camserve_server.tuning.choice import choose
from camserve_server.tuning.report import HEADINGS, TuningResult, check_writable, toml, write
from camserve_server.tuning.survey import measure


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits that an operator sets.

    Attributes:
        seconds: time limit of the measurements.
        max_batch_seconds: time limit of a batch.
        any_precision: True to allow a faster precision than the model's own.
    """

    seconds: float = 60.0
    max_batch_seconds: float = 1.0
    any_precision: bool = False


def tune(models: Sequence[str], device: str, constraints: Constraints) -> TuningResult:
    """Measure models on this machine and choose threads, the batch size and, if allowed, precisions.

    Args:
        models: models in the format of the command line.
        device: device in the format of the setting.
        constraints: limits of the operator.

    Raises:
        ConfigError: a model cannot be loaded, the device is invalid, or there is too little time.
    """
    specs, cores = server.specs_by_name(models), hardware.cores()
    precisions = {name: spec.precision for name, spec in specs.items()}
    with bench.restore_threads():
        torch.set_num_threads(cores)
        name = device_names.parse_devices(device)[0]  # only the first worker is measured; the others are its equals
        machine = Machine(cores, hardware.memory_limit(), tuple(filter(None, [devices.device_for(name).free_memory()])))
        prepared = bench.prepare(specs, name)
        threads = tuple(dict.fromkeys((cores, max(1, cores // 2), 1))) if name == "cpu" else (cores,)
        similarities = prepared.similarities()
        variants = prepared.variants(threads, precisions)
        survey = measure(variants, prepared.run, constraints.seconds, constraints.max_batch_seconds)
    choice = choose(survey, precisions, constraints.max_batch_seconds, any_precision=constraints.any_precision)
    processes = fitting_processes(machine, len(specs))
    return TuningResult(survey, choice, similarities, dict(zip(specs, models, strict=True)), processes)


__all__ = ["HEADINGS", "Constraints", "TuningResult", "check_writable", "toml", "tune", "write"]
