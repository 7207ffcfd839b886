"""Division of one machine among several server processes: how many there are, and the settings of each."""

import json
import logging
import subprocess
import sys
from dataclasses import dataclass

from camserve_server.core import hardware, logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError
from camserve_server.core.limits import Limits

log = logging.getLogger(__name__)

CPU_CORES = 8
"""Cores for each process whose models run on a CPU. The models take most of them: the process itself needs one core
for 300 requests a second, and few models are so fast on seven cores."""

GPU_CORES = 4
"""Cores for each process whose models run on a GPU. One process decodes and draws on about four cores at most."""

MIB = 2**20
SHARED_MEMORY = 512 * MIB  # bytes that all processes share: the code of the libraries, and the supervisor
PROCESS_MEMORY = 1536 * MIB  # bytes of a busy process and its workers
MODEL_MEMORY = 512 * MIB  # bytes of a process for each model
GPU_PROCESS_MEMORY = 4096 * MIB  # bytes of a GPU for each process: CUDA's context, and batches
GPU_MODEL_MEMORY = 1024 * MIB  # bytes of a GPU for each process and model

PROBE = ("-P", "-c", "import sys; from camserve_server.app import gpu_probe; gpu_probe.run(sys.argv[1])")


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources that the processes divide.

    Attributes:
        cores: number of cores.
        memory: bytes of memory.
        gpu_memory: free bytes of each GPU that models run on; empty if they run on the CPU.
    """

    cores: int
    memory: int
    gpu_memory: tuple[int, ...] = ()


def processes_of(settings: Settings) -> int:
    """Return the number of processes that the settings mean.

    Raises:
        ConfigError: several processes cannot serve these settings, or a device cannot be used.
    """
    if settings.processes != "auto":
        check(settings)
        return settings.processes
    if sys.platform != "linux" or settings.address.startswith("unix:"):
        return 1
    machine = Machine(settings.threads or hardware.cores(), hardware.memory_limit(), _gpu_memory(settings.device))
    count = fitting_processes(machine, len(settings.models))
    log.info("processes chosen", extra=logs.fields(processes=count, cores=machine.cores, gpus=len(machine.gpu_memory)))
    return count


def check(settings: Settings) -> None:
    """Refuse settings that several processes cannot serve.

    Raises:
        ConfigError: there are several processes, and the address is a Unix socket, or the system is not Linux.
    """
    if settings.sharing == 1:
        return
    if sys.platform != "linux":
        raise ConfigError("processes: several processes can share a port on Linux only")
    if settings.address.startswith("unix:"):
        raise ConfigError(f"processes = {settings.processes}: a Unix socket serves one process; listen on HOST:PORT")


def fitting_processes(machine: Machine, models: int) -> int:
    """Return the number of processes for a machine: as many as have enough cores and memory, and at least one.

    Args:
        machine: the resources.
        models: number of models that each process loads.
    """
    by_cores = machine.cores // (GPU_CORES if machine.gpu_memory else CPU_CORES)
    by_memory = (machine.memory - SHARED_MEMORY) // (PROCESS_MEMORY + models * MODEL_MEMORY)
    by_gpu = [free // (GPU_PROCESS_MEMORY + models * GPU_MODEL_MEMORY) for free in machine.gpu_memory]
    return max(1, min([by_cores, by_memory, *by_gpu]))


def share(settings: Settings, count: int, cores: int) -> Settings:
    """Return the settings of each of several processes.

    Totals are divided, and never below the largest request. Limits on a request, a call, a connection or a batch stay.

    Args:
        settings: settings of the whole server.
        count: number of processes.
        cores: number of cores, for settings without a number of threads.
    """
    chunk = min(Limits().chunk, settings.max_queue_rows)  # the largest number of rows that a request has in the queue
    return settings.model_copy(
        update={
            "processes": count,
            "threads": max(1, (settings.threads or cores) // count),
            "max_batch_mib": max(1, settings.max_batch_mib // count),
            "max_queue_rows": max(chunk, settings.max_queue_rows // count),
            "max_connections": -(-settings.max_connections // count),
        }
    )


def _gpu_memory(device: str) -> tuple[int, ...]:
    """Return the free bytes of each GPU that a setting of devices means; empty for the CPU.

    Another process asks torch: importing it takes seconds and hundreds of megabytes, which a supervisor does not spend.

    Raises:
        ConfigError: a device does not exist, or cannot be used.
    """
    if device == "cpu" or (device == "auto" and not hardware.has_nvidia_gpu()):
        return ()
    command = (sys.executable, *PROBE, device)
    probe = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)  # noqa: S603 -- our own program
    if probe.returncode:
        raise ConfigError(f"the devices could not be determined: the probe ended with {probe.returncode}")
    found = json.loads(probe.stdout)
    if "error" in found:
        raise ConfigError(found["error"])
    return tuple(found["free"])
