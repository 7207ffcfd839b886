"""Threads, batch sizes and memory of the workers, from the settings and the devices."""

from dataclasses import dataclass

from camserve_server.core.config import Settings
from camserve_server.core.devices import device_for
from camserve_server.core.hardware import cores, memory_limit

CPU_BATCH = 8
GPU_BATCH = 64  # as many rows as one request may have under way (`Limits.chunk`)
GPU_SHARE = 0.8  # of a GPU's free memory, for batches; the rest is lost between the blocks of torch's allocator
LIMIT_SHARE = 6  # batches get 1 / LIMIT_SHARE of all memory; the libraries and the model take more than half of it


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """Sizes that all workers of a pool have in common.

    Attributes:
        settings: settings of the server.
        devices: device of each worker, such as "cpu" or "cuda:0".
    """

    settings: Settings
    devices: tuple[str, ...]

    @property
    def any_cpu(self) -> bool:
        """True if a worker computes on a CPU."""
        return any(device_for(name).is_cpu for name in self.devices)

    @property
    def max_rows(self) -> int:
        """Largest number of rows in a batch."""
        return self.settings.max_batch_rows or (CPU_BATCH if self.any_cpu else GPU_BATCH)

    @property
    def threads(self) -> int:
        """Number of threads that each worker computes with."""
        return max(1, (self.settings.threads or cores()) // max(1, self.devices.count("cpu")))

    @property
    def partitioned(self) -> bool:
        """True if a worker can run two batches at once on a CPU; only in its own process it controls its threads."""
        all_cpus = all(device_for(name).is_cpu for name in self.devices)
        return self.settings.isolation == "process" and all_cpus and self.threads > 1

    @property
    def streams(self) -> bool:
        """True if each worker's GPU can receive a second batch while it runs the first."""
        return all(device_for(name).has_streams for name in self.devices)

    @property
    def cpu_batch_bytes(self) -> int:
        """Memory that a batch may take on a CPU, in bytes; 0 on a GPU, which is asked once it has a model."""
        if not self.any_cpu:
            return 0
        budget = min(self.settings.max_batch_mib * 2**20, memory_limit() // (LIMIT_SHARE * self.settings.sharing))
        return budget // (len(self.devices) * (2 if self.partitioned else 1))

    def gpu_batch_bytes(self, free_bytes: list[int | None]) -> int:
        """Return the memory that a batch may take on a GPU, in bytes; 0 if it is unknown.

        The GPU with the least memory for each of its workers decides.

        Args:
            free_bytes: free memory of each worker's GPU; None or 0 if it is unknown.
        """
        processes = self.settings.sharing
        shares = [
            (free or 0) // (processes * self.devices.count(name))
            for free, name in zip(free_bytes, self.devices, strict=False)
        ]
        return int(GPU_SHARE * min(filter(None, shares), default=0)) // (2 if self.streams else 1)
