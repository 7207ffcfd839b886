"""Load a model from a folder that transformers saved."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from camserve_server.core.errors import ConfigError
from camserve_server.imaging.channels import RGB
from camserve_server.models.huggingface import image_text, processors
from camserve_server.models.huggingface.folder import PROCESSOR, PROCESSORS, read_config, weight_files
from camserve_server.models.huggingface.heads import Head, head_of, instances, with_form
from camserve_server.models.huggingface.network import (
    MISSING,
    build_random,
    build_with_weights,
    check_weights,
    import_transformers,
    labels_of,
    offline,
    read_settings,
)
from camserve_server.models.source import Source
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Task

TASKS: Mapping[str, Task] = {
    "single_label_classification": "classify",
    "multi_label_classification": "multilabel",
    "regression": "regress",
}
"""Tasks of classifiers by the names that transformers uses."""


def load(spec: ModelSpec) -> Source:
    """Load a model from its folder, with the folder's weights or random ones.

    Raises:
        ConfigError: transformers is not installed, the folder has no model of a known kind, or it cannot be loaded
            without running code from the folder.
    """
    folder = Path(spec.folder)
    settings = read_config(folder)
    if image_text.fits(settings):
        return image_text.load(spec, settings)
    head = head_of(settings, spec.origin, trained=spec.weights == "default")
    files = weight_files(folder, settings, spec.origin) if spec.weights == "default" else []
    transformers = import_transformers()
    with offline():
        config = read_settings(transformers, folder, spec.origin)
        processor = processors.load_processor(transformers, folder, spec.origin)
        channels = _channels(config)
        preprocess = processors.preprocess_for(processor, channels, spec.origin)
        kind = head.model_class(transformers, config, spec.origin)
        if spec.weights == "default":
            check_weights(kind, config, files, spec)
            module = build_with_weights(kind, config, files, spec, head.role)
        else:
            module = build_random(kind, config, spec)
    if head.task == "detect":
        module.num_classes = config.num_labels
    swaps_channels = channels == RGB and processors.swaps_channels(processor)
    module = with_form(module, _convert(head, spec, processor), swaps_channels=swaps_channels)
    task = head.task or TASKS.get(settings.get("problem_type") or "")
    return Source(module, preprocess, labels_of(config), task, queries=_queries(config))


def _channels(config: Any) -> int:
    """Return the number of channels of a network's input."""
    channels = getattr(config, "num_channels", RGB)
    return channels if isinstance(channels, int) else RGB


def _queries(config: Any) -> int:
    """Return the number of tokens that ask for one object or mask each."""
    for settings in (config, getattr(config, "decoder_config", None)):
        for name in ("num_queries", "num_detection_tokens"):
            if isinstance(queries := getattr(settings, name, None), int):
                return queries
    return 0


def _convert(head: Head, spec: ModelSpec, processor: Any) -> Any:
    """Return the conversion of a model's outputs, or None; ?task=detect chooses the instances of a segmentation."""
    if head.convert is None:
        return None
    try:
        convert = instances if head.task == "segment" and spec.task == "detect" else head.convert
        return convert(processor)
    except ConfigError as error:
        raise ConfigError(f"{spec.origin}: {error}") from error


def check(spec: ModelSpec) -> None:
    """Check a model's folder as far as possible without loading the model.

    Raises:
        ConfigError: transformers is not installed, a file is missing, or code from the folder would have to be run.
    """
    folder = Path(spec.folder)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(MISSING)
    settings = read_config(folder)
    if image_text.fits(settings):
        image_text.check(spec, settings)
    else:
        head_of(settings, spec.origin, trained=spec.weights == "default")
    if not any((folder / name).exists() for name in PROCESSORS) and "pretrained_cfg" not in settings:
        raise ConfigError(f"{spec.origin} has no {PROCESSOR}: AutoImageProcessor's save_pretrained writes it")
    if spec.weights == "default":
        weight_files(folder, settings, spec.origin)
