"""Image classifiers that transformers saved in a folder: safetensors weights, labels and preprocessing.

Nothing is fetched, and no code in the folder is run: custom code, pickles and adapters are refused. The folder's
preprocessing settings are not trusted either. transformers' own processor preprocesses some test photos, and camserve's
preprocessing must give the same result.
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

from camserve_server.core.errors import ConfigError
from camserve_server.imaging.values import Preprocess
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Task

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
INDEX = ".index.json"
MISSING = 'models of Hugging Face need `pip install "camserve[hf]"`'
PROCESSOR = "preprocessor_config.json"
PROCESSORS = (PROCESSOR, "processor_config.json")  # the second one also has the settings of a tokenizer

TASKS: Mapping[str, Task] = {
    "single_label_classification": "classify",
    "multi_label_classification": "multilabel",
    "regression": "regress",
}
"""Tasks by the names that transformers uses."""

CLASSIFIER = "ForImageClassification"  # part of the class names of transformers' image classifiers

# A file in the folder itself, in the only format without code.
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)
_TIMM_NAME = re.compile(r"[\w.-]*")  # a network in timm itself; "hf-hub:OWNER/NAME" would be one from the Hub
_TIMM_ARGUMENTS = (
    "act_layer", "class_token", "depth", "depths", "drop_path_rate", "drop_rate", "dynamic_img_pad", "dynamic_img_size",
    "embed_dim", "fc_norm", "global_pool", "img_size", "init_values", "mlp_ratio", "norm_layer", "num_heads",
    "patch_size", "pos_embed", "pre_norm", "qkv_bias", "reg_tokens", "strict_img_size", "window_size",
)  # fmt: skip
"""Arguments of timm's networks that a folder may set: they describe the architecture, and none names a file."""

_GENERIC = re.compile(r"LABEL_\d+")  # transformers' names for classes without a label
Interpolation = Literal["bilinear", "bicubic", "nearest"]
Photo: TypeAlias = "np.ndarray[Any, Any]"  # uint8 [h,w,3]
Triple: TypeAlias = tuple[float, float, float]

# Largest difference between two preprocessings, as a share of the range from black to white. It allows for rounding and
# for implementations of interpolation. A shift by one pixel gives five times as much.
_MAX_DIFFERENCE = 0.04


def load(spec: ModelSpec) -> tuple[nn.Module, Preprocess, tuple[str, ...], Task | None]:
    """Load a model from its folder.

    Returns:
        The module, with the folder's weights or random ones; its preprocessing; its labels, or none; its task, if the
        folder specifies it.

    Raises:
        ConfigError: transformers is not installed, the folder has no image classifier, or it cannot be loaded without
            running code from the folder.
    """
    folder = Path(spec.folder)
    settings = read_config(folder)
    _check_classifier(settings, spec)
    files = weight_files(folder, settings, spec.origin) if spec.weights == "default" else []
    transformers = import_transformers()
    config = read_model_config(transformers, spec)
    preprocess = preprocess_of(load_processor(transformers, folder, spec.origin), spec.origin)
    kind = _model_class(transformers, config, spec.origin)
    if spec.weights == "default":
        module = build_with_weights(kind, config, files, spec)
    else:
        module = build_random(kind, config, spec.size)
    return module, preprocess, _labels(config), TASKS.get(settings.get("problem_type") or "")


def read_model_config(transformers: Any, spec: ModelSpec) -> Any:
    """Return the configuration of a folder's model, of transformers' own class.

    Raises:
        ConfigError: this version of transformers cannot read it.
    """
    try:
        return transformers.AutoConfig.from_pretrained(spec.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{spec.origin}: transformers {transformers.__version__} cannot read its config.json: {_one_line(error)}"
        ) from error


def check(spec: ModelSpec) -> None:
    """Check a model's folder as far as possible without loading the model.

    Raises:
        ConfigError: transformers is not installed, a file is missing, or code from the folder would have to be run.
    """
    settings = read_config(Path(spec.folder))
    _check_classifier(settings, spec)
    check_files(spec, settings)


def check_files(spec: ModelSpec, settings: Mapping[str, Any]) -> None:
    """Check that transformers is installed, and that a folder has the files of a model.

    Raises:
        ConfigError: transformers is not installed, or a file is missing.
    """
    folder = Path(spec.folder)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(MISSING)
    if not any((folder / name).exists() for name in PROCESSORS) and "pretrained_cfg" not in settings:
        raise ConfigError(f"{spec.origin} has no {PROCESSOR}: AutoImageProcessor's save_pretrained writes it")
    if spec.weights == "default":
        weight_files(folder, settings, spec.origin)


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
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder.name} has no readable config.json: save it with save_pretrained") from error
    except ValueError as error:
        raise ConfigError(f"{folder.name}: its config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder.name}: its config.json is not a JSON object")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{folder.name} holds an adapter: save the whole model, after merge_and_unload()")
    if config.get("quantization_config"):
        raise ConfigError(f"{folder.name} is quantised, and gradients need plain weights: save it without quantisation")
    if "configuration_files" in config:
        raise ConfigError(
            f"{folder.name}: its config.json names other configuration files: save the model with save_pretrained"
        )
    _check_timm(config, folder.name)
    return config


def _check_classifier(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """Refuse models that were not saved as image classifiers: their weights have no classifier.

    Raises:
        ConfigError: the model was trained for segmentation, detection or text, or has no head yet.
    """
    saved = config.get("architectures")
    names = [str(name)[:100] for name in saved] if isinstance(saved, list) else []
    if spec.weights == "default" and names and not any(CLASSIFIER in name for name in names):
        raise ConfigError(
            f"{spec.origin} was saved as {names[0]}, and hf: is for image classifiers (…{CLASSIFIER}): serve another "
            "model from a function of your own, your.module:factory, which says what its task is"
        )


def _check_timm(config: Mapping[str, Any], name: str) -> None:
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


def import_transformers() -> Any:
    """Import transformers, without its progress bars and warnings.

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


def _model_class(transformers: Any, config: Any, origin: str) -> Any:
    """Return transformers' own class for an image classifier, never one from code in the folder."""
    kinds = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kinds is None:
        raise ConfigError(f'{origin} is a "{config.model_type}", for which transformers has no image classifier')
    names = config.architectures or []
    classes = kinds if isinstance(kinds, Sequence) else (kinds,)
    return next((kind for kind in classes if kind.__name__ in names), classes[0])


def _options(kind: Any) -> dict[str, Any]:
    # Set explicitly, because config.json may name an attention kernel that would be fetched, or another precision.
    return {"attn_implementation": "sdpa" if kind._supports_sdpa else "eager", "dtype": torch.float32}  # noqa: SLF001 -- transformers has no public name for it


def build_random(kind: Any, config: Any, size: int | None) -> nn.Module:
    """Build a model with random weights.

    Args:
        kind: the class of transformers.
        config: its configuration.
        size: side of its input in pixels; None for its own.
    """
    if size is not None and isinstance(getattr(config, "image_size", None), int):
        config.image_size = size
    return cast("nn.Module", kind._from_config(config, **_options(kind)))  # noqa: SLF001 -- AutoModel calls the same


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
    try:
        return list(dict.fromkeys(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except Exception as error:  # a file of unknown origin may be wrong in any way
        raise ConfigError(f"{origin}: its {path.name} cannot be read: {_one_line(error)}") from error


def build_with_weights(kind: Any, config: Any, files: Sequence[Path], spec: ModelSpec) -> nn.Module:
    """Build a model with the weights of files.

    Args:
        kind: the class of transformers.
        config: its configuration.
        files: .safetensors files.
        spec: the model's spec, for errors.

    Raises:
        ConfigError: a file cannot be read, or weights are missing.
    """
    try:
        # Without the folder: transformers would choose the files in it, in some cases a pickle.
        module, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: tensor for path in files for name, tensor in safetensors.torch.load_file(path).items()},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported in the loading info, and refused below
            **_options(kind),
        )
    except Exception as error:
        raise ConfigError(f"the weights of {spec.origin} cannot be read: {_one_line(error)}") from error
    missing = sorted(loading["missing_keys"]) + sorted(str(key[0]) for key in loading["mismatched_keys"])
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")  # noqa: PLR2004 -- names that fit a message
        raise ConfigError(f"the weights of {spec.origin} lack {names}: was it trained as a classifier of images?")
    return cast("nn.Module", module)


def _labels(config: Any) -> tuple[str, ...]:
    names = config.id2label or {}
    labels = tuple(str(names.get(index, "")) for index in range(len(names)))
    return () if all(_GENERIC.fullmatch(label) or not label for label in labels) else labels


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# --- preprocessing ---


def load_processor(transformers: Any, folder: Path, origin: str) -> Any:
    """Return transformers' own image processor of a folder.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        fault = "cannot be used" if (folder / PROCESSOR).exists() else "does not exist"
        raise ConfigError(
            f"{origin}: its {PROCESSOR} {fault}, and only this file says what input the model was trained on "
            f"(AutoImageProcessor's save_pretrained writes it): {_one_line(error)}"
        ) from error


def preprocess_of(processor: Any, origin: str) -> Preprocess:
    """Find the `Preprocess` that gives the same result as a processor of transformers.

    The result for black and white photos gives mean and standard deviation. Then all plausible combinations of resize,
    crop and interpolation are tried on test photos.

    Raises:
        ConfigError: no `Preprocess` does.
    """
    try:
        low, high = (_process(processor, np.full((64, 96, 3), value, np.uint8)) for value in (0, 255))
        photos = _test_photos(low.shape[1], low.shape[2])
        results = [_process(processor, photo) for photo in photos]
    except Exception as error:
        raise ConfigError(f"{origin}: its processor cannot preprocess photos: {_one_line(error)}") from error
    black, span = low.amax((1, 2)), (high - low).amax((1, 2))
    if bool((span > 0).all()) and all(result.shape == low.shape for result in results):
        plain = [(result - black[:, None, None]) / span[:, None, None] for result in results]
        candidates = _candidates(processor, (low.shape[1], low.shape[2]), _triple(-black / span), _triple(1 / span))
        if preprocess := _closest(candidates, list(zip(photos, plain, strict=True))):
            return preprocess
    raise ConfigError(
        f"{origin}: its {type(processor).__name__} does more than resize, crop to the middle and normalise, or its "
        "results vary in size: load the model in a factory of your own, which says what input it needs"
    )


def _process(processor: Any, photo: Photo) -> Tensor:
    """Return a processor's result for a photo, float32 [3,h,w]."""
    return cast("Tensor", processor(images=Image.fromarray(photo), return_tensors="pt")["pixel_values"])[0].float()


def _test_photos(height: int, width: int) -> list[Photo]:
    """Return a tall photo, and wide ones of enough widths for every way to round a crop."""
    high, wide = height * 5 // 4, width * 7 // 4
    return [_pattern(height * 9 // 5, width * 4 // 3), *(_pattern(high, wide + extra) for extra in range(6))]


def _pattern(height: int, width: int) -> Photo:
    """Return waves, different in each colour, which differ from any shifted, mirrored or cropped version of them."""
    rows, columns = (index / max(height, width) for index in np.mgrid[:height, :width])
    waves = [9 * rows + 5 * columns**2, 8 * columns - 5 * rows**2, 12 * rows * columns + 3 * rows]
    return np.asarray(127.5 + 127 * np.sin(2 * np.pi * np.stack(waves, -1)), np.uint8)


def _candidates(processor: Any, size: tuple[int, int], mean: Triple, std: Triple) -> list[Preprocess]:
    """Return the preprocessings that a processor's attributes may mean."""
    stated = getattr(processor, "size", None) or {}
    side = stated.get("shortest_edge") or min(size)
    share = getattr(processor, "crop_pct", None) or getattr(processor, "data_config", {}).get("crop_pct") or 1.0
    exact = (stated.get("height") or size[0], stated.get("width") or size[1])
    resizes = dict.fromkeys((size, exact, side, int(side / share), (int(size[0] / share), int(size[1] / share))))
    combinations = product(resizes, get_args(Interpolation), (True, False))
    return [
        Preprocess(size, resize, interpolation, mean, std, floors) for resize, interpolation, floors in combinations
    ]


def _closest(candidates: Sequence[Preprocess], expected: Sequence[tuple[Photo, Tensor]]) -> Preprocess | None:
    """Return the preprocessing closest to the expected results for photos, or None if all differ too much."""
    differences = {}
    for preprocess in candidates:
        largest = 0.0
        for photo, result in expected:
            largest = max(largest, float((_preprocess(photo, preprocess) - result).abs().max()))
            if largest > _MAX_DIFFERENCE:
                break
        else:
            differences[preprocess] = largest
    return min(differences, key=differences.__getitem__) if differences else None


def _preprocess(photo: Photo, preprocess: Preprocess) -> Tensor:
    """Return a photo as the model receives it, before normalisation: 0 to 1 [3,h,w]."""
    from torchvision.transforms.v2 import InterpolationMode, functional  # noqa: PLC0415 -- it takes seconds to import

    image, resize = torch.from_numpy(photo).permute(2, 0, 1), preprocess.resize
    mode = InterpolationMode(preprocess.interpolation)
    image = functional.resize(image, [resize] if isinstance(resize, int) else list(resize), mode).float() / 255
    if preprocess.floors:
        for axis, target in enumerate(preprocess.size, 1):
            length = image.shape[axis]
            image = image.narrow(axis, max(0, length - target) // 2, min(length, target))
    return cast("Tensor", functional.center_crop(image, list(preprocess.size)))


def _triple(values: Tensor) -> Triple:
    red, green, blue = (round(float(value), 7) for value in values.double())  # the precision of float32
    return red, green, blue
