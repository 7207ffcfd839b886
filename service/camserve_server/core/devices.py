"""Devices that models run on. All differences between CPUs and GPUs are in this module; no other one uses CUDA.

`cpu` and `cuda` are supported. `mps` and `xpu` work as far as `torch.accelerator` supports them; they are not tested.
"""

import ctypes
import functools
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

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Names of torch's dtypes that a model may compute in."""


NO_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",  # cuBLAS and cuSOLVER
    "ALLOCATION_FAILED",  # cuDNN 9
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for a thread's handle
    "unable to find an engine to execute this computation",  # cuDNN: no algorithm that torch tried got memory
)
"""Parts of the messages of cuBLAS, cuDNN and cuSOLVER when they run out of memory.

They allocate memory themselves, so torch raises a plain RuntimeError instead of its `OutOfMemoryError`.
"""


class MemoryUse(NamedTuple):
    """Memory of a device, in bytes.

    Attributes:
        allocated: device memory in tensors.
        reserved: device memory that torch has reserved for present and later tensors.
        total: device memory in total.
        pinned: page-locked memory of the host, allocated by `host_buffer`.
    """

    allocated: int
    reserved: int
    total: int
    pinned: int = 0


class Device:
    """A CPU, and the base class of all other devices.

    Args:
        name: torch's name of the device, with an index where there may be several: "cpu", "cuda:0".

    Attributes:
        kind: torch's name of the device type.
        name: the given name.
        torch: the device as a `torch.device`.
        is_cpu: True if it computes in the memory of the process.
        has_float64: True if it supports float64.
        has_streams: True if two threads can compute on it at the same time, each in its own stream.
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
        """Return the number of such devices. This may start the driver, which may take minutes."""
        return 1

    @classmethod
    def why_none(cls) -> str:
        """Return the reason why torch sees no such device, for the operator; an empty string if it is unknown."""
        return ""

    def fault(self) -> str:
        """Return the reason why the device cannot be used although torch sees it; an empty string if it can be used."""
        return ""

    def initialize(self) -> None:
        """Prepare the device for this process, and make it current in this thread. This may start the driver (minutes).

        Raises:
            RuntimeError: the device does not compute.
        """
        _start_cuda()  # on a CPU too: otherwise torch starts the driver in the first backward pass

    def make_current(self) -> None:
        """Make this device the default of the calling thread."""

    def context(self, *, own_stream: bool) -> AbstractContextManager[object]:
        """Return a reusable context in which torch computes on this device.

        Args:
            own_stream: True for a stream of its own, so that two threads do not wait for each other's work.
        """
        del own_stream
        return nullcontext()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised host memory from which `upload` copies without blocking."""
        return torch.empty(shape, dtype=dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device. From a `host_buffer`, the call returns before the copy is done."""
        return tensor

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return numbers as a tensor on this device, without waiting for the copy."""
        return self.copied(torch.tensor(values, dtype=dtype))

    def copied(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device, without waiting for the copy."""
        return tensor

    def randn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard normal numbers, float32, drawn on the host so that every device gets the same ones."""
        return self.upload(torch.randn(shape, generator=generator, out=self.host_buffer(shape, torch.float32)))

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""

    def measure(self, function: Callable[[], object]) -> float:
        """Return the seconds from the call of a function until the device has finished all of its work."""
        self.synchronize()
        began = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - began

    def check(self) -> None:
        """Check that the device still computes: after some errors a process can no longer use its GPU.

        Raises:
            RuntimeError: it does not compute any more.
        """

    def memory(self) -> MemoryUse | None:
        """Return the use of device memory without synchronizing; None for a CPU or before `initialize`."""
        return None

    def free_memory(self) -> int:
        """Return the bytes of device memory that this process can still allocate; 0 for a CPU or if unknown."""
        return 0

    def peak_of(self, work: Callable[[], object]) -> int:
        """Run a function and return the peak growth of device memory in tensors, in bytes; 0 for a CPU or if unknown.

        The work of other threads on the device at the same time is included.
        """
        work()
        return 0

    def release_memory(self) -> None:
        """Return memory that torch has reserved but does not use to the device."""

    def precisions(self) -> tuple[Precision, ...]:
        """Return the dtypes besides float32 for which the device has native multiply instructions."""
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        return ("bfloat16",) if any(capabilities.get(name) for name in _BFLOAT16) else ()

    @staticmethod
    def is_out_of_memory(error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        return isinstance(error, torch.OutOfMemoryError)


# torch's names of the processor features for bfloat16.
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16", "arm_bf16", "sve_bf16")


class Accelerator(Device):
    """A device that `torch.accelerator` supports, with memory of its own or shared with the host."""

    is_cpu = False

    @classmethod
    def count(cls) -> int:
        """Return the number of such devices; see `Device.count`."""
        current = torch.accelerator.current_accelerator()
        return torch.accelerator.device_count() if current and current.type == cls.kind else 0

    def initialize(self) -> None:
        """Prepare the device for this process, and make it current in this thread; see `Device.initialize`."""
        super().initialize()
        self.make_current()
        torch.zeros(1, device=self.torch)
        self.synchronize()

    def make_current(self) -> None:
        """Make this device the default of the calling thread."""
        torch.accelerator.set_device_index(self.torch.index or 0)

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""
        torch.accelerator.synchronize(self.torch)

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device. From a `host_buffer`, the call returns before the copy is done."""
        return tensor.to(self.torch, non_blocking=True)

    def copied(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device, without waiting for the copy."""
        return self.upload(self.host_buffer(tuple(tensor.shape), tensor.dtype).copy_(tensor))

    def check(self) -> None:
        """Check that the device still computes; see `Device.check`."""
        self.synchronize()

    def release_memory(self) -> None:
        """Return memory that torch has reserved but does not use to the device."""
        torch.accelerator.empty_cache()

    def precisions(self) -> tuple[Precision, ...]:
        """Return the dtypes besides float32 for which the device has native multiply instructions."""
        return ("bfloat16", "float16")

    @staticmethod
    def is_out_of_memory(error: BaseException) -> bool:
        """Return True if an error means that the device is out of memory."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


class Cuda(Accelerator):
    """A GPU by NVIDIA, or by AMD, which torch gives the same name."""

    kind = "cuda"
    has_streams = True

    @classmethod
    def count(cls) -> int:
        """Return the number of such devices; see `Device.count`."""
        _start_cuda()
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @classmethod
    def why_none(cls) -> str:
        """Return the reason why torch sees no such device; see `Device.why_none`."""
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return f"torch {torch.__version__} is built for CPUs only; install a build for CUDA"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = "" if visible is None else f'; CUDA_VISIBLE_DEVICES is "{visible}"'
            return f"{str(error).rstrip('.')} (torch {torch.__version__}, built for CUDA {torch.version.cuda}{hint})"
        return ""

    def fault(self) -> str:
        """Return the reason why the GPU cannot be used; see `Device.fault`."""
        archs = torch.cuda.get_arch_list()
        supported = [int(match[1]) for arch in archs if (match := re.match(r"[a-z]+_(\d+)", arch))]
        lowest, (major, minor) = min(supported, default=0), torch.cuda.get_device_capability(self.torch)
        if 10 * major + minor >= lowest:
            return ""
        capability = f"it has compute capability {major}.{minor}, and torch {torch.__version__} is built for"
        return f"{capability} {lowest // 10}.{lowest % 10} or more; install a build for CUDA that supports it"

    def context(self, *, own_stream: bool) -> AbstractContextManager[object]:
        """Return a context in which torch computes on this device; see `Device.context`."""
        if not own_stream:
            return torch.cuda.device(self.torch)
        stream = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]  # torch does not declare it
        stream.wait_stream(torch.cuda.default_stream(self.torch))  # the models were loaded in it
        return torch.cuda.stream(stream)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return page-locked host memory: a GPU copies from no other memory while the calling thread goes on."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def memory(self) -> MemoryUse | None:
        """Return the use of device memory; see `Device.memory`."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        total = torch.cuda.get_device_properties(self.torch).total_memory
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        return MemoryUse(torch.cuda.memory_allocated(self.torch), torch.cuda.memory_reserved(self.torch), total, pinned)

    def free_memory(self) -> int:
        """Return the bytes of device memory that this process can still allocate; see `Device.free_memory`."""
        free, _ = torch.cuda.mem_get_info(self.torch)  # free for all processes; torch's cache is not in it
        return free + torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)

    def peak_of(self, work: Callable[[], object]) -> int:
        """Run a function and return the peak growth of device memory in tensors; see `Device.peak_of`."""
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        work()
        return torch.cuda.max_memory_allocated(self.torch) - before

    def precisions(self) -> tuple[Precision, ...]:
        """Return the dtypes besides float32 for which the device has native multiply instructions."""
        # Not `torch.cuda.is_bf16_supported`: it checks the current GPU, which may be another one.
        native = bool(torch.version.hip) or torch.cuda.get_device_capability(self.torch) >= (8, 0)
        return ("bfloat16", "float16") if native else ("float16",)


@functools.cache
def _start_cuda() -> None:
    """Start NVIDIA's driver without blocking other Python threads. It takes seconds, on some machines minutes.

    torch would start the driver at its first use, and hold Python's global lock meanwhile. ctypes releases it. No GPU
    memory is allocated.
    """
    if torch.version.cuda:
        with suppress(OSError):  # no driver is installed
            ctypes.CDLL("libcuda.so.1").cuInit(0)  # torch reports any error later


class Xpu(Accelerator):
    """A GPU by Intel."""

    kind = "xpu"


class Mps(Accelerator):
    """A GPU by Apple."""

    kind = "mps"
    has_float64 = False


KINDS: dict[str, type[Device]] = {device.kind: device for device in (Device, Cuda, Xpu, Mps)}
"""Device classes by torch's name of the device type."""


@functools.lru_cache(64)
def device_for(device: str | torch.device) -> Device:
    """Return the device with a name, or of a `torch.device`."""
    name = str(device)
    return KINDS[name.partition(":")[0]](name)


def fetch_arrays(tensors: Sequence[Tensor]) -> list[Map]:
    """Return tensors as float32 arrays, with one copy: this thread waits for the device once, not once per tensor."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [to_numpy(tensor) for tensor in tensors]
    flat = to_numpy(torch.cat([tensor.detach().flatten().float() for tensor in tensors]))
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    return [part.reshape(tensor.shape) for part, tensor in zip(np.split(flat, ends), tensors, strict=True)]


def to_numpy(tensor: Tensor) -> Map:
    """Return a tensor as a float32 array."""
    return cast("Map", tensor.detach().float().cpu().numpy())


def restore_settings() -> None:
    """Reset torch's global settings, which a user's module may have changed, and one of torch's defaults.

    Float32 gets its full precision: by default, a GPU rounds to the 10-bit mantissa of TF32 in convolutions. Where
    torch has an old and a new name for a setting, the old one is set, since torch's compiler reads it.

    cuDNN chooses its algorithms by heuristics. Benchmarking them would delay every batch of a new size by seconds, and
    would choose different ones in each process.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]  # torch does not declare it
    torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # the same
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
