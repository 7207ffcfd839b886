"""Image classifiers that transformers saved in a folder: weights in safetensors, labels and preprocessing beside them.

Nothing is fetched, and nothing in the folder is run: code of its own, pickles and adapters are refused. What the folder
says of the input is not taken on trust either: transformers' own processor makes some photos ready, and what the model
will get here must equal that.
"""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode, functional

from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import Preprocess
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Task

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
INDEX = ".index.json"
MISSING = 'models of Hugging Face need `pip install "camserve[hf]"`'
PROCESSOR = "preprocessor_config.json"

TASKS: Mapping[str, Task] = {
    "single_label_classification": "classify",
    "multi_label_classification": "multilabel",
    "regression": "regress",
}
"""What transformers calls a classifier's task, and what it is called here."""

CLASSIFIER = "ForImageClassification"  # in the name of each of transformers' own image classifiers

# A file in the folder itself, in the one format that holds no code.
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)
_PLAIN = re.compile(r"[\w.-]*")  # of a network in timm itself; "hf-hub:OWNER/NAME" is one of the Hub
_ARGUMENTS = (
    "act_layer", "class_token", "depth", "depths", "drop_path_rate", "drop_rate", "dynamic_img_pad", "dynamic_img_size",
    "embed_dim", "fc_norm", "global_pool", "img_size", "init_values", "mlp_ratio", "norm_layer", "num_heads",
    "patch_size", "pos_embed", "pre_norm", "qkv_bias", "reg_tokens", "strict_img_size", "window_size",
)  # fmt: skip
"""Which of a network's own arguments a folder of timm may give: they say how it is built, and none names a file."""

_GENERIC = re.compile(r"LABEL_\d+")  # what transformers calls a class of which nobody said what it is
Interpolation = Literal["bilinear", "bicubic", "nearest"]
Picture: TypeAlias = "np.ndarray[Any, Any]"  # uint8 [h,w,3]
Triple: TypeAlias = tuple[float, float, float]

_NEAR = 0.04  # of the range from black to white: rounding, and ways to interpolate; a pixel's shift is five times that


def load(spec: ModelSpec) -> tuple[nn.Module, Preprocess, tuple[str, ...], Task | None]:
    """Load a model from its folder.

    Returns:
        The module, with the folder's weights or random ones; how it wants its input; its labels, or none; its task
        where the folder says it.

    Raises:
        ConfigError: transformers is not installed; or the folder has no image classifier, or nothing that could be
            loaded without running it.
    """
    folder = Path(spec.folder)
    theirs = _config_of(folder)
    _check_kind(theirs, spec)
    files = _weight_files(folder, theirs, spec.origin) if spec.weights == "default" else []
    hub = _transformers()
    try:
        config = hub.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{spec.origin}: transformers {hub.__version__} cannot read its config.json: {_line(error)}"
        ) from error
    preprocess = preprocess_of(_processor(hub, folder, spec.origin), spec.origin)
    make = _class_of(hub, config, spec.origin)
    module = _random(make, config, spec.size) if spec.weights != "default" else _trained(make, config, files, spec)
    return module, preprocess, _labels(config), TASKS.get(theirs.get("problem_type") or "")


def check(spec: ModelSpec) -> None:
    """Say what is wrong with a model's folder, as far as that can be known without loading it.

    Raises:
        ConfigError: transformers is not installed, or a file is missing, or would have to be run.
    """
    folder = Path(spec.folder)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(MISSING)
    theirs = _config_of(folder)
    _check_kind(theirs, spec)
    if not (folder / PROCESSOR).exists() and "pretrained_cfg" not in theirs:
        raise ConfigError(f"{spec.origin} has no {PROCESSOR}: AutoImageProcessor's save_pretrained writes it")
    if spec.weights == "default":
        _weight_files(folder, theirs, spec.origin)


def _config_of(folder: Path) -> dict[str, Any]:
    """Read config.json; refuse what would have to be run, or fetched.

    Raises:
        ConfigError: it is no folder of a model, or such a one.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}: nothing is fetched from the Hub here; fetch it with "
            f"`hf download OWNER/NAME --local-dir {folder}`, or save it there with save_pretrained"
        )
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder.name} has no config.json that can be read: save it with save_pretrained") from error
    except ValueError as error:
        raise ConfigError(f"{folder.name}: its config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder.name}: its config.json is no JSON object")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{folder.name} holds an adapter: save the whole model, after merge_and_unload()")
    if config.get("quantization_config"):
        raise ConfigError(f"{folder.name} is quantised, and gradients want plain weights: save it as it was before")
    if "configuration_files" in config:
        raise ConfigError(
            f"{folder.name}: its config.json names other configuration files: save the model with save_pretrained"
        )
    _check_timm(config, folder.name)
    return config


def _check_kind(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse what was saved as something else: its weights have no classifier, and are no use for one.

    Raises:
        ConfigError: it was trained for segmentation, detection, text, or for nothing yet.
    """
    saved = config.get("architectures")
    named = [str(one)[:100] for one in saved] if isinstance(saved, list) else []
    if spec.weights == "default" and named and not any(CLASSIFIER in one for one in named):
        raise ConfigError(
            f"{spec.origin} was saved as {named[0]}, and hf: is for image classifiers (…{CLASSIFIER}): serve another "
            "from a function of yours, your.module:factory, which says what it answers with"
        )


def _check_timm(config: Mapping[str, Any], name: str) -> None:
    """Refuse what timm would fetch, or read from elsewhere: its function that makes a network can do both.

    Raises:
        ConfigError: its architecture is no plain name of one, or it is to be made by arguments that are not known.
    """
    architecture = config.get("architecture", "")
    if not isinstance(architecture, str) or not _PLAIN.fullmatch(architecture):
        raise ConfigError(
            f"{name}: its architecture is {str(architecture)[:100]!r}, from elsewhere, and nothing is fetched here: "
            "name one of timm's own in its config.json, or load it as timm:NAME?weights=FILE"
        )
    arguments = config.get("model_args") or {}
    for argument in arguments if isinstance(arguments, dict) else [arguments]:
        if argument not in _ARGUMENTS:
            raise ConfigError(
                f"{name}: its model_args has {str(argument)[:100]!r}, which is not known not to fetch anything; it may "
                f"have {', '.join(_ARGUMENTS)}. Or load it as timm:NAME?weights=FILE"
            )


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415 -- an extra of its own, and seconds to import
    except ModuleNotFoundError as error:
        raise ConfigError(MISSING) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _class_of(hub: Any, config: Any, origin: str) -> Any:
    """Return transformers' own class of an image classifier; code that the folder brings is never one."""
    kinds = hub.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kinds is None:
        raise ConfigError(f'{origin} is a "{config.model_type}", of which transformers has no image classifier')
    named = config.architectures or []
    several = kinds if isinstance(kinds, Sequence) else (kinds,)
    return next((kind for kind in several if kind.__name__ in named), several[0])


def _options(make: Any) -> dict[str, Any]:
    # Named, as config.json may name a kernel to be fetched; and float32, as it may name another precision.
    return {"attn_implementation": "sdpa" if make._supports_sdpa else "eager", "dtype": torch.float32}  # noqa: SLF001 -- there is no other way to ask


def _random(make: Any, config: Any, size: int | None) -> nn.Module:
    if size is not None and isinstance(getattr(config, "image_size", None), int):
        config.image_size = size
    return cast("nn.Module", make._from_config(config, **_options(make)))  # noqa: SLF001 -- what AutoModel calls


def _weight_files(folder: Path, config: Mapping[str, Any], origin: str) -> list[Path]:
    """Return the files of the weights.

    Raises:
        ConfigError: there is none, or one is not a .safetensors file in the folder itself.
    """
    there = (name for name in WEIGHTS if (folder / name).exists())
    named = config.get("transformers_weights") or next(there, "")
    if not named:
        pickled = next((name for name in PICKLES if (folder / name).exists()), "")
        why = f"; {pickled} is a pickle, which is not read here" if pickled else ""
        raise ConfigError(f"{origin} has no model.safetensors{why}: save it with save_pretrained")
    index = str(named).endswith(INDEX) and _FILE.fullmatch(str(named).removesuffix(INDEX))
    names = _indexed(folder / named, origin) if index else [named]
    for name in names:
        if not (isinstance(name, str) and _FILE.fullmatch(name) and (folder / name).is_file()):
            raise ConfigError(
                f"{origin} names {ascii(name)[:100]} as a file of its weights, and only .safetensors files in the "
                "folder itself are read: save it with save_pretrained"
            )
    return [folder / name for name in names]


def _indexed(path: Path, origin: str) -> list[Any]:
    try:
        return list(dict.fromkeys(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except Exception as error:  # whatever is wrong with a file that somebody else wrote
        raise ConfigError(f"{origin}: its {path.name} cannot be read: {_line(error)}") from error


def _trained(make: Any, config: Any, files: Sequence[Path], spec: ModelSpec) -> nn.Module:
    try:
        # No folder is passed: transformers would choose files in it itself, in some cases a pickle.
        module, told = make.from_pretrained(
            None,
            config=config,
            state_dict={name: tensor for path in files for name, tensor in safetensors.torch.load_file(path).items()},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told, and refused below
            **_options(make),
        )
    except Exception as error:
        raise ConfigError(f"the weights of {spec.origin} cannot be read: {_line(error)}") from error
    lacking = sorted(told["missing_keys"]) + sorted(str(one[0]) for one in told["mismatched_keys"])
    if lacking:
        some = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")  # noqa: PLR2004 -- enough to see
        raise ConfigError(f"the weights of {spec.origin} lack {some}: was it trained as a classifier of images?")
    return cast("nn.Module", module)


def _labels(config: Any) -> tuple[str, ...]:
    found = config.id2label or {}
    labels = tuple(str(found.get(index, "")) for index in range(len(found)))
    return () if all(_GENERIC.fullmatch(label) or not label for label in labels) else labels


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# --- how it wants its input ---


def _processor(hub: Any, folder: Path, origin: str) -> Any:
    try:
        return hub.AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        there = "cannot be used" if (folder / PROCESSOR).exists() else "is not there"
        raise ConfigError(
            f"{origin}: its {PROCESSOR} {there}, and without it nobody knows what input the model was trained on "
            f"(AutoImageProcessor's save_pretrained writes it): {_line(error)}"
        ) from error


def preprocess_of(processor: Any, origin: str) -> Preprocess:
    """Say what a processor of transformers does to a photo, in our words: those by which the same comes out.

    Raises:
        ConfigError: there are none.
    """
    try:
        low, high = (_made(processor, np.full((64, 96, 3), value, np.uint8)) for value in (0, 255))
        photos = _patterns(low.shape[1], low.shape[2])
        seen = [_made(processor, photo) for photo in photos]
    except Exception as error:
        raise ConfigError(f"{origin}: its processor does not make photos ready: {_line(error)}") from error
    black, span = low.amax((1, 2)), (high - low).amax((1, 2))
    if bool((span > 0).all()) and all(one.shape == low.shape for one in seen):
        plain = [(one - black[:, None, None]) / span[:, None, None] for one in seen]
        likely = _likely(processor, (low.shape[1], low.shape[2]), _triple(-black / span), _triple(1 / span))
        if found := _nearest(likely, list(zip(photos, plain, strict=True))):
            return found
    raise ConfigError(
        f"{origin}: its {type(processor).__name__} does more than resize, crop to the middle and normalise, or photos "
        "do not come out in one size: load it in a factory of your own, which says what input it wants"
    )


def _made(processor: Any, photo: Picture) -> Tensor:
    """Return what a processor makes of a photo, float32 [3,h,w]."""
    return cast("Tensor", processor(images=Image.fromarray(photo), return_tensors="pt")["pixel_values"])[0].float()


def _patterns(height: int, width: int) -> list[Picture]:
    """Return photos for an input of a size: high and wide, and of enough widths for every way to round a crop."""
    high, wide = height * 5 // 4, width * 7 // 4
    return [_pattern(height * 9 // 5, width * 4 // 3), *(_pattern(high, wide + more) for more in range(6))]


def _pattern(height: int, width: int) -> Picture:
    """Return waves, others in each colour, that nothing looks like which is moved, mirrored or cut off elsewhere."""
    rows, columns = (each / max(height, width) for each in np.mgrid[:height, :width])
    waves = [9 * rows + 5 * columns**2, 8 * columns - 5 * rows**2, 12 * rows * columns + 3 * rows]
    return np.asarray(127.5 + 127 * np.sin(2 * np.pi * np.stack(waves, -1)), np.uint8)


def _likely(processor: Any, size: tuple[int, int], mean: Triple, std: Triple) -> list[Preprocess]:
    """Return what a processor's words may mean."""
    said = getattr(processor, "size", None) or {}
    side = said.get("shortest_edge") or min(size)
    share = getattr(processor, "crop_pct", None) or getattr(processor, "data_config", {}).get("crop_pct") or 1.0
    exact = (said.get("height") or size[0], said.get("width") or size[1])
    resizes = dict.fromkeys((size, exact, side, int(side / share), (int(size[0] / share), int(size[1] / share))))
    ways = product(resizes, get_args(Interpolation), (True, False))
    return [Preprocess(size, resize, how, mean, std, floors) for resize, how, floors in ways]


def _nearest(likely: Sequence[Preprocess], shown: Sequence[tuple[Picture, Tensor]]) -> Preprocess | None:
    """Return the one by which photos come nearest to what a processor showed of them; None if that is not near."""
    gaps = {}
    for preprocess in likely:
        gap = 0.0
        for photo, seen in shown:
            gap = max(gap, float((_seen_here(photo, preprocess) - seen).abs().max()))
            if gap > _NEAR:
                break
        else:
            gaps[preprocess] = gap
    return min(gaps, key=gaps.__getitem__) if gaps else None


def _seen_here(photo: Picture, preprocess: Preprocess) -> Tensor:
    """Return what the model will see here of a photo, 0 to 1 [3,h,w]."""
    image, resize = torch.from_numpy(photo).permute(2, 0, 1), preprocess.resize
    mode = InterpolationMode(preprocess.interpolation)
    image = functional.resize(image, [resize] if isinstance(resize, int) else list(resize), mode).float() / 255
    if preprocess.floors:
        for axis, kept in enumerate(preprocess.size, 1):
            there = image.shape[axis]
            image = image.narrow(axis, max(0, there - kept) // 2, min(there, kept))
    return cast("Tensor", functional.center_crop(image, list(preprocess.size)))


def _triple(values: Tensor) -> Triple:
    red, green, blue = (round(float(value), 7) for value in values.double())  # float32 has no more
    return red, green, blue
