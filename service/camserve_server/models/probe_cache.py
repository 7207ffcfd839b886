"""Cache of probed models: the results of probing, in files below the user's cache folder.

Probing takes half of the time in which the embedded model is loaded, and more with larger models. It always finds the
same for the same network on the same machine. So a file is used only for the same weights, spec, versions, processor,
number of threads and environment, all of which are in its name and in the file.

Only models of camserve, torchvision and timm on a CPU have files: the versions of these packages tell which network it
is. The code of a user's own module may change without notice.

A file is data, not code. It is checked against the model, and is ignored if it is damaged, does not fit or belongs to
another user. Without a folder that can be written to, every model is probed.
"""

import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from camserve_server.core.hardware import processor
from camserve_server.models.independence import Dependence
from camserve_server.models.sources import LIBRARIES
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import LayerInfo, Layout, Task

log = logging.getLogger(__name__)

MAX_BYTES = 2**24  # of a file; that of a network with 2,000 layers has 0.3 MB
MAX_FILES = 100  # in the folder; the oldest ones are removed

VARIABLES = ("TIMM_", "TORCH_", "PYTORCH_", "ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_")
"""Prefixes of environment variables that may change which modules of a network run, or how results are rounded."""


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of probing a model.

    Attributes:
        task: the task.
        classes: the number of classes, or the length of the embedding.
        layers: every module that runs, by name, in the order in which they finish.
        default_layer: the layer that is explained when a request names none; empty without a layer with a grid.
        embedding: the linear layer whose input is the image's embedding; empty without one.
        pyramid: the layers of a detector's scales, the finest first; empty without several.
        object_classes: the number of classes in which a detector scores each object; 0 if it scores only one.
        dependence: what its outputs depend on besides the image.
        differentiable: True if the scores have a gradient at the image.
    """

    task: Task
    classes: int
    layers: dict[str, LayerInfo]
    default_layer: str
    embedding: str
    pyramid: tuple[str, ...]
    object_classes: int = 0
    dependence: Dependence = field(default_factory=Dependence)
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class _File:
    """The contents of a file."""

    key: dict[str, Any]
    probed: Probed


_FILE = TypeAdapter(_File)


def is_cacheable(spec: ModelSpec, device: str) -> bool:
    """Return whether the versions of packages tell which network a spec means, and it runs on a CPU."""
    return spec.live is None and spec.source in ("embedded", *LIBRARIES) and device == "cpu"


def key_of(spec: ModelSpec, size: tuple[int, int], labels: int, digest: str) -> dict[str, Any]:
    """Return everything that the result of probing depends on, as JSON values.

    Args:
        spec: the spec of the model.
        size: height and width of its input.
        labels: the number of its labels.
        digest: the SHA-256 of its weights.
    """
    packages = [name for name in ("torch", *LIBRARIES) if name in sys.modules]
    return {
        "source": spec.origin,
        "task": spec.task,
        "output": spec.output,
        "activation": spec.activation,
        "size": [*size],
        "sized": spec.size,
        "channels": spec.channels,
        "labels": labels,
        "digest": digest,
        "camserve": _own_code(),
        "versions": {name: str(sys.modules[name].__version__) for name in packages},
        "processor": [processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def load(key: Mapping[str, Any], module: nn.Module) -> Probed | None:
    """Return the result of an earlier start; None if there is no valid file with this key for the module."""
    path = _path(key)
    if path is None:
        return None
    try:
        file = _FILE.validate_json(_read(path), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        log.info("a file in the cache is ignored: %s: %s", path, type(error).__name__)
        return None
    return file.probed if file.key == key and _fits(file.probed, module) else None


def store(key: dict[str, Any], probed: Probed) -> None:
    """Keep a result for the next start, if the folder can be written to."""
    path = _path(key)
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(path, _FILE.dump_json(_File(key, probed)))
        for old in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: an environment variable that is no valid text
        log.debug("nothing is cached in %s: %s", path.parent, error)


def _replace(path: Path, data: bytes) -> None:
    """Write a file at once: a server that starts at the same time sees the old file or the new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def folder() -> Path | None:
    """Return the folder of the files: `camserve` in XDG_CACHE_HOME or in ~/.cache; None if there is no home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "camserve" if base.is_absolute() else None


def _path(key: Mapping[str, Any]) -> Path | None:
    where = folder()
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return where / f"{name}.json" if where else None


def _own_code() -> str:
    """Return the SHA-256 of this package's code: it may change without a new version."""
    sha256 = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def _read(path: Path) -> bytes:
    """Read a regular file of this user.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or too large.
    """
    # O_NONBLOCK: do not wait for a writer of a pipe.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # noqa: PTH123 -- with flags
        status = os.fstat(file.fileno())
        own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        if not (own and stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES):
            raise ValueError("it is not a small file of this user")
        return file.read(MAX_BYTES)


def _fits(probed: Probed, module: nn.Module) -> bool:
    """Return whether a result may be one for a module."""
    modules = dict(module.named_modules())
    default = probed.layers.get(probed.default_layer)
    return (
        all(name == layer.name and _layer_fits(layer, modules.get(name)) for name, layer in probed.layers.items())
        and (not probed.default_layer or (default is not None and default.layout is not None))
        and (not probed.embedding or probed.embedding in probed.layers)
        and all(name in probed.layers and probed.layers[name].layout for name in probed.pyramid)
    )


def _layer_fits(layer: LayerInfo, module: nn.Module | None) -> bool:
    if module is None or layer.type != type(module).__name__ or bool(layer.layout) == bool(layer.reason):
        return False
    if layer.parameters != sum(parameter.numel() for parameter in module.parameters()):
        return False
    return layer.calls > 0 and (layer.layout is None or _layout_fits(layer.layout, layer.shape))


def _layout_fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    grid = layout.height, layout.width
    if layout.axes == "tokens":
        return len(shape) == 3 and min(layout.prefix, layout.suffix) >= 0 and shape[1] == layout.tokens  # noqa: PLR2004 -- [B,N,C]
    return len(shape) == 4 and grid == (shape[2:] if layout.axes == "nchw" else shape[1:3])  # noqa: PLR2004 -- [B,C,h,w]
