"""A restricted reader for pickles that torch wrote. It executes nothing.

A pickle is a program. `torch.load(weights_only=True)` still executes it, with a short list of functions that it may
call. In torch 2.14 a pickle of 60 bytes could allocate 1.9 GB that way, and three million nested tuples ended the
process. torch also ignores an archive's checksums: of 300 files with one flipped bit it loaded 101 with other weights.

This reader calls no function. It knows the functions that a state dict needs by name, and records what each would
return. Memory and time grow only with the size of the file. Loading resnet50 with it takes 0.13 s on one thread,
0.10 s with `torch.load`.
"""

import itertools
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from camserve_server.core.errors import ConfigError

STORAGES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        f"torch.{name}Storage": dtype
        for name, dtype in {
            "Double": torch.float64,
            "Float": torch.float32,
            "Half": torch.float16,
            "BFloat16": torch.bfloat16,
            "Long": torch.int64,
            "Int": torch.int32,
            "Short": torch.int16,
            "Char": torch.int8,
            "Byte": torch.uint8,
            "Bool": torch.bool,
            "ComplexFloat": torch.complex64,
            "ComplexDouble": torch.complex128,
            "Untyped": torch.uint8,
        }.items()
    }
)

# Functions and classes of hyperparameters and the like, which checkpoints hold in addition to weights. They are read
# as a `Name` and never called.
IGNORED_NAMES = frozenset(
    {
        "__builtin__.bytearray",
        "__builtin__.complex",
        "__builtin__.set",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "torch.Size",
        "torch.device",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        "torch._utils._rebuild_device_tensor_from_numpy",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_tensor_v3",
        "torch.serialization._get_layout",
    }
)

_MAX_DIMENSIONS = 65  # torch has at most 64; `View` also checks its offset with the shape


class CorruptFileError(ConfigError):
    """A file is damaged, has an unsupported format, or is larger than its model allows."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of values of one type in a file.

    Attributes:
        key: its identifier in the file.
        dtype: the type of the values.
        numel: the number of values.
    """

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """The description of a tensor: a strided view of a storage.

    Attributes:
        storage: the storage that holds its values.
        offset: the index of its first value there.
        shape: the length of each axis.
        stride: the distance between neighbours along each axis, in values.

    Raises:
        CorruptFileError: the view would read beyond its storage.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        check_shape((self.offset, *self.shape))
        check_shape(self.stride)
        if len(self.shape) != len(self.stride):
            raise CorruptFileError("a tensor in it has an invalid shape")
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if 0 not in self.shape and last >= self.storage.numel:
            raise CorruptFileError("a tensor in it is larger than its storage")


def check_shape(numbers: tuple[Any, ...]) -> None:
    """Check that numbers can be lengths of axes, before anything is computed from them.

    Raises:
        CorruptFileError: they cannot.
    """
    if len(numbers) > _MAX_DIMENSIONS or not all(type(number) is int and number >= 0 for number in numbers):
        raise CorruptFileError("a tensor in it has an invalid shape")


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class in a pickle, or an unused value that it would return."""

    name: str


@dataclass(slots=True)
class Pickle:
    """The content of a pickle.

    Attributes:
        value: numbers, strings, tuples, lists, dicts and views; a `Name` for everything else.
        storages: the storages that it refers to, by key.
    """

    value: object = None
    storages: dict[str, Storage] = field(default_factory=dict)


def read(stream: BinaryIO, limit: int) -> Pickle:
    """Read one pickle, and leave the stream at the first byte after it.

    Args:
        stream: the stream that holds the pickle.
        limit: the largest number of opcodes. Each may leave an object in memory. torch.save writes four to five bytes
            per opcode.

    Raises:
        CorruptFileError: it is not a pickle, has more opcodes, or refers to something that state dicts do not need.
        ValueError, IndexError, TypeError: it is truncated or inconsistent.
    """
    machine = _Machine()
    for opcode, argument, _ in itertools.islice(pickletools.genops(stream), limit):
        if opcode.name == "STOP":
            return Pickle(machine.stack.pop(), machine.storages)
        execute = _OPCODES.get(opcode.name)
        if execute is None:
            raise CorruptFileError(
                f"it uses the pickle opcode {opcode.name}, which torch.save does not write by default"
            )
        execute(machine, argument)
    raise CorruptFileError(f"its description takes more than {limit:,} opcodes, the limit for this model")


class _Machine:
    """The stack machine of a pickle, with the few operations that need no function call."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def memoize(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def push_memoized(self, key: int) -> None:
        self.stack.append(self.memo[key])

    def extend_list(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def update_dict(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], dict):
            pairs = zip(items[::2], items[1::2], strict=True)
            # Only keys with a fast hash. Hashing nested tuples, each of which holds the next one twice, takes time
            # that doubles with every level.
            self.stack[-1].update((key, value) for key, value in pairs if isinstance(key, str | int))

    def push_name(self, argument: str) -> None:
        name = argument.replace(" ", ".", 1).replace("torch.cuda.", "torch.", 1).replace("torch.storage.", "torch.", 1)
        if name not in STORAGES and name not in IGNORED_NAMES and name not in _FUNCTIONS and not _is_dtype(name):
            raise CorruptFileError(
                f"it refers to {printable(name)}, which weights do not need: save only the model's state_dict()"
            )
        self.stack.append(Name(name))

    def call(self, _: object) -> None:
        function, arguments = self.pop(2)
        describe = _FUNCTIONS.get(function.name)
        self.stack.append(describe(arguments) if describe else function)

    def push_storage(self, _: object) -> None:
        reference = self.stack.pop()
        if not _is_storage_reference(reference):
            raise CorruptFileError("it refers to storages in a way that torch.save has not used for years")
        _kind, dtype, key, _device, numel = reference[:5]
        self.stack.append(self.storages.setdefault(key, Storage(key, STORAGES[dtype.name], numel)))


def _is_storage_reference(value: object) -> bool:
    """Return whether a value is what torch.save writes for a storage.

    That is ("storage", its class, its key, its device, its number of elements), and, before torch 1.6, None. The types
    must be exact: a key of another type would be hashed or converted to text, which may take unlimited time and memory.
    A file of 426 bytes took all memory of a worker process that way.
    """
    if not isinstance(value, tuple) or len(value) not in {5, 6} or any(part is not None for part in value[5:]):
        return False
    kind, dtype, key, device, numel = value[:5]
    texts = all(isinstance(text, str) for text in (kind, key, device))
    known = isinstance(dtype, Name) and dtype.name in STORAGES
    return texts and kind == "storage" and known and type(numel) is int and numel >= 0


def _is_dtype(name: str) -> bool:
    return isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype)


def printable(value: object, limit: int = 80) -> str:
    """Return text from a file, fit for one line of a log: shortened, without control characters."""
    text = ascii(value if isinstance(value, str | int) else type(value).__name__).strip("'\"")
    return text if len(text) <= limit else text[:limit] + "..."


def _view(arguments: tuple[Any, ...]) -> View:
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, Storage):
        raise CorruptFileError("a tensor in it has no storage")
    if not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise CorruptFileError("a tensor in it has an invalid shape")
    return View(storage, offset, shape, stride)


# By the name of a function that state dicts need: from its arguments to a description of its result.
_FUNCTIONS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        "collections.OrderedDict": lambda _: {},
        "torch._utils._rebuild_tensor": _view,
        "torch._utils._rebuild_tensor_v2": _view,
        "torch._utils._rebuild_parameter": lambda arguments: arguments[0],
        "torch._utils._rebuild_parameter_with_state": lambda arguments: arguments[0],
    }
)

_Opcode = Callable[[_Machine, Any], object]


def _push(machine: _Machine, argument: object) -> None:
    machine.stack.append(argument)


def _push_new(make: Callable[[], object]) -> _Opcode:
    return lambda machine, _: machine.stack.append(make())


def _push_tuple(count: int) -> _Opcode:
    return lambda machine, _: machine.stack.append(tuple(machine.pop(count)))


_OPCODES: Mapping[str, _Opcode] = MappingProxyType(
    {
        "PROTO": lambda _machine, _argument: None,
        "MARK": _Machine.mark,
        "NONE": _push_new(lambda: None),
        "NEWTRUE": _push_new(lambda: True),
        "NEWFALSE": _push_new(lambda: False),
        "EMPTY_TUPLE": _push_new(tuple),
        "EMPTY_LIST": _push_new(list),
        "EMPTY_DICT": _push_new(dict),
        **dict.fromkeys(
            ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING"), _push
        ),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.memoize),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.push_memoized),
        "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
        "TUPLE1": _push_tuple(1),
        "TUPLE2": _push_tuple(2),
        "TUPLE3": _push_tuple(3),
        "APPEND": lambda machine, _: machine.extend_list(machine.pop(1)),
        "APPENDS": lambda machine, _: machine.extend_list(machine.pop_to_mark()),
        "SETITEM": lambda machine, _: machine.update_dict(machine.pop(2)),
        "SETITEMS": lambda machine, _: machine.update_dict(machine.pop_to_mark()),
        "GLOBAL": _Machine.push_name,
        "REDUCE": _Machine.call,
        "NEWOBJ": _Machine.call,
        "BUILD": lambda machine, _: machine.pop(1),
        "BINPERSID": _Machine.push_storage,
    }
)


def unwrap(value: object) -> dict[Any, Any]:
    """Return the state dict in a value, without the dicts that training scripts commonly save around it.

    Raises:
        CorruptFileError: the value holds no state dict.
    """
    for wrapper in ("state_dict", "model_state_dict", "model"):
        inner = value.get(wrapper) if isinstance(value, dict) else None
        value = inner if isinstance(inner, dict) else value
    if not isinstance(value, dict):
        raise CorruptFileError("it holds no state dict: a table of weights by name")
    return value
