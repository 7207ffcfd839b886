"""Weights from files that nobody vouches for.

A file is opened once. What it says that it holds is read first and held against the model; then the numbers are read
into tensors. Nothing in it is run, nothing is written anywhere, and what it costs is bounded by the model's own size.
"""

import hashlib
import io
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from camserve_server.models.pickles import STORAGES, CorruptFileError, Pickle, Storage, View, read, root, shown

MIB = 2**20
PIECE = 2**17  # read at once; no more than any model's room for words

LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""What files begin with that torch wrote before 1.6."""

SAFETENSORS = frozenset(STORAGES.values()) - {torch.complex64, torch.complex128}
"""Kinds of numbers that are read from a .safetensors file. load_state_dict would round or cut others without a word."""


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """What a file of weights may take, in bytes.

    Attributes:
        numbers: of the weights.
        words: that describe them.
        file: as a whole. A training script may have saved an optimiser's moments beside the weights, and an average.
    """

    numbers: int
    words: int
    file: int

    @property
    def steps(self) -> int:
        """In which a pickle may describe them."""
        return self.words // 4

    @classmethod
    def of(cls, module: nn.Module) -> "SizeBudget":
        """Measure a model: its weights as float64, and two kilobytes of words for each, ten times what is usual."""
        state = module.state_dict()
        numbers = sum(tensor.numel() * 8 for tensor in state.values()) + MIB
        return cls(numbers, MIB // 4 + 2048 * len(state), 4 * numbers + 16 * MIB)


Filling = Callable[[Storage, memoryview], None]
"""Reads a storage's numbers into memory of its length."""


def load(path: Path, room: SizeBudget, sha256: str = "", folder: str = "") -> dict[str, Tensor]:
    """Read a model's weights.

    Args:
        path: of a .safetensors file, or of one that torch.save wrote.
        room: that the model has for them.
        sha256: hexadecimal, that the file must have, or nothing. What is hashed is what is loaded, also when somebody
            changes the file meanwhile; for that it is held in memory.
        folder: the folder that the file must be in, with no link on the way, even one made meanwhile; or empty.

    Returns:
        Tensors by name. Whether they are the model's is for the model to say.

    Raises:
        CorruptFileError: it is no such file, is damaged, or holds more than there is room for.
    """
    try:
        with _opened(path, folder) as file:
            return _read(file, room, sha256, safely=path.suffix == ".safetensors")
    except CorruptFileError:
        raise
    except Exception as error:  # what parsers raise when they trip over bytes that make no sense
        raise CorruptFileError(f"the file is cut short or damaged ({type(error).__name__})") from error


@contextmanager
def _opened(path: Path, folder: str) -> Iterator[BinaryIO]:
    """Open a regular file, and nothing that would block or that only opening changes."""
    # O_NONBLOCK: do not wait for a writer if a pipe has replaced the file since it was checked.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if folder:
            descriptor = _opened_inside(folder, path.relative_to(folder).parts, flags)
        else:
            _check_regular(path.stat())
            descriptor = os.open(path, flags)
    except OSError as error:
        raise CorruptFileError(f"the file cannot be opened: {error.strerror}") from error
    with open(descriptor, "rb") as file:  # noqa: PTH123 -- a descriptor has no path
        _check_regular(os.fstat(descriptor))
        yield file


def _opened_inside(folder: str, parts: Sequence[str], flags: int) -> int:
    """Open a file below a folder, one step at a time, so that no part of the path can be a link, even a new one."""
    *folders, name = parts
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        _check_regular(os.stat(name, dir_fd=here, follow_symlinks=False))
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError("it is no regular file")


def _read(file: BinaryIO, room: SizeBudget, sha256: str, *, safely: bool) -> dict[str, Tensor]:
    # A .safetensors file holds nothing beside a model's weights.
    size, most = file.seek(0, os.SEEK_END), room.words + room.numbers if safely else room.file
    if size > most:
        raise CorruptFileError(f"the file is larger than {most / MIB:,.0f} MiB, which is more than this model's can be")
    file.seek(0)
    data = file.read(size) if safely or sha256 else b""
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptFileError("it does not have the SHA-256 that was given")
    if safely:
        return _safetensors(data, room)
    return _tensors(*_torch(io.BytesIO(data) if sha256 else file, room), room)


_Contents = tuple[Mapping[str, View], Filling]


def _tensors(views: Mapping[str, View], fill: Filling, room: SizeBudget) -> dict[str, Tensor]:
    storages = {view.storage for view in views.values()}
    if sum(storage.nbytes for storage in storages) > room.numbers:
        raise CorruptFileError("it holds more numbers than the model")
    numbers = {storage: _filled(storage, fill) for storage in storages}
    return {
        name: torch.as_strided(numbers[view.storage], view.shape, view.stride, view.offset)
        for name, view in views.items()
    }


def _filled(storage: Storage, fill: Filling) -> Tensor:
    tensor = torch.empty(storage.numel, dtype=storage.dtype)
    if storage.numel:
        fill(storage, tensor.view(torch.uint8).numpy().data)
    return tensor


def _read_into(stream: BinaryIO, room: memoryview) -> None:
    """Fill memory from a stream, a piece at a time: some streams make all at once that is asked for."""
    for start in range(0, len(room), PIECE):
        piece = room[start : start + PIECE]
        data = stream.read(len(piece))
        if len(data) < len(piece):
            raise CorruptFileError("the file is cut short")
        piece[:] = data


# --- safetensors: a length, a table in JSON, the numbers ---


def _safetensors(data: bytes, room: SizeBudget) -> dict[str, Tensor]:
    """Read a file with the library, which checks its table: that each byte is one tensor's, as long as its shape says.

    It is read from memory: `safe_open` maps the file, and whoever then cuts it short ends the process with SIGBUS.
    """
    (length,) = struct.unpack_from("<Q", data)
    if length > room.words:  # it takes up to 100 MB, and 44 times as much memory for them
        raise CorruptFileError(f"its header is {length:,} bytes long: {room.words:,} are enough for this model")
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise CorruptFileError(f"it is no sound .safetensors file: {shown(str(error), 200)}") from error
    except KeyError as error:  # of a kind that its torch side has no name for
        raise CorruptFileError(f"numbers of the kind {shown(error.args[0])} are not read") from error
    for tensor in tensors.values():
        if tensor.dtype not in SAFETENSORS:
            raise CorruptFileError(f"numbers of the kind {tensor.dtype} are not read")
    return dict(sorted(tensors.items()))  # the library's order changes from run to run


# --- torch.save: a ZIP archive, or, before torch 1.6, pickles one after the other ---


def _torch(file: BinaryIO, room: SizeBudget) -> _Contents:
    magic = file.read(4)
    file.seek(0)
    return (_zipped if magic == b"PK\3\4" else _legacy)(file, room)


@dataclass(frozen=True, slots=True)
class _Careful:
    """A file of which only little is read at once: an archive's table of contents is read whole, however long."""

    file: BinaryIO
    most: int

    def read(self, length: int = -1) -> bytes:
        data = self.file.read(self.most + 1) if length < 0 else b"" if length > self.most else self.file.read(length)
        if max(length, len(data)) > self.most:
            raise CorruptFileError("its table of contents is longer than this model's can be")
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def seekable(self) -> bool:
        return True


def _zipped(file: BinaryIO, room: SizeBudget) -> _Contents:
    archive = zipfile.ZipFile(_Careful(file, room.words))
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "constants.pkl" in members:
        raise CorruptFileError("it is a TorchScript archive, which is a program: save the model's state_dict() instead")
    if "data.pkl" not in members:
        raise CorruptFileError("it is a ZIP archive, but not one that torch.save wrote")
    if "byteorder" in members and _member(archive, members["byteorder"], 16) != b"little":
        raise CorruptFileError("it was written on a big-endian machine")

    def fill(storage: Storage, into: memoryview) -> None:
        info = members[f"data/{storage.key}"]
        if info.file_size != len(into):
            raise CorruptFileError("a tensor in it is not as long as its description says")
        with _plain(archive, info) as stream:
            _read_into(stream, into)

    return _weights(read(io.BytesIO(_member(archive, members["data.pkl"], room.words)), room.steps)), fill


def _plain(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CorruptFileError("it is packed in a way that torch.save does not pack")
    return archive.open(info)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    if info.file_size > most:
        raise CorruptFileError(f"its description is {info.file_size:,} bytes long: {most:,} are enough for this model")
    with _plain(archive, info) as stream:
        data: bytes = stream.read(info.file_size)  # a length, as else all is inflated that there is
        return data


def _legacy(file: BinaryIO, room: SizeBudget) -> _Contents:
    words = io.BytesIO(file.read(room.words))
    magic, version, system = (read(words, room.steps).value for _ in range(3))
    if (magic, version) != (LEGACY_MAGIC, LEGACY_VERSION):
        raise CorruptFileError("torch.save did not write it")
    if not isinstance(system, dict) or not system.get("little_endian"):
        raise CorruptFileError("it was written on a big-endian machine")
    contents, keys = read(words, room.steps), read(words, room.steps).value
    starts = _starts(keys, contents.storages, words.tell())

    def fill(storage: Storage, into: memoryview) -> None:
        file.seek(starts[storage.key])
        if struct.unpack("<q", file.read(8)) != (storage.numel,):
            raise CorruptFileError("a tensor in it is not as long as its description says")
        _read_into(file, into)

    return _weights(contents), fill


def _starts(keys: Any, storages: Mapping[str, Storage], at: int) -> dict[str, int]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CorruptFileError("its numbers have keys that are not text")
    starts = {}
    for key in keys:
        starts[key] = at
        at += 8 + storages[key].nbytes
    return starts


def _weights(pickle: Pickle) -> Mapping[str, View]:
    table = root(pickle.value)
    for name, value in table.items():
        if not isinstance(name, str) or not isinstance(value, View):
            raise CorruptFileError(f"{shown(name)} in it is no tensor of plain numbers")
    return table
