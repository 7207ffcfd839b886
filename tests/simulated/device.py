"""A simulated GPU, "sim:0", for tests on machines without one. It computes on the CPU and behaves as a GPU otherwise.

It uses torch's support for devices that are written in Python. A tensor of the device wraps one of the CPU, and every
operation passes `Simulated.__torch_dispatch__`, which computes it with the wrapped tensors. As on a GPU

- an operation refuses operands of two devices (a CPU scalar may take part);
- autograd runs backward passes in a thread of its own;
- some operations make the host wait: reads, uploads from memory that is not page-locked, results of unknown size.

`RECORD` has every operation in order, with whether the host waited and whether autograd's thread ran it, and counts
the bytes of the device's tensors that are alive. What is not simulated: autocast, fused attention, streams, a limit of
memory, a second device. The backend is registered for the whole process, and is experimental in torch: so these tests
have a pytest process of their own.
"""

import functools
import itertools
import sys
import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from camserve_server.core import devices

NAME = "sim"
aten = torch.ops.aten

TAKES_HOST_INDICES = {
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
}
"""Operations that accept index tensors of the CPU with a tensor of a GPU: they copy these to the GPU first."""

COPIES = {aten.copy_.default, aten._to_copy.default}

READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten.is_nonzero.default, aten._linalg_svd.default, aten._linalg_eigh.default, aten._linalg_check_errors.default),
}
"""Operations for which a GPU must be done: their result, or its size, depends on values."""


@dataclass(frozen=True)
class Event:
    """One operation on the device.

    Attributes:
        name: of the operation, as torch's dispatcher has it.
        waits: whether the host waits for it.
        backward: whether autograd's thread called it.
        line: of the server's code from which it was called, where the host waits for it.
    """

    name: str
    waits: bool
    backward: bool
    line: str = ""


@dataclass
class OperationLog:
    """The operations on the device since the last `clear`, and the tensors in its memory.

    Attributes:
        events: operations in their order.
        main: the thread that is the host's.
        sizes: of the tensors alive, in bytes, by a number for each.
    """

    events: list[Event] = field(default_factory=list)
    main: int = field(default_factory=threading.get_ident)
    sizes: dict[int, int] = field(default_factory=dict)

    def clear(self):
        """Forget the operations; the calling thread becomes the host's."""
        self.events.clear()
        self.main = threading.get_ident()

    def note(self, name, *, waits):
        """Add an operation."""
        backward = threading.get_ident() != self.main
        self.events.append(Event(name, waits, backward, _calling_line() if waits else ""))

    @property
    def waits(self):
        """Operations for which the host waited, in order."""
        return [event for event in self.events if event.waits]

    @property
    def bytes_alive(self):
        """Bytes of all tensors of the device that exist; views count again."""
        return sum(self.sizes.values())


RECORD = OperationLog()
PINNED = set()
"""Addresses of CPU memory that counts as page-locked."""
_NUMBERS = itertools.count()


class Simulated(torch.Tensor):
    """A tensor of the simulated device, which wraps one of the CPU."""

    @staticmethod
    def __new__(cls, plain, device):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=device,
            requires_grad=False,
        )

    def __init__(self, plain, _device):
        self.plain = plain
        number = next(_NUMBERS)
        RECORD.sizes[number] = plain.nbytes
        weakref.finalize(self, RECORD.sizes.pop, number)

    def __repr__(self):
        return f"Simulated({self.plain!r})"

    def tolist(self):
        return self.cpu().tolist()  # torch's own would read the wrapper's memory, of which there is none

    data = property(torch.Tensor.data.__get__, lambda self, other: setattr(self, "plain", other.plain))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        given = []
        _mapped(torch.Tensor, given.append, (args, kwargs))
        home = next(each.device for each in given if isinstance(each, Simulated))
        device = torch.device(kwargs.pop("device", None) or home)
        _check_devices(func, given)
        if func is aten._fused_sdp_choice.default:
            return 0  # the plain way: the fused ones are other functions on every device
        RECORD.note(str(func), waits=_waits(func, given, device))
        plain_args, plain_kwargs = _mapped(Simulated, lambda each: each.plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and func._schema.name.endswith("_"):
            return args[0]
        if device.type == "cpu":
            return result.clone() if func is aten._to_copy.default and result is plain_args[0] else result
        return _mapped(torch.Tensor, lambda each: Simulated(each, device), result)


def _mapped(kind, function, value):
    """Replace each value of a kind in nested lists, tuples and dicts.

    torch's `tree_map_only` does the same for every kind of container, which took two thirds of these tests' time.
    """
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([_mapped(kind, function, each) for each in value])
    if type(value) is dict:
        return {key: _mapped(kind, function, each) for key, each in value.items()}
    return value


def _check_devices(func, given):
    """Refuse operands of two devices, as a GPU does; scalars of the CPU, and some operations' indices, may differ."""
    places = {each.device for each in given if isinstance(each, Simulated) or each.dim()}
    if len(places) > 1 and func not in TAKES_HOST_INDICES | COPIES:
        raise RuntimeError(f"{func}: expected all tensors on one device, found {sorted(map(str, places))}")


def _waits(func, given, device):
    """Return True if the host waits for an operation."""
    from_host = [each for each in given if not isinstance(each, Simulated) and each.dim()]
    if func in READS or (func in COPIES and device.type == "cpu"):
        return True
    if func in COPIES:
        to_host = func is aten.copy_.default and not isinstance(given[0], Simulated)
        return to_host or any(_address(each) not in PINNED for each in from_host)
    masks = func in TAKES_HOST_INDICES and any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
    return bool(from_host) or masks


def _calling_line():
    """Return the line of the server's code that is being executed, as "engine/cam.py:12"."""
    frame = sys._getframe()
    while frame and "camserve_server" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.partition('camserve_server/')[2]}:{frame.f_lineno}" if frame else ""


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


class _Backend(_DummyBackendModule):
    """Queries of torch to a device, besides its operations."""

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.float16, torch.bfloat16]


class Device(devices.Accelerator):
    """The simulated device in the server's interface."""

    @classmethod
    def count(cls):
        return 1

    def make_current(self):
        """Do nothing: there is only one device."""

    def measure(self, _function):
        """Run nothing: both memory layouts of a model are equally fast."""
        return 1.0

    def synchronize(self):
        RECORD.note("synchronize", waits=True)

    def host_buffer(self, shape, dtype):
        buffer = torch.empty(shape, dtype=dtype)
        address = _address(buffer)
        PINNED.add(address)
        weakref.finalize(buffer.untyped_storage(), PINNED.discard, address)
        return buffer

    def release_memory(self):
        """Do nothing: none is reserved."""


@functools.cache
def register():
    """Make torch and the server know the device. Returns the library that has its kernels, which must stay alive."""
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    library = torch.library.Library("aten", "IMPL")

    def empty(size, *, dtype=None, device=None, memory_format=None, **_options):
        return Simulated(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format), device)

    def empty_strided(size, stride, *, dtype=None, device=None, **_options):
        return Simulated(torch.empty_strided(size, stride, dtype=dtype), device)

    def copy_from(source, to, _non_blocking=False):  # torch.tensor(..., device=...) and x[[0, 2]] arrive here
        on_host = not isinstance(source, Simulated)
        RECORD.note("_copy_from", waits=(on_host and _address(source) not in PINNED) or not isinstance(to, Simulated))
        getattr(to, "plain", to).copy_(getattr(source, "plain", source))
        return to

    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    devices.KINDS[NAME] = Device
    return library
