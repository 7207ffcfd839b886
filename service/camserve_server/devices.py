"""The devices that models run on. Whatever differs between a CPU and a GPU is here, and nothing else names CUDA.

`cpu` and `cuda` are supported. `mps` and `xpu` work as far as `torch.accelerator` supports them.
"""

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from camserve_server.errors import ConfigError
from camserve_server.types import Precision

NO_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",  # cuBLAS and cuSOLVER
    "ALLOCATION_FAILED",  # cuDNN 9
    "CUBLAS_STATUS_NOT_INITIALIZED",  # there is no memory for a thread's handle
    "unable to find an engine to execute this computation",  # cuDNN: none of those that torch tried found memory
)
"""What libraries beneath torch say where it would raise `OutOfMemoryError`: cuBLAS and cuDNN have their own memory."""


class MemoryUse(NamedTuple):
    """Bytes of memory that a device takes.

    Attributes:
        allocated: of its own memory, in tensors.
        reserved: of its own memory, by torch, for these and for later ones.
        total: that it has.
        pinned: of the host's memory, page-locked, for `host_buffer`.
    """

    allocated: int
    reserved: int
    total: int
    pinned: int = 0


class Device:
    """A CPU, and the base of all other devices.

    Args:
        name: as torch has it, with an index if there may be several: "cpu", "cuda:0".

    Attributes:
        name: the same.
        torch: the same, as torch's own type.
        is_cpu: whether it computes in the memory of the process.
        has_float64: whether it has numbers of 64 bits.
        has_streams: whether two threads can compute on it at once, each with all of it, in streams of their own.
    """

    is_cpu = True
    has_float64 = True
    has_streams = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch = torch.device(name)

    @classmethod
    def count(cls) -> int:
        """Return how many there are."""
        return 1

    def initialize(self) -> None:
        """Start the device's driver for this process, which may take seconds."""

    def make_current(self) -> None:
        """Make the calling thread use this device where none is named."""

    def context(self, *, own_stream: bool) -> AbstractContextManager[object]:
        """Return a context, to be entered again and again, in which torch computes on this device.

        Args:
            own_stream: whether it has a stream of its own, so that two threads do not wait for each other's work.
        """
        del own_stream
        return nullcontext()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the host, uninitialised, from which `upload` need not wait."""
        return torch.empty(shape, dtype=dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host's on this device; it returns before the copy is done if it is a `host_buffer`."""
        return tensor

    def synchronize(self) -> None:
        """Wait until the device has done all that it was asked."""

    def check(self) -> None:
        """Check that it still computes: after some errors a process cannot use its GPU any more.

        Raises:
            RuntimeError: it does not.
        """

    def memory(self) -> MemoryUse | None:
        """Return the use of its own memory; None if it has none, or was not initialised. Does not wait for it."""
        return None

    def free_memory(self) -> int:
        """Return how many bytes of its own memory this process can still fill; 0 if it has none, or does not tell."""
        return 0

    def peak_of(self, work: Callable[[], object]) -> int:
        """Do some work, and return how many bytes more of its own memory were in tensors at most; 0 as above.

        What other threads do on it at the same time counts too.
        """
        work()
        return 0

    def release_memory(self) -> None:
        """Return memory that torch has reserved, and does not use, to the device."""

    def precisions(self) -> tuple[Precision, ...]:
        """Return the names of the dtypes, beside float32, in which it has instructions of its own to multiply."""
        can: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        return ("bfloat16",) if any(can.get(name) for name in _BFLOAT16) else ()

    @staticmethod
    def is_out_of_memory(error: BaseException) -> bool:
        """Tell whether an error says that the device has not enough memory."""
        return isinstance(error, torch.OutOfMemoryError)


# As torch names what a processor can do.
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16", "arm_bf16", "sve_bf16")


class Accelerator(Device):
    """A device that has memory of its own, or shares the host's, as `torch.accelerator` has it."""

    is_cpu = False

    @classmethod
    def count(cls) -> int:
        """Return how many there are."""
        return torch.accelerator.device_count()

    def initialize(self) -> None:
        """Start the device's driver for this process, which may take seconds."""
        self.make_current()
        torch.zeros(1, device=self.torch)
        self.synchronize()

    def make_current(self) -> None:
        """Make the calling thread use this device where none is named."""
        torch.accelerator.set_device_index(self.torch.index or 0)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was asked."""
        torch.accelerator.synchronize(self.torch)

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host's on this device; it returns before the copy is done if it is a `host_buffer`."""
        return tensor.to(self.torch, non_blocking=True)

    def check(self) -> None:
        """Check that it still computes; see `Device.check`."""
        self.synchronize()

    def release_memory(self) -> None:
        """Return memory that torch has reserved, and does not use, to the device."""
        torch.accelerator.empty_cache()

    def precisions(self) -> tuple[Precision, ...]:
        """Return the names of the dtypes, beside float32, in which it has instructions of its own to multiply."""
        return ("bfloat16", "float16")

    @staticmethod
    def is_out_of_memory(error: BaseException) -> bool:
        """Tell whether an error says that the device has not enough memory."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


class Cuda(Accelerator):
    """A GPU of NVIDIA's, or of AMD's, which torch calls by the same name."""

    has_streams = True

    @classmethod
    def count(cls) -> int:
        """Return how many there are."""
        return torch.cuda.device_count()

    def context(self, *, own_stream: bool) -> AbstractContextManager[object]:
        """Return a context in which torch computes on this device; see `Device.context`."""
        if not own_stream:
            return torch.cuda.device(self.torch)
        stream = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]  # torch does not declare it
        stream.wait_stream(torch.cuda.default_stream(self.torch))  # in which the models were made
        return torch.cuda.stream(stream)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return page-locked memory of the host: all that a GPU can fetch from while the calling thread goes on."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def memory(self) -> MemoryUse | None:
        """Return the use of its own memory; see `Device.memory`."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        total = torch.cuda.get_device_properties(self.torch).total_memory
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        return MemoryUse(torch.cuda.memory_allocated(self.torch), torch.cuda.memory_reserved(self.torch), total, pinned)

    def free_memory(self) -> int:
        """Return how many bytes of its own memory this process can still fill; see `Device.free_memory`."""
        free, _ = torch.cuda.mem_get_info(self.torch)  # what no process has, this one's cache included
        return free + torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)

    def peak_of(self, work: Callable[[], object]) -> int:
        """Do some work, and return how many bytes more of its own memory were in tensors; see `Device.peak_of`."""
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        work()
        return torch.cuda.max_memory_allocated(self.torch) - before

    def precisions(self) -> tuple[Precision, ...]:
        """Return the names of the dtypes, beside float32, in which it has instructions of its own to multiply."""
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bfloat16", "float16") if native else ("float16",)


class Mps(Accelerator):
    """A GPU of Apple's."""

    has_float64 = False


KINDS: dict[str, type[Device]] = {"cpu": Device, "cuda": Cuda, "xpu": Accelerator, "mps": Mps}
"""Classes of devices, by the names that torch has for their types."""


@functools.lru_cache(64)
def device_of(place: str | torch.device) -> Device:
    """Return a device by its name, or as a tensor names it."""
    name = str(place)
    return KINDS[name.partition(":")[0]](name)


def devices_named(names: str) -> list[str]:
    """Return the devices that a setting means, one for each engine.

    Raises:
        ConfigError: one is not there.
    """
    if names == "auto":
        return ["cuda:0" if torch.cuda.is_available() else "cpu"]
    return [device for name in names.split(",") for device in _devices_of(name.strip())]


def _devices_of(name: str) -> list[str]:
    found = re.fullmatch(r"(\w+?)(:(?:0|[1-9]\d*))?", name)
    if not found or found[1] not in KINDS or (found[1] == "cpu" and found[2]):
        raise ConfigError(f'device "{name}": there are cpu, cuda, cuda:N and auto, or some of them with commas between')
    if name == "cpu":
        return [name]
    there = [f"{found[1]}:{number}" for number in range(_count_of(found[1]))]
    if name not in there if found[2] else not there:
        raise ConfigError(f'device "{name}": torch sees {len(there)} {found[1].upper()} devices here')
    return [name] if found[2] else there


def _count_of(kind: str) -> int:
    """Return how many devices of a kind there are."""
    current = torch.accelerator.current_accelerator()
    return KINDS[kind].count() if kind == "cuda" or (current and current.type == kind) else 0
