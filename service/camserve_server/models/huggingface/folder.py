"""Files of a folder that transformers saved: its settings and its weights, without code, pickles or downloads."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from camserve_server.core.errors import ConfigError
from camserve_server.models.checkpoint import open_regular
from camserve_server.models.pickles import CorruptFileError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
INDEX = ".index.json"
PROCESSOR = "preprocessor_config.json"
PROCESSORS = (PROCESSOR, "processor_config.json")
"""Files with the settings of an image processor; the second also has those of a tokenizer."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""Files of a tokenizer, which only `tokenizer.py` reads, with limits of their own."""

MAX_LAYERS = 1000
"""The largest number of layers, blocks or stages in the settings of a network, in all items of a list together."""

MAX_CLASSES = 250_000
"""The largest number of classes; transformers makes a name for each as it reads the settings. ImageNet has 21,841."""

MAX_SIDES = 8192
"""The largest sum of the sides of an image or a window."""

MAX_SETTINGS = 16 * 2**20
"""The largest number of bytes of a file of settings; those of a network with 21,000 labels have 2 million."""

_LIMITS = (
    (re.compile("(layers|depths?|blocks|levels|stages|repeats)$"), MAX_LAYERS),
    (re.compile("(labels|classes)$"), MAX_CLASSES),
    (re.compile("(image|window|kernel|grid)_sizes?$"), MAX_SIDES),
)
"""Keys of whole numbers for which Python runs a loop as the network is built, and the largest of them."""

# A file in the folder itself, in the only format without code.
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)
_TIMM_NAME = re.compile(r"[\w.-]*")  # a network in timm itself; "hf-hub:OWNER/NAME" would be one from the Hub
_TIMM_ARGUMENTS = (
    "act_layer", "class_token", "depth", "depths", "drop_path_rate", "drop_rate", "dynamic_img_pad", "dynamic_img_size",
    "embed_dim", "fc_norm", "global_pool", "img_size", "init_values", "mlp_ratio", "norm_layer", "num_heads",
    "patch_size", "pos_embed", "pre_norm", "qkv_bias", "reg_tokens", "strict_img_size", "window_size",
)  # fmt: skip
"""Arguments of timm's networks that a folder may set: they describe the architecture, and none names a file."""


def _check_settings(folder: Path) -> None:
    """Check, before anything reads them, that the settings in a folder are files of ordinary size.

    Raises:
        ConfigError: one is no file, such as a link to a device, which may have no end; or it is empty or too large.
    """
    for path in sorted(folder.glob("*.json")):
        if path.name in TOKENIZER:
            continue
        if not path.is_file():
            raise ConfigError(f"{folder.name}: its {path.name} is not a file")
        size = path.stat().st_size
        if not 0 < size <= MAX_SETTINGS:
            raise ConfigError(f"{folder.name}: its {path.name} has {size:,} bytes; 1 to {MAX_SETTINGS:,} are accepted")


def read_file(path: Path, limit: int, origin: str) -> bytes:
    """Read a file of a folder, which is opened once, so that it cannot become another one after a check.

    Args:
        path: the path.
        limit: the largest number of bytes.
        origin: the name of the model, for errors.

    Raises:
        ConfigError: it is no regular file, cannot be read, or is larger.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except (CorruptFileError, OSError) as error:
        raise ConfigError(f"{origin}: its {path.name} cannot be read: {one_line(error)}") from error
    if len(data) > limit:
        raise ConfigError(f"{origin}: its {path.name} has more than {limit:,} bytes, which is the limit")
    return data


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; refuse models that need code from the folder or a download.

    Raises:
        ConfigError: the folder does not exist or has no valid config.json, or its model is refused.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}: nothing is fetched from the Hub here; fetch it with "
            f"`hf download OWNER/NAME --local-dir {folder}`, or save it there with save_pretrained"
        )
    _check_settings(folder)
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{folder.name} has no readable config.json: save it with save_pretrained")
    try:
        config = json.loads(read_file(path, MAX_SETTINGS, folder.name).decode())
        entries = list(_entries(config))
        check_numbers(entries, folder.name)
    except (ValueError, RecursionError) as error:  # or nested too deeply
        raise ConfigError(f"{folder.name}: its config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder.name}: its config.json is not a JSON object")
    _check_needs(config, folder)
    check_timm(config, folder.name)
    check_backbones(entries, folder.name)
    return config


def _check_needs(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse models that need more than the settings and plain weights in the folder."""
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{folder.name} holds an adapter: save the whole model, after merge_and_unload()")
    if config.get("quantization_config"):
        raise ConfigError(f"{folder.name} is quantised, and gradients need plain weights: save it without quantisation")
    if "configuration_files" in config:
        raise ConfigError(
            f"{folder.name}: its config.json names other configuration files: save the model with save_pretrained"
        )


def check_backbones(entries: Iterable[tuple[str, Any]], name: str) -> None:
    """Refuse settings that name a backbone which is not in timm: it would be fetched.

    Args:
        entries: keys and values of all objects in the settings.
        name: name of the folder.

    Raises:
        ConfigError: there is one.
    """
    for key, value in entries:
        if key == "backbone" and value is not None and not (isinstance(value, str) and _TIMM_NAME.fullmatch(value)):
            raise ConfigError(
                f"{name}: its config.json names the backbone {str(value)[:100]!r}, which is not in timm, and nothing "
                "is fetched here: save the model with save_pretrained, which writes the backbone's own settings"
            )


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of all objects in a JSON value, without those that have labels as their keys."""
    if isinstance(value, dict):
        yield from value.items()
        value = [inner for key, inner in value.items() if key != "label2id"]
    if isinstance(value, list):
        for item in value:
            yield from _entries(item)


def check_numbers(entries: Iterable[tuple[str, Any]], name: str) -> None:
    """Refuse settings of a network of too many layers or classes: building it would take hours, or fill the memory.

    Args:
        entries: keys and values of all objects in the settings.
        name: name of the folder.

    Raises:
        ConfigError: a number, or the sum of those in a list, is above its limit.
    """
    for key, value in entries:
        for pattern, limit in _LIMITS:
            if pattern.search(key) and _total(value) > limit:
                raise ConfigError(f"{name}: {ascii(key)[:100]} in its config.json is above {limit:,}")


def _total(value: Any) -> int:
    """Return a whole number, or the sum of those in a list, in which each item counts as 1 at least."""
    if isinstance(value, list):
        return sum(map(_total, value))
    return max(value, 1) if isinstance(value, int) else 1


def check_timm(config: Mapping[str, Any], name: str) -> None:
    """Refuse settings with which timm's `create_model` would fetch weights, or read other files.

    Raises:
        ConfigError: the architecture is not a plain name, or an argument of the network is unknown.
    """
    architecture = config.get("architecture", "")
    if not isinstance(architecture, str) or not _TIMM_NAME.fullmatch(architecture):
        raise ConfigError(
            f"{name}: its architecture is {str(architecture)[:100]!r}, which is not in timm, and nothing is fetched "
            "here: name one of timm's own in its config.json, or load it as timm:NAME?weights=FILE"
        )
    arguments = config.get("model_args") or {}
    for argument in arguments if isinstance(arguments, dict) else [arguments]:
        if argument not in _TIMM_ARGUMENTS:
            raise ConfigError(
                f"{name}: its model_args has {str(argument)[:100]!r}, which might fetch something; allowed are "
                f"{', '.join(_TIMM_ARGUMENTS)}. Or load it as timm:NAME?weights=FILE"
            )


def weight_files(folder: Path, config: Mapping[str, Any], origin: str) -> list[Path]:
    """Return the files of the weights.

    Raises:
        ConfigError: there are no weights, or a file is not a .safetensors file in the folder itself.
    """
    existing = (name for name in WEIGHTS if (folder / name).exists())
    main = config.get("transformers_weights") or next(existing, "")
    if not main:
        pickled = next((name for name in PICKLES if (folder / name).exists()), "")
        hint = f"; {pickled} is a pickle, which is not read here" if pickled else ""
        raise ConfigError(f"{origin} has no model.safetensors{hint}: save it with save_pretrained")
    is_index = str(main).endswith(INDEX) and _FILE.fullmatch(str(main).removesuffix(INDEX))
    names = _read_index(folder / main, origin) if is_index else [main]
    for name in names:
        if not (isinstance(name, str) and _FILE.fullmatch(name) and (folder / name).is_file()):
            raise ConfigError(
                f"{origin} names {ascii(name)[:100]} as a file of its weights, and only .safetensors files in the "
                "folder itself are read: save it with save_pretrained"
            )
    return [folder / name for name in names]


def _read_index(path: Path, origin: str) -> list[Any]:
    data = read_file(path, MAX_SETTINGS, origin)
    try:
        return list(dict.fromkeys(json.loads(data.decode())["weight_map"].values()))
    except Exception as error:  # a file of unknown origin may be wrong in any way
        raise ConfigError(f"{origin}: its {path.name} cannot be read: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the message of an error of a library on one line, shortened."""
    return " ".join(str(error).split())[:300] or type(error).__name__
