"""The devices that models run on. Whatever differs between a CPU and a GPU is here, and nothing else names CUDA.

`cpu` and `cuda` are supported. `mps` and `xpu` work as far as `torch.accelerator` supports them; they are not tested.
"""

import ctypes
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import ClassVar, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from camserve_server.core.arrays import Map
from camserve_server.core.errors import ConfigError
from camserve_server.core.hardware import has_nvidia_gpu

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Names of torch's dtypes that a model may compute in."""

log = logging.getLogger(__name__)

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
        kind: the name that torch has for its type.
        name: as it was given.
        torch: the same, as torch's own type.
        is_cpu: whether it computes in the memory of the process.
        has_float64: whether it has numbers of 64 bits.
        has_streams: whether two threads can compute on it at once, each with all of it, in streams of their own.
    """

    kind: ClassVar[str] = "cpu"
    is_cpu = True
    has_float64 = True
    has_streams = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch = torch.device(name)

    @classmethod
    def count(cls) -> int:
        """Return how many there are; this may start the driver, which may take minutes."""
        return 1

    @classmethod
    def why_none(cls) -> str:
        """Return why torch sees none, in words for the operator; nothing if there is no more to say."""
        return ""

    def fault(self) -> str:
        """Return why it cannot be used although torch sees it, in words for the operator; nothing if it can."""
        return ""

    def initialize(self) -> None:
        """Make it ready to compute in this process, and current in this thread; starting the driver may take minutes.

        Raises:
            RuntimeError: it does not compute.
        """
        _start_cuda()  # on a CPU too: else torch does so in the first backward pass

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

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return some numbers as a tensor on this device, without waiting for it."""
        return self.copied(torch.tensor(values, dtype=dtype))

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host's on this device, without waiting for it."""
        return tensor

    def randn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard normal numbers, float32. They are drawn on the host, so that every device draws the same."""
        return self.upload(torch.randn(shape, generator=generator, out=self.host_buffer(shape, torch.float32)))

    def synchronize(self) -> None:
        """Wait until the device has done all that it was asked."""

    def measure(self, function: Callable[[], object]) -> float:
        """Return the seconds from a function's call until the device has done all that the function asked of it."""
        self.synchronize()
        began = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - began

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
        """Return how many there are; see `Device.count`."""
        current = torch.accelerator.current_accelerator()
        return torch.accelerator.device_count() if current and current.type == cls.kind else 0

    def initialize(self) -> None:
        """Make it ready to compute in this process, and current in this thread; see `Device.initialize`."""
        super().initialize()
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

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host's on this device, without waiting for it."""
        return self.upload(self.host_buffer(tuple(tensor.shape), tensor.dtype).copy_(tensor))

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

    kind = "cuda"
    has_streams = True

    @classmethod
    def count(cls) -> int:
        """Return how many there are; see `Device.count`."""
        _start_cuda()
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @classmethod
    def why_none(cls) -> str:
        """Return why torch sees none; see `Device.why_none`."""
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return f"torch {torch.__version__} is built for CPUs only; install a build for CUDA"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            words = "" if hidden is None else f'; CUDA_VISIBLE_DEVICES is "{hidden}"'
            return f"{str(error).rstrip('.')} (torch {torch.__version__}, built for CUDA {torch.version.cuda}{words})"
        return ""

    def fault(self) -> str:
        """Return why it cannot be used; see `Device.fault`."""
        built = [int(found[1]) for one in torch.cuda.get_arch_list() if (found := re.match(r"[a-z]+_(\d+)", one))]
        least, own = min(built, default=0), torch.cuda.get_device_capability(self.torch)
        if 10 * own[0] + own[1] >= least:
            return ""
        words = f"it has compute capability {own[0]}.{own[1]}, and torch {torch.__version__} is built for"
        return f"{words} {least // 10}.{least % 10} or more; install a build for CUDA that has it"

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
        # Of this GPU: `torch.cuda.is_bf16_supported` looks at the current one.
        native = bool(torch.version.hip) or torch.cuda.get_device_capability(self.torch) >= (8, 0)
        return ("bfloat16", "float16") if native else ("float16",)


@functools.cache
def _start_cuda() -> None:
    """Start NVIDIA's driver, and leave Python to other threads meanwhile: it takes seconds, on some machines minutes.

    torch, which would start it at its first use, holds Python's lock until it is done. No memory of a GPU is taken.
    """
    if torch.version.cuda:
        with suppress(OSError):  # there is none
            ctypes.CDLL("libcuda.so.1").cuInit(0)  # torch finds out whether it went well


class Xpu(Accelerator):
    """A GPU of Intel's."""

    kind = "xpu"


class Mps(Accelerator):
    """A GPU of Apple's."""

    kind = "mps"
    has_float64 = False


KINDS: dict[str, type[Device]] = {one.kind: one for one in (Device, Cuda, Xpu, Mps)}
"""Classes of devices, by the names that torch has for their types."""


@functools.lru_cache(64)
def device_of(place: str | torch.device) -> Device:
    """Return a device by its name, or as a tensor names it."""
    name = str(place)
    return KINDS[name.partition(":")[0]](name)


def fetched(tensors: Sequence[Tensor]) -> list[Map]:
    """Return tensors as plain float32 arrays, by one copy: this thread waits for the device once, not for each."""
    if all(one.device.type == "cpu" for one in tensors):
        return [to_numpy(one) for one in tensors]
    flat = to_numpy(torch.cat([one.detach().flatten().float() for one in tensors]))
    ends = np.cumsum([one.numel() for one in tensors])[:-1]
    return [part.reshape(one.shape) for part, one in zip(np.split(flat, ends), tensors, strict=True)]


def to_numpy(tensor: Tensor) -> Map:
    """Return a tensor as a plain float32 array."""
    return cast("Map", tensor.detach().float().cpu().numpy())


def restore_settings() -> None:
    """Undo settings of torch that a user's module may have changed, and one of torch's defaults.

    Float32 has its full precision: by default a GPU rounds to TF32's ten bits in convolutions. That is set by the older
    names, which torch's compiler reads, where there are two. And cuDNN chooses its algorithms by heuristics: timing all
    of them would stop every batch of a new size for seconds, and choose others in each process.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]  # torch does not declare it
    torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # the same
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def devices_named(names: str) -> list[str]:
    """Return the devices that a setting means, one for each engine.

    It may start a driver, which may take minutes: this is not for a thread in which others wait.

    Raises:
        ConfigError: one is not there, or cannot be used.
    """
    if names == "auto":
        return [_automatic()]
    return [device for name in names.split(",") for device in _devices_of(name.strip())]


def _automatic() -> str:
    """Return the first GPU that can be used, or else the CPU; log why, if that is not for want of a GPU."""
    faults = {name: device_of(name).fault() for name in _there("cuda")}
    for name, fault in faults.items():
        if not fault:
            return name
    why = "; ".join(f"{name}: {fault}" for name, fault in faults.items()) or Cuda.why_none()
    if faults or has_nvidia_gpu():
        log.warning("this machine has a GPU that cannot be used: %s. Models run on the CPU instead", why)
    return "cpu"


def _devices_of(name: str) -> list[str]:
    """Return the devices that one name of a setting means."""
    found = re.fullmatch(r"(\w+?)(:(?:0|[1-9]\d*))?", name)
    if not found or found[1] not in KINDS or (found[1] == "cpu" and found[2]):
        here = ", ".join(["cpu", *(one for kind in KINDS if kind != "cpu" for one in _there(kind))])
        words = "name one, several with commas between, cuda for every GPU, or auto"
        raise ConfigError(f'device "{name}": torch sees {here} here; {words}')
    if name == "cpu":
        return [name]
    there = _there(found[1])
    if name not in there if found[2] else not there:
        words = ", ".join(there) or KINDS[found[1]].why_none()
        seen = f"torch sees {len(there)} {found[1].upper()} devices here" + (f": {words}" if words else "")
        raise ConfigError(f'device "{name}": {seen}')
    meant = [name] if found[2] else there
    for one in meant:
        if fault := device_of(one).fault():
            raise ConfigError(f'device "{one}": {fault}')
    return meant


def _there(kind: str) -> list[str]:
    """Return the names of all devices of a kind."""
    return [f"{kind}:{number}" for number in range(KINDS[kind].count())]
