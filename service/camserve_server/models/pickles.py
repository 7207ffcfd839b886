"""Pickles, read without being run: what torch wrote, as plain values.

A pickle is a program, and `torch.load(weights_only=True)` still runs it, though with few functions to call. That is
enough to take two gigabytes with 60 bytes, and to end the process with tuples nested three million deep (torch 2.14).
Here nothing is called: each function that state dicts need is known by name, and what it would return is described.
What is read grows with the file and with nothing else.
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

# Hyperparameters and the like, which stand beside the weights: read over, never made.
BESIDE = frozenset(
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

_MAX_AXES = 65  # torch has 64


class CorruptFileError(ConfigError):
    """A file that is not what it should be, in words."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Numbers in a row, somewhere in a file.

    Attributes:
        key: by which the file knows them.
        dtype: of each.
        numel: how many.
    """

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: some numbers of a storage.

    Attributes:
        storage: that it looks at.
        offset: of its first number there.
        shape: along each axis.
        stride: numbers from one to the next along each axis.

    Raises:
        CorruptFileError: it would look beyond its storage.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        check_shape((self.offset, *self.shape))
        check_shape(self.stride)
        if len(self.shape) != len(self.stride):
            raise CorruptFileError("a tensor in it has no proper shape")
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if 0 not in self.shape and last >= self.storage.numel:
            raise CorruptFileError("a tensor in it is larger than its numbers are many")


def check_shape(numbers: tuple[Any, ...]) -> None:
    """Check that these can be lengths of axes, before anything is computed of them.

    Raises:
        CorruptFileError: they cannot.
    """
    if len(numbers) > _MAX_AXES or not all(type(number) is int and number >= 0 for number in numbers):
        raise CorruptFileError("a tensor in it has no proper shape")


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class that a pickle names, or what it would return that nobody needs."""

    name: str


@dataclass(slots=True)
class Pickle:
    """What a pickle holds.

    Attributes:
        value: numbers, strings, tuples, lists, dicts, views, and names for all the rest.
        storages: that it speaks of, by their keys.
    """

    value: object = None
    storages: dict[str, Storage] = field(default_factory=dict)


def read(stream: BinaryIO, steps: int) -> Pickle:
    """Read one pickle; the stream is then right behind it.

    Args:
        stream: that holds it.
        steps: that it may take. Each may leave an object, and torch.save writes four to five bytes for one.

    Raises:
        CorruptFileError: it is none, takes more steps, or names what state dicts do not need.
        ValueError, IndexError, TypeError: it is cut short or makes no sense.
    """
    machine = _Machine()
    for opcode, argument, _ in itertools.islice(pickletools.genops(stream), steps):
        if opcode.name == "STOP":
            return Pickle(machine.stack.pop(), machine.storages)
        step = _STEPS.get(opcode.name)
        if step is None:
            raise CorruptFileError(f"pickled with {opcode.name}, which torch.save does not do by default")
        step(machine, argument)
    raise CorruptFileError(f"its description takes more than {steps:,} steps, which are enough for this model")


class _Machine:
    """The stack of a pickle that is being read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def last(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def get(self, key: int) -> None:
        self.stack.append(self.memo[key])

    def extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], dict):
            pairs = zip(items[::2], items[1::2], strict=True)
            # Only what is quickly hashed: tuples that hold one another twice take time that doubles with each.
            self.stack[-1].update((key, value) for key, value in pairs if isinstance(key, str | int))

    def name(self, argument: str) -> None:
        name = argument.replace(" ", ".", 1).replace("torch.cuda.", "torch.", 1).replace("torch.storage.", "torch.", 1)
        if name not in STORAGES and name not in BESIDE and name not in _CALLS and not _is_dtype(name):
            raise CorruptFileError(
                f"it names {shown(name)}, which weights do not need: save the model's state_dict() alone"
            )
        self.stack.append(Name(name))

    def call(self, _: object) -> None:
        function, arguments = self.last(2)
        make = _CALLS.get(function.name)
        self.stack.append(make(arguments) if make else function)

    def storage(self, _: object) -> None:
        reference = self.stack.pop()
        if not _is_reference(reference):
            raise CorruptFileError("it refers to numbers in a way that torch.save has not used for years")
        _kind, dtype, key, _device, numel = reference[:5]
        self.stack.append(self.storages.setdefault(key, Storage(key, STORAGES[dtype.name], numel)))


def _is_reference(value: object) -> bool:
    """Return whether a value is what torch.save writes for a storage.

    That is ("storage", its class, its key, its device, its number of elements), and, before torch 1.6, None. The types
    must be exact: a key of another type would be hashed or converted to text, which may take unlimited time and memory.
    """
    if not isinstance(value, tuple) or len(value) not in {5, 6} or any(part is not None for part in value[5:]):
        return False
    kind, dtype, key, device, numel = value[:5]
    texts = all(isinstance(text, str) for text in (kind, key, device))
    known = isinstance(dtype, Name) and dtype.name in STORAGES
    return texts and kind == "storage" and known and type(numel) is int and numel >= 0


def _is_dtype(name: str) -> bool:
    return isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype)


def shown(text: object, most: int = 80) -> str:
    """Return a file's own word such that it can stand in a line: cut, and without what would move the cursor."""
    text = ascii(text if isinstance(text, str | int) else type(text).__name__).strip("'\"")
    return text if len(text) <= most else text[:most] + "..."


def _view(arguments: tuple[Any, ...]) -> View:
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, Storage):
        raise CorruptFileError("a tensor in it has no numbers")
    if not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise CorruptFileError("a tensor in it has no proper shape")
    return View(storage, offset, shape, stride)


_CALLS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        "collections.OrderedDict": lambda _: {},
        "torch._utils._rebuild_tensor": _view,
        "torch._utils._rebuild_tensor_v2": _view,
        "torch._utils._rebuild_parameter": lambda arguments: arguments[0],
        "torch._utils._rebuild_parameter_with_state": lambda arguments: arguments[0],
    }
)

_Step = Callable[[_Machine, Any], object]


def _push(machine: _Machine, argument: object) -> None:
    machine.stack.append(argument)


def _pushing(make: Callable[[], object]) -> _Step:
    return lambda machine, _: machine.stack.append(make())


def _tuple_of(count: int) -> _Step:
    return lambda machine, _: machine.stack.append(tuple(machine.last(count)))


_STEPS: Mapping[str, _Step] = MappingProxyType(
    {
        "PROTO": lambda _machine, _argument: None,
        "MARK": _Machine.mark,
        "NONE": _pushing(lambda: None),
        "NEWTRUE": _pushing(lambda: True),
        "NEWFALSE": _pushing(lambda: False),
        "EMPTY_TUPLE": _pushing(tuple),
        "EMPTY_LIST": _pushing(list),
        "EMPTY_DICT": _pushing(dict),
        **dict.fromkeys(
            ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING"), _push
        ),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
        "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
        "TUPLE1": _tuple_of(1),
        "TUPLE2": _tuple_of(2),
        "TUPLE3": _tuple_of(3),
        "APPEND": lambda machine, _: machine.extend(machine.last(1)),
        "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
        "SETITEM": lambda machine, _: machine.update(machine.last(2)),
        "SETITEMS": lambda machine, _: machine.update(machine.since_mark()),
        "GLOBAL": _Machine.name,
        "REDUCE": _Machine.call,
        "NEWOBJ": _Machine.call,
        "BUILD": lambda machine, _: machine.last(1),
        "BINPERSID": _Machine.storage,
    }
)


def root(value: object) -> dict[Any, Any]:
    """Take a table of weights out of what training scripts commonly save around it.

    Raises:
        CorruptFileError: there is none.
    """
    for wrapper in ("state_dict", "model_state_dict", "model"):
        inner = value.get(wrapper) if isinstance(value, dict) else None
        value = inner if isinstance(inner, dict) else value
    if not isinstance(value, dict):
        raise CorruptFileError("it holds no table of weights by name")
    return value
