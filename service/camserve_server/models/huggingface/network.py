"""Build a network of transformers from its settings, with the weights in its folder or random ones."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from camserve_server.core.errors import ConfigError
from camserve_server.models import checkpoint
from camserve_server.models.huggingface.folder import one_line
from camserve_server.models.spec import ModelSpec

MISSING = 'models of Hugging Face need `pip install "camserve[hf]"`'

MOST_MISSING = 10_000_000
"""The numbers that a network may have beyond those in its weights; which ones are missing is reported by name."""

MAX_MODULES = 50_000
"""The largest number of modules of a network: numbers of layers may multiply. Large networks have some thousands."""

_GENERIC = re.compile(r"LABEL_\d+")  # transformers' names for classes without a label


def import_transformers() -> Any:
    """Import transformers, without its log messages.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers  # noqa: PLC0415 -- an optional dependency, and seconds to import
    except ModuleNotFoundError as error:
        raise ConfigError(MISSING) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def offline() -> Iterator[None]:
    """Make every download from the Hub fail inside the block.

    Some settings name a backbone, which transformers would look for on the Hub when it reads them.
    """
    from huggingface_hub import constants  # noqa: PLC0415 -- as above

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def read_settings(transformers: Any, folder: Path, origin: str) -> Any:
    """Return the settings of a folder's model, as transformers' own class for them.

    Raises:
        ConfigError: this version of transformers cannot read them.
    """
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{origin}: transformers {transformers.__version__} cannot read its config.json: {one_line(error)}"
        ) from error


def _options(kind: Any, config: Any) -> dict[str, Any]:
    # Set explicitly, because config.json may name an attention kernel that would be fetched, or another precision.
    backbone = import_transformers().MODEL_FOR_BACKBONE_MAPPING.get(
        type(getattr(config, "backbone_config", None)), kind
    )
    fused = all(part._supports_sdpa for part in (kind, backbone))  # noqa: SLF001 -- transformers has no public name for it
    return {"attn_implementation": "sdpa" if fused else "eager", "dtype": torch.float32}


def build_random(kind: Any, config: Any, spec: ModelSpec) -> nn.Module:
    """Build a network with random weights.

    Args:
        kind: its class in transformers.
        config: its settings.
        spec: its spec, with the side of its input if that is not the one in the settings.

    Raises:
        ConfigError: the settings do not describe a network.
    """
    if spec.size is not None and isinstance(getattr(config, "image_size", None), int):
        config.image_size = spec.size
    return _build(kind, config, spec)


def _build(kind: Any, config: Any, spec: ModelSpec) -> nn.Module:
    try:
        with _few_modules():
            return cast("nn.Module", kind._from_config(config, **_options(kind, config)))  # noqa: SLF001 -- AutoModel calls the same
    except Exception as error:  # settings of unknown origin may be wrong in any way
        raise ConfigError(f"{spec.origin} cannot be built from its config.json: {one_line(error)}") from error


@contextmanager
def _few_modules() -> Iterator[None]:
    """Raise an error inside the block when more modules than MAX_MODULES become parts of others."""
    numbers = itertools.count(1)

    def count(*_: Any) -> None:
        if next(numbers) > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES:,} modules")

    with register_module_module_registration_hook(count):
        yield


def check_weights(kind: Any, config: Any, files: Sequence[Path], spec: ModelSpec) -> None:
    """Check that a network is no larger than its weights, before memory is allocated for it.

    Args:
        kind: its class in transformers.
        config: its settings.
        files: the files of its weights.
        spec: its spec.

    Raises:
        ConfigError: the settings describe no network, or one with far more numbers than the files have.
    """
    with torch.device("meta"):  # tensors without memory
        network = _build(kind, config, spec)
    expected = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    limit = checkpoint.SizeBudget.of(network).metadata_bytes
    try:
        saved = sum(_numbers_in(file, limit) for file in files)
    except Exception as error:
        raise ConfigError(f"the weights of {spec.origin} cannot be read: {one_line(error)}") from error
    if expected > 2 * saved + MOST_MISSING:
        raise ConfigError(
            f"{spec.origin}: its config.json describes a network of {expected:,} numbers, and its weights have "
            f"{saved:,}"
        )


def _numbers_in(file: Path, limit: int) -> int:
    """Return the number of numbers in a file of weights, from its header, which has at most this many bytes."""
    with checkpoint.open_regular(file) as stream:
        checkpoint.refuse_lfs_pointer(stream, file)
        checkpoint.check_header(stream.read(8), limit)
    with safetensors.safe_open(file, "pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 -- no mapping


def build_with_weights(kind: Any, config: Any, files: Sequence[Path], spec: ModelSpec, role: str) -> nn.Module:
    """Build a network with the weights in files.

    Args:
        kind: its class in transformers.
        config: its settings.
        files: the files of its weights.
        spec: its spec.
        role: a noun for what the network is, for errors.

    Raises:
        ConfigError: the files cannot be read, or lack weights.
    """
    try:
        # Without the folder: transformers would choose the files in it, in some cases a pickle.
        module, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: tensor for path in files for name, tensor in safetensors.torch.load_file(path).items()},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported in the loading info, and refused below
            **_options(kind, config),
        )
    except Exception as error:
        raise ConfigError(f"the weights of {spec.origin} cannot be read: {one_line(error)}") from error
    missing = sorted(loading["missing_keys"]) + sorted(str(key[0]) for key in loading["mismatched_keys"])
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")  # noqa: PLR2004 -- names that fit a message
        raise ConfigError(f"the weights of {spec.origin} lack {names}: is it a trained {role}?")
    return cast("nn.Module", module)


def labels_of(config: Any) -> tuple[str, ...]:
    """Return the labels of the classes; none if all of them are transformers' placeholders."""
    names = config.id2label or {}
    labels = tuple(str(names.get(index, "")) for index in range(len(names)))
    return () if all(_GENERIC.fullmatch(label) or not label for label in labels) else labels
