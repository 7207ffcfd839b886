"""Recordings: the explanations of a set of photos by one model, in a folder.

A recording has three files. ``recording.json`` describes the model and the options, ``photos.jsonl`` has a line of
JSON for each photo, and ``calibration.json`` has the calibration, if there is one. Lines are only appended, so a
process that is killed loses at most its last line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from camserve._codec.json_messages import InvalidJson
from camserve._codec.stored_options import options_to_plain, read_options
from camserve._core.errors import FailedPrecondition, InvalidArgument
from camserve._core.files import open_regular, read_regular, remove_temporary_files, replacing, write_file
from camserve.diff import lines

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Mapping
    from pathlib import Path
    from typing import BinaryIO, Self

    from camserve._values.models import Model
    from camserve._values.options import ExplainOptions
    from camserve._values.result import Result
    from camserve.diff.lines import RecordedPhoto

HEADER_FILE: Final = "recording.json"
PHOTOS_FILE: Final = "photos.jsonl"
CALIBRATION_FILE: Final = "calibration.json"
FORMAT: Final = "camserve recording 1"
_FORMAT_NAME = "camserve recording "
_SHOWN = 100  # characters of a value in an error
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
_COMPARED = {
    "methods": ("methods", "methods"),
    "layers": ("layers", "layers"),
    "fusion": ("fusion", "fusions"),
    "targets": ("targets", "targets"),
    "top_k": ("topK", "numbers of explained classes"),
}
"""Options in the order of the errors: their names in protobuf's JSON, and in the errors."""


@dataclass(frozen=True, slots=True)
class Header:
    """Description of a recording.

    Attributes:
        model: Name of the model.
        source: Origin of the network, such as "timm:resnet50".
        weights: Kind of weights: "default", "file", or "none" for random weights.
        digest: SHA-256 of its parameters and buffers.
        precision: "float32", "bfloat16" or "float16".
        labels: SHA-256 of its labels.
        classes: The number of classes.
        options: Options of the explanations, in protobuf's JSON.
        baseline: For a candidate, a digest of the baseline whose targets it explains; otherwise empty.
    """

    model: str
    source: str
    weights: str
    digest: str
    precision: str
    labels: str
    classes: int
    options: Mapping[str, Any] = field(repr=False)
    baseline: str = ""

    @staticmethod
    def of(model: Model, options: Mapping[str, Any], baseline: Header | None = None) -> Header:
        """Return the header for the explanations of a model.

        Args:
            model: The model.
            options: The options, as from ``plain_options``.
            baseline: The baseline whose targets are explained; None to explain the model's own.
        """
        labels = hashlib.sha256(json.dumps(model.labels).encode()).hexdigest()
        facts = (model.name, model.source, model.weights, model.digest, model.precision, labels, model.classes)
        return Header(*facts, options, baseline.sha256 if baseline else "")

    @property
    def sha256(self) -> str:
        """SHA-256 of the header."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def check_options(self, options: Mapping[str, Any], chosen: Collection[str] = tuple(_COMPARED)) -> None:
        """Check that options are those of this recording.

        Args:
            options: The options, as from ``plain_options``.
            chosen: Names of the options to check, as in ``ExplainOptions``.

        Raises:
            FailedPrecondition: They differ.
        """
        for option in chosen:
            name, words = _COMPARED[option]
            recorded, other = self.options.get(name), options.get(name)
            if recorded != other:
                raise FailedPrecondition(
                    f"the {words} differ: the baseline has {_brief(recorded)}, not {_brief(other)}"
                )

    def check_classes(self, candidate: Header) -> None:
        """Check that another model has the same classes.

        Raises:
            FailedPrecondition: They differ.
        """
        if (self.classes, self.labels) != (candidate.classes, candidate.labels):
            counts = f"numbers of classes, {self.classes} and {candidate.classes}"
            what = "labels" if self.classes == candidate.classes else counts
            raise FailedPrecondition(f"the models have different {what}")


def options_of(header: Header) -> ExplainOptions:
    """Return the options of a recording, except the targets: each photo has its own.

    Raises:
        InvalidArgument: The recording is damaged.
    """
    try:
        return read_options(header.options)
    except InvalidJson as error:
        raise InvalidArgument(f"the options of the recording are damaged: {error}") from error


def plain_options(options: ExplainOptions) -> dict[str, Any]:
    """Return the options that change a map, as values for JSON.

    Raises:
        InvalidArgument: An option is out of range, or a method or a layer is named twice.
    """
    plain = options_to_plain(options)
    methods: list[dict[str, Any]] = plain.get("methods", [])
    if any("perChannel" in method for method in methods):
        raise InvalidArgument("a diff compares maps of all channels of the input: leave out per_channel")
    named = [(each.get("name", ""), "augmentationSmoothing" in each, "eigenSmoothing" in each) for each in methods]
    layers: list[str] = plain.get("layers", [])
    if len(set(named)) < len(named) or len(set(layers)) < len(layers):
        raise InvalidArgument("a method or a layer is named twice: compare them one at a time")
    return {name: value for name, value in plain.items() if name not in ("model", "rendering", "maxPredictions")}


def _brief(value: object) -> str:
    """Return an option in a few words: methods and layers by their names, if that is all."""
    if value is None:
        return "the default"
    parts = cast("list[object]", value) if isinstance(value, list) else [value]
    names = [part if isinstance(part, str) else _name_alone(part) for part in parts]
    text = ", ".join(names) if all(names) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _name_alone(method: object) -> str:
    """Return the name of a method without parameters and smoothing; otherwise an empty text."""
    fields = cast("dict[str, object]", method) if isinstance(method, dict) else {}
    return str(fields["name"]) if list(fields) == ["name"] else ""


class Recording:
    """Folder with a recording.

    Args:
        folder: The folder. It must have a recording: see ``create`` and ``load``.
        header: Description of the recording.

    Attributes:
        digests: SHA-256 of the file of each recorded photo by name.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.header = header
        self.digests: dict[str, str] = {}
        self._places: dict[str, tuple[int, int, int]] = {}
        """Start, length and number of the line of each photo."""
        self._lines = 0
        self._file: BinaryIO | None = None

    @classmethod
    def create(cls, folder: Path, header: Header) -> Self:
        """Open a recording to append to; start a new one if the folder has none with this header.

        Raises:
            InvalidArgument: The recording is damaged.
            OSError: The folder is a link, or cannot be written.
        """
        for own in (folder.parent, folder):
            refuse_link(own)
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(folder)
        try:
            existing = read_header(folder)
        except InvalidArgument:
            existing = None
        if existing != header:
            for name in (PHOTOS_FILE, CALIBRATION_FILE):
                (folder / name).unlink(missing_ok=True)
            content = {"format": FORMAT, **asdict(header)}
            write_file(folder / HEADER_FILE, json.dumps(content, indent=2, ensure_ascii=False).encode())
        recording = cls(folder, header)
        recording._repair()
        return recording

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open a recording to read it.

        Raises:
            InvalidArgument: The folder has no recording, one of a newer format, or a damaged one.
        """
        recording = cls(folder, read_header(folder))
        path = folder / PHOTOS_FILE
        with _readable(path), suppress(FileNotFoundError), open_regular(path) as file:
            if recording._scan(file) < os.fstat(file.fileno()).st_size:
                raise InvalidArgument(f"{path} ends within a line: record it again")
        return recording

    def append(self, name: str, result: Result) -> None:
        """Add the explanations of a photo."""
        line = lines.encode(name, result)
        if self._file is None:
            self._file = open_regular(self.folder / PHOTOS_FILE, _APPEND, "ab")
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        self._note(line, start)

    def photo(self, name: str) -> RecordedPhoto:
        """Return the explanations of a photo.

        Raises:
            InvalidArgument: The line is damaged.
        """
        start, length, number = self._places[name]
        path = self.folder / PHOTOS_FILE
        with _readable(path), open_regular(path) as file:
            file.seek(start)
            return lines.decode(file.read(length), f"{path}, line {number},")

    def compact(self, names: Iterable[str]) -> None:
        """Keep the lines of these photos only, in this order: no line of another photo, or of an older file.

        Raises:
            OSError: The folder cannot be written.
        """
        path = self.folder / PHOTOS_FILE
        with open_regular(path) as file, replacing(path) as compacted:
            for name in names:
                start, length, _ = self._places[name]
                file.seek(start)
                compacted.write(file.read(length))

    def close(self) -> None:
        """Close the file that lines are appended to."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _note(self, line: bytes, start: int) -> None:
        self._lines += 1
        name, digest = lines.key_of(line, f"{self.folder / PHOTOS_FILE}, line {self._lines},")
        self.digests[name] = digest
        self._places[name] = (start, len(line), self._lines)

    def _scan(self, file: BinaryIO) -> int:
        """Find the line of each photo; return the end of the last complete one."""
        end = 0
        while line := file.readline(lines.MAX_BYTES):
            if not line.endswith(b"\n"):
                break
            self._note(line, end)
            end += len(line)
        return end

    def _repair(self) -> None:
        """Find the line of each photo, and cut off an incomplete last line."""
        path = self.folder / PHOTOS_FILE
        if not path.exists():
            return
        with open_regular(path, _APPEND, "r+b") as file:
            try:
                file.truncate(self._scan(file))
            except InvalidArgument as error:
                raise InvalidArgument(f"{error.message}; delete {self.folder} to start again") from error


def refuse_link(folder: Path) -> None:
    """Raise an ``OSError`` for a link: files would be made, and deleted, where it leads to."""
    if folder.is_symlink():
        raise OSError(errno.EINVAL, "is a link", str(folder))


@contextmanager
def _readable(path: Path) -> Generator[None, None, None]:
    """Raise an InvalidArgument for a file that is there, but cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}") from error


def read_header(folder: Path) -> Header:
    """Read the description of a recording.

    Raises:
        InvalidArgument: The folder has no recording, or one of a newer format.
    """
    path = folder / HEADER_FILE
    try:
        with _readable(path):
            content = json.loads(read_regular(path))
    except FileNotFoundError as error:
        fault = f"it has no {HEADER_FILE}" if folder.is_dir() else "there is no such folder"
        raise InvalidArgument(f"{folder} is not a baseline: {fault}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} is damaged: it is not a JSON object")
    return _decode_header(cast("dict[str, Any]", content), path)


def _decode_header(content: dict[str, Any], path: Path) -> Header:
    form = content.pop("format", None)
    if form != FORMAT:
        if isinstance(form, str) and form.startswith(_FORMAT_NAME):
            advice = f"this client reads {FORMAT!r}: update camserve, or record a new baseline"
            raise InvalidArgument(f"{path} has the format {form[:_SHOWN]!r}; {advice}")
        raise InvalidArgument(f'{path} is not a recording: its "format" is not {FORMAT!r}')
    types = dict.fromkeys(Header.__dataclass_fields__, str) | {"classes": int, "options": dict}
    if content.keys() != types.keys() or any(not isinstance(content[name], kind) for name, kind in types.items()):
        raise InvalidArgument(f"{path} is damaged: its fields are not those of {FORMAT!r}")
    return Header(**content)
