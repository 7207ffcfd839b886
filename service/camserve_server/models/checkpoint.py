"""Read model weights from untrusted files.

A file is opened once. Its description of the tensors is read first and checked against the model. Only then are the
values read into tensors. No code in a file is run, and nothing is written to disk. The size of the model limits the
memory that reading takes.
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

from camserve_server.models.pickles import STORAGES, CorruptFileError, Pickle, Storage, View, printable, read, unwrap

MIB = 2**20
CHUNK = 2**17  # bytes per read; at most the `metadata_bytes` of any model

LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""The first two values in a file that torch before 1.6 wrote."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the small text file that Git has in place of a file in Git LFS."""

SAFETENSORS = frozenset(STORAGES.values()) - {torch.complex64, torch.complex128}
"""Data types that are read from a .safetensors file. load_state_dict would round or truncate others silently."""


class LfsPointerError(CorruptFileError):
    """A file is a Git LFS pointer: the text that Git has in place of the weights."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path.name} is a Git LFS pointer, not the weights: run `git lfs pull`")


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """Largest sizes of a weights file, in bytes.

    Attributes:
        tensor_bytes: the values of all weights.
        metadata_bytes: the description of the weights: a pickle, a JSON header or a table of contents.
        file_bytes: the whole file. A training script may have saved an optimiser's moments and an average with the
            weights.
    """

    tensor_bytes: int
    metadata_bytes: int
    file_bytes: int

    @property
    def opcodes(self) -> int:
        """The largest number of opcodes in a pickle that describes the weights."""
        return self.metadata_bytes // 4

    @classmethod
    def of(cls, module: nn.Module) -> "SizeBudget":
        """Compute the budget of a model: its weights as float64, and 2 KiB of metadata for each.

        The usual amount of metadata is a tenth of that.
        """
        state = module.state_dict()
        tensor_bytes = sum(tensor.numel() * 8 for tensor in state.values()) + MIB
        return cls(tensor_bytes, MIB // 4 + 2048 * len(state), 4 * tensor_bytes + 16 * MIB)


FillStorage = Callable[[Storage, memoryview], None]
"""Reads the values of a storage into memory of the same length."""


def load(path: Path, budget: SizeBudget, sha256: str = "", folder: str = "") -> dict[str, Tensor]:
    """Read a model's weights.

    Args:
        path: the path of a .safetensors file, or of a file that torch.save wrote.
        budget: the size limits for this model.
        sha256: the expected hash in hexadecimal; empty to check nothing. The hashed bytes are the loaded bytes, even
            if the file changes meanwhile. For that the whole file is held in memory.
        folder: the folder that must contain the file, with no link on the way, not even one created meanwhile; empty
            for any folder.

    Returns:
        Tensors by name. The caller checks that they belong to the model.

    Raises:
        CorruptFileError: the file has another format, is damaged, or exceeds the budget.
        LfsPointerError: it is a Git LFS pointer.
    """
    try:
        with open_regular(path, folder) as file:
            refuse_lfs_pointer(file, path)
            return _read(file, budget, sha256, is_safetensors=path.suffix == ".safetensors")
    except CorruptFileError:
        raise
    except Exception as error:  # parsers raise errors of many types for damaged data
        raise CorruptFileError(f"the file is truncated or damaged ({type(error).__name__})") from error


def refuse_lfs_pointer(file: BinaryIO, path: Path) -> None:
    """Check that a file that was just opened is not a Git LFS pointer.

    Raises:
        LfsPointerError: it is one.
    """
    if file.read(len(LFS_POINTER)) == LFS_POINTER:
        raise LfsPointerError(path)
    file.seek(0)


@contextmanager
def open_regular(path: Path, folder: str = "") -> Iterator[BinaryIO]:
    """Open a regular file, and nothing that would block or have side effects when opened.

    Args:
        path: the path.
        folder: the folder that must contain the file, as in `load`.

    Raises:
        CorruptFileError: it is no regular file, or cannot be opened.
    """
    # O_NONBLOCK: do not wait for a writer if a pipe has replaced the file since it was checked.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if folder:
            descriptor = _open_without_links(folder, path.relative_to(folder).parts, flags)
        else:
            _check_regular(path.stat())
            descriptor = os.open(path, flags)
    except OSError as error:
        raise CorruptFileError(f"the file cannot be opened: {error.strerror}") from error
    with open(descriptor, "rb") as file:  # noqa: PTH123 -- a descriptor has no path
        _check_regular(os.fstat(descriptor))
        yield file


def _open_without_links(folder: str, parts: Sequence[str], flags: int) -> int:
    """Open a file below a folder, one path component at a time: no component can be a link, not even a new one."""
    *folders, name = parts
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = child
        _check_regular(os.stat(name, dir_fd=parent, follow_symlinks=False))
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
    finally:
        os.close(parent)


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError("it is not a regular file")


def _read(file: BinaryIO, budget: SizeBudget, sha256: str, *, is_safetensors: bool) -> dict[str, Tensor]:
    # A .safetensors file holds nothing but a model's weights.
    limit = budget.metadata_bytes + budget.tensor_bytes if is_safetensors else budget.file_bytes
    size = file.seek(0, os.SEEK_END)
    if size > limit:
        raise CorruptFileError(f"the file is larger than {limit / MIB:,.0f} MiB, the limit for this model")
    file.seek(0)
    data = file.read(size) if is_safetensors or sha256 else b""
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptFileError("it does not have the given SHA-256")
    if is_safetensors:
        return _read_safetensors(data, budget)
    return _read_tensors(*_read_torch_file(io.BytesIO(data) if sha256 else file, budget), budget)


_Contents = tuple[Mapping[str, View], FillStorage]


def _read_tensors(views: Mapping[str, View], fill: FillStorage, budget: SizeBudget) -> dict[str, Tensor]:
    storages = {view.storage for view in views.values()}
    if sum(storage.nbytes for storage in storages) > budget.tensor_bytes:
        raise CorruptFileError("it holds more values than the model")
    values = {storage: _read_storage(storage, fill) for storage in storages}
    return {
        name: torch.as_strided(values[view.storage], view.shape, view.stride, view.offset)
        for name, view in views.items()
    }


def _read_storage(storage: Storage, fill: FillStorage) -> Tensor:
    tensor = torch.empty(storage.numel, dtype=storage.dtype)
    if storage.numel:
        fill(storage, tensor.view(torch.uint8).numpy().data)
    return tensor


def _read_into(stream: BinaryIO, memory: memoryview) -> None:
    """Fill memory from a stream, in chunks: some streams allocate the whole requested length at once."""
    for start in range(0, len(memory), CHUNK):
        chunk = memory[start : start + CHUNK]
        data = stream.read(len(chunk))
        if len(data) < len(chunk):
            raise CorruptFileError("the file is truncated")
        chunk[:] = data


# --- safetensors: the length of the header, a JSON header, the values ---


def check_header(data: bytes, limit: int) -> None:
    """Check the length of the header of a .safetensors file, which its first 8 bytes say.

    Raises:
        CorruptFileError: it is longer. The library accepts 100 MB, and takes 44 times as much memory for them.
    """
    (length,) = struct.unpack_from("<Q", data)
    if length > limit:
        raise CorruptFileError(f"its header has {length:,} bytes; the limit for this model is {limit:,}")


def _read_safetensors(data: bytes, budget: SizeBudget) -> dict[str, Tensor]:
    """Parse a file with the safetensors library, after a check of the header's length.

    The library checks that each byte belongs to one tensor, and that each tensor is as long as its shape says. It
    reads from memory: `safe_open` maps the file, and truncating a mapped file ends the process with SIGBUS
    (docs/decisions/safetensors.md has the measurements).
    """
    check_header(data, budget.metadata_bytes)
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise CorruptFileError(f"it is not a valid .safetensors file: {printable(str(error), 200)}") from error
    except KeyError as error:  # a data type that the library's torch part does not know
        raise CorruptFileError(f"tensors of type {printable(error.args[0])} are not supported") from error
    for tensor in tensors.values():
        if tensor.dtype not in SAFETENSORS:
            raise CorruptFileError(f"tensors of type {tensor.dtype} are not supported")
    return dict(sorted(tensors.items()))  # the library's order changes from run to run


# --- torch.save: a ZIP archive, or, before torch 1.6, pickles one after the other ---


def _read_torch_file(file: BinaryIO, budget: SizeBudget) -> _Contents:
    magic = file.read(4)
    file.seek(0)
    return (_read_archive if magic == b"PK\3\4" else _read_legacy)(file, budget)


@dataclass(frozen=True, slots=True)
class _LimitedReader:
    """A file with a limit on the length of a single read.

    `zipfile` reads an archive's whole table of contents at once, however long it is.
    """

    file: BinaryIO
    limit: int

    def read(self, length: int = -1) -> bytes:
        data = self.file.read(self.limit + 1) if length < 0 else b"" if length > self.limit else self.file.read(length)
        if max(length, len(data)) > self.limit:
            raise CorruptFileError("its table of contents is longer than the limit for this model")
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def seekable(self) -> bool:
        return True


def _read_archive(file: BinaryIO, budget: SizeBudget) -> _Contents:
    archive = zipfile.ZipFile(_LimitedReader(file, budget.metadata_bytes))
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "constants.pkl" in members:
        raise CorruptFileError("it is a TorchScript archive, which is a program: save the model's state_dict() instead")
    if "data.pkl" not in members:
        raise CorruptFileError("it is a ZIP archive, but torch.save did not write it")
    if "byteorder" in members and _read_member(archive, members["byteorder"], 16) != b"little":
        raise CorruptFileError("it was written on a big-endian machine")

    def fill(storage: Storage, memory: memoryview) -> None:
        info = members[f"data/{storage.key}"]
        if info.file_size != len(memory):
            raise CorruptFileError("the length of a tensor in it differs from its description")
        with _open_member(archive, info) as stream:
            _read_into(stream, memory)

    description = _read_member(archive, members["data.pkl"], budget.metadata_bytes)
    return _views(read(io.BytesIO(description), budget.opcodes)), fill


def _open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CorruptFileError("it uses a compression that torch.save does not use")
    return archive.open(info)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    if info.file_size > limit:
        raise CorruptFileError(f"its description has {info.file_size:,} bytes; the limit for this model is {limit:,}")
    with _open_member(archive, info) as stream:
        data: bytes = stream.read(info.file_size)  # with a length: otherwise all of the data is inflated
        return data


def _read_legacy(file: BinaryIO, budget: SizeBudget) -> _Contents:
    stream = io.BytesIO(file.read(budget.metadata_bytes))
    magic, version, system = (read(stream, budget.opcodes).value for _ in range(3))
    if (magic, version) != (LEGACY_MAGIC, LEGACY_VERSION):
        raise CorruptFileError("torch.save did not write it")
    if not isinstance(system, dict) or not system.get("little_endian"):
        raise CorruptFileError("it was written on a big-endian machine")
    contents, keys = read(stream, budget.opcodes), read(stream, budget.opcodes).value
    offsets = _storage_offsets(keys, contents.storages, stream.tell())

    def fill(storage: Storage, memory: memoryview) -> None:
        file.seek(offsets[storage.key])
        if struct.unpack("<q", file.read(8)) != (storage.numel,):
            raise CorruptFileError("the length of a tensor in it differs from its description")
        _read_into(file, memory)

    return _views(contents), fill


def _storage_offsets(keys: Any, storages: Mapping[str, Storage], start: int) -> dict[str, int]:
    """Return the position of each storage in a file: an element count of 8 bytes, then the values, key by key."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CorruptFileError("the keys of its tensors are not text")
    offsets = {}
    for key in keys:
        offsets[key] = start
        start += 8 + storages[key].nbytes
    return offsets


def _views(pickle: Pickle) -> Mapping[str, View]:
    state = unwrap(pickle.value)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, View):
            raise CorruptFileError(f"{printable(name)} in it is not a plain tensor")
    return state
