"""Model specs, as written on a command line or in a configuration: `[NAME=]SOURCE:ARCH[?option=value&…]`."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from camserve_server.core.devices import Precision
from camserve_server.core.errors import ConfigError, did_you_mean
from camserve_server.imaging.channels import MAX_CHANNELS
from camserve_server.models.values import Activation, DeclaredTask, Task

EMBEDDED = "efficientnet_lite0"
"""The default model: its ImageNet weights come with `camserve[server]`."""

OPTIONS = (
    "weights",
    "precision",
    "labels",
    "classes",
    "size",
    "sha256",
    "task",
    "output",
    "activation",
    "compile",
    "accelerate",
    "channels",
    "mean",
    "std",
)

_FORM = re.compile(
    r"(?:(?P<name>[\w.-]+)=)?(?:hf:(?P<folder>[^?]+)|(?:(?P<source>[\w.]+):)?(?P<arch>[\w.-]+))(?:\?(?P<options>.*))?"
)
_NAME = re.compile(r"[\w.-]*\w[\w.-]*")
_FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".torchscript", ".ts", ".onnx")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The description of a model to load.

    Attributes:
        name: its name in requests.
        source: "torchvision", "timm", "hf", "embedded", the name of a plugin's source, or the Python module of a
            factory function.
        arch: the model's name in its source, or the factory's name; the last part of the folder for "hf".
        weights: "default", "none", or the path of a .safetensors or .pth file. A factory's module has the weights that
            the factory gave it; "none" declares these as random, and fills weights that are zero with random values.
        precision: the precision of its computations.
        labels: path of a text file with one label per line; empty for the source's own labels.
        classes: the number of classes, if other than the architecture's own; 0 for an embedding instead of classes.
            Not for a factory.
        size: side of its square input in pixels; None for the model's own.
        sha256: the expected hash of the weights file; empty to check nothing.
        task: the task of the model; None to find it out. Exclusive classes, independent classes, numbers and embeddings
            cannot be told apart that way.
        compile: True to compile the part up to the default layer when the model is loaded.
        accelerate: False to run the model exactly as it was loaded (see `models.acceleration`).
        channels: the number of channels of its input; None for the model's own.
        mean: for each channel, or once for all, subtracted from values 0 to 1; empty for the model's own.
        std: likewise the divisor after that.
        folder: the folder of a model that transformers saved; empty for other sources.
        model_folder: the folder in which a caller named the weights file. No link below it is followed when the file
            is opened. Empty if the operator named the file.
        live: a `Source` with a network of this process; None to build the model.
        shared: True if the memory of that network's parameters is shared, False if they are copied.
        output: the key, attribute or index of the output to explain, of a network with several; empty for its own.
        activation: the softmax or sigmoid that the network applies to its logits itself; "none" if its output are
            logits; None to find it out.

    Example:
        >>> from camserve_server import models
        >>> spec = models.parse("birds=timm:resnet50?weights=none&classes=200&precision=bfloat16")
        >>> spec.name, spec.origin, spec.classes, spec.precision
        ('birds', 'timm:resnet50', 200, 'bfloat16')
    """

    name: str
    source: str
    arch: str
    weights: str = "default"
    precision: Precision = "float32"
    labels: str = ""
    classes: int | None = None
    size: int | None = None
    sha256: str = ""
    task: DeclaredTask | None = None
    compile: bool = False
    folder: str = ""
    model_folder: str = ""
    live: Any = field(default=None, repr=False)
    shared: bool = False
    accelerate: bool = True
    output: str = ""
    activation: Activation | None = None
    channels: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.compile and not self.accelerate:
            words = "compile=true and accelerate=false exclude each other: the compiler is part of the acceleration"
            raise ConfigError(f"model {self.name} ({self.origin}): {words}")

    @property
    def origin(self) -> str:
        """The source and the model's name there, such as "timm:resnet50"."""
        return f"{self.source}:{self.arch}"


def parse(text: str) -> ModelSpec:
    """Parse a model spec.

    Raises:
        ConfigError: the form, an option or a value is wrong.

    Example:
        >>> parse("net=timm:resnet50?weights=none").origin
        'timm:resnet50'
    """
    form = _FORM.fullmatch(text)
    if not form or not form["folder"]:
        _refuse_files(text)
    if not form:
        raise ConfigError(f'cannot parse the model "{text}": write [NAME=]SOURCE:ARCH[?option=value]')
    source, arch = _parse_source(form)
    options = _parse_options(text, form["options"] or "")
    classes = _parse_number(text, "classes", options, least=0)
    if classes and options.get("weights", "default") == "default":
        raise ConfigError(f'model "{text}": classes= needs weights=PATH or weights=none; the default has its own')
    return ModelSpec(
        name=form["name"] or arch,
        folder=form["folder"] or "",
        source=source,
        arch=arch,
        weights=options.get("weights", "default"),
        precision=_parse_precision(text, options.get("precision", "float32")),
        labels=options.get("labels", ""),
        classes=classes,
        size=_parse_number(text, "size", options),
        sha256=options.get("sha256", "").lower(),
        task=_parse_task(text, options.get("task"), source, classes),
        output=options.get("output", ""),
        activation=_parse_activation(text, options.get("activation")),
        compile=_parse_bool(text, "compile", options),
        accelerate=_parse_bool(text, "accelerate", options, default="true"),
        channels=_parse_channels(text, options, source),
        mean=_parse_numbers(text, "mean", options),
        std=_parse_numbers(text, "std", options),
    )


def _parse_source(form: re.Match[str]) -> tuple[str, str]:
    """Return the source, and the model's name in it."""
    if form["folder"]:
        arch = Path(form["folder"]).name
        if not _NAME.fullmatch(arch):
            raise ConfigError(f'the folder "{form["folder"]}" gives no name for the model: write NAME=hf:FOLDER')
        return "hf", arch
    source, arch = form["source"] or "embedded", form["arch"]
    if source == "embedded" and arch != EMBEDDED:
        raise ConfigError(f'"{arch}" needs a source: write torchvision:{arch}, timm:{arch} or your.module:{arch}')
    return source, arch


def _refuse_files(text: str) -> None:
    file = text.partition("?")[0].rpartition("=")[2]
    if file.endswith(_FILES) and (":" not in file or "/" in file):
        raise ConfigError(
            f'"{file}" is a file, and a model is named by its network: write SOURCE:ARCH?weights={file}, such as '
            f"timm:resnet50?weights=… or your.module:factory?weights=…; TorchScript and ONNX files hold a program "
            "whose layers cannot be hooked, so use the network that they were made from, and its state_dict()"
        )


def _parse_options(text: str, query: str) -> dict[str, str]:
    # Not decoded like a URL, because a path may contain a "+" or a "%".
    options = {key: value for key, _, value in (part.partition("=") for part in query.split("&") if part)}
    for key in options:
        if key not in OPTIONS:
            hint = did_you_mean(key, OPTIONS)
            raise ConfigError(f'model "{text}" has no option "{key}"{hint}: {", ".join(OPTIONS)}')
    return options


def _parse_precision(text: str, value: str) -> Precision:
    if value not in get_args(Precision):
        raise ConfigError(f'model "{text}": precision must be one of {", ".join(get_args(Precision))}')
    return cast("Precision", value)


def _parse_task(text: str, value: str | None, source: str, classes: int | None) -> DeclaredTask | None:
    names = (*get_args(Task), "binary")
    if value is not None and value not in names:
        raise ConfigError(f'model "{text}": task must be one of {", ".join(names)}{did_you_mean(value, names)}')
    if classes != 0:
        return cast("DeclaredTask | None", value)
    if source != "timm" or value not in (None, "embed"):
        raise ConfigError(f'model "{text}": classes=0 replaces the head by an embedding, for timm models only')
    return "embed"


def _parse_activation(text: str, value: str | None) -> Activation | None:
    if value is not None and value not in get_args(Activation):
        raise ConfigError(f'model "{text}": activation must be one of {", ".join(get_args(Activation))}')
    return cast("Activation | None", value)


def _parse_number(text: str, key: str, options: dict[str, str], least: int = 1) -> int | None:
    value = options.get(key)
    if value is None:
        return None
    if not value.isdecimal() or not least <= int(value) < 100_000:  # noqa: PLR2004 -- far beyond any useful value
        raise ConfigError(f'model "{text}": {key} must be a whole number from {least}, not "{value}"')
    return int(value)


def _parse_channels(text: str, options: dict[str, str], source: str) -> int | None:
    channels = _parse_number(text, "channels", options)
    if channels is not None and channels > MAX_CHANNELS:
        raise ConfigError(f'model "{text}": channels must be a whole number from 1 to {MAX_CHANNELS}, not {channels}')
    if channels is not None and source not in ("torchvision", "timm"):
        raise ConfigError(
            f'model "{text}": channels= is for torchvision and timm; a factory of your own returns a Source with a '
            "Preprocess whose mean and std have a number for each channel"
        )
    return channels


def _parse_numbers(text: str, key: str, options: dict[str, str]) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, options[key].split(","))) if key in options else ()
    except ValueError:
        numbers = (math.nan,)
    if not all(math.isfinite(number) and (key == "mean" or number > 0) for number in numbers):
        kind = "numbers" if key == "mean" else "numbers above 0"
        raise ConfigError(f'model "{text}": {key} must be {kind} with commas between them, not "{options[key]}"')
    return numbers


def _parse_bool(text: str, key: str, options: dict[str, str], default: str = "false") -> bool:
    value = options.get(key, default)
    if value not in ("true", "false"):
        raise ConfigError(f'model "{text}": {key} must be true or false, not "{value}"')
    return value == "true"
