"""Models of transformers that compare images with texts, CLIP and SigLIP: the image's side as a module of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from camserve_server.core.errors import ConfigError
from camserve_server.models.huggingface import tokenizer
from camserve_server.models.huggingface.folder import weight_files
from camserve_server.models.huggingface.network import (
    build_random,
    build_with_weights,
    check_weights,
    import_transformers,
    offline,
    read_settings,
)
from camserve_server.models.huggingface.processors import load_processor, preprocess_of
from camserve_server.models.source import Source
from camserve_server.models.spec import ModelSpec
from camserve_server.models.text import TextTower

CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
"""The class of transformers by the type of the model. SigLIP 2 with a fixed resolution has the type of SigLIP."""

NAFLEX = "Siglip2Model"
"""The class of SigLIP 2 that takes images of any proportions as lists of patches."""


def fits(settings: Mapping[str, Any]) -> bool:
    """Return True if the settings of a folder are those of a model that compares images with texts."""
    saved = settings.get("architectures")
    return isinstance(saved, list) and any(name in (*CLASSES.values(), NAFLEX) for name in saved)


def load(spec: ModelSpec, settings: Mapping[str, Any]) -> Source:
    """Load a model from its folder, with the folder's weights or random ones.

    Args:
        spec: the model's spec.
        settings: the folder's config.json.

    Raises:
        ConfigError: transformers is not installed, or a file of the folder cannot be used.
    """
    check(spec, settings)
    folder = Path(spec.folder)
    files = weight_files(folder, settings, spec.origin) if spec.weights == "default" else []
    transformers = import_transformers()
    with offline():
        config = read_settings(transformers, folder, spec.origin)
        preprocess = preprocess_of(load_processor(transformers, folder, spec.origin), spec.origin)
        kind = getattr(transformers, CLASSES[config.model_type])
        if spec.weights == "default":
            check_weights(kind, config, files, spec)
            model = build_with_weights(kind, config, files, spec, "CLIP or SigLIP")
        else:
            model = build_random(kind, config, spec)
    images, texts = split(model, folder, spec.origin)
    return Source(images, preprocess, task="embed", text=texts)


def check(spec: ModelSpec, settings: Mapping[str, Any]) -> None:
    """Check a model's folder as far as possible without loading the model; the arguments are those of `load`.

    Raises:
        ConfigError: the model is of another kind, or there is no tokenizer of a possible size.
    """
    if settings.get("model_type") not in CLASSES:
        raise ConfigError(
            f"{spec.origin} is a {NAFLEX}, which takes lists of patches: save a SigLIP 2 with a fixed resolution, such "
            "as siglip2-base-patch16-224, or serve it from a function of your own, your.module:factory"
        )
    tokenizer.check_file(Path(spec.folder), spec.origin)


class ImageTower(nn.Module):
    """The image's side: the embedding [B,E] of images, before it is normalised.

    Args:
        model: the whole model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision_model = model.vision_model
        if hasattr(model, "visual_projection"):  # CLIP's
            self.visual_projection = model.visual_projection

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the embeddings of images."""
        pooled = self.vision_model(pixel_values=pixel_values).pooler_output
        return cast("Tensor", self.visual_projection(pooled) if hasattr(self, "visual_projection") else pooled)


class TextEncoder(nn.Module):
    """The texts' side: the embedding [n,E] of texts, before it is normalised.

    Args:
        model: the whole model.
        tokenize: its tokenizer.
    """

    def __init__(self, model: Any, tokenize: tokenizer.FolderTokenizer) -> None:
        super().__init__()
        self.text_model = model.text_model
        if hasattr(model, "text_projection"):  # CLIP's
            self.text_projection = model.text_projection
        self._tokenize = tokenize
        # A buffer, so that the digest of the model changes with the tokenizer.
        self.register_buffer("tokenizer_digest", torch.tensor(list(tokenize.digest), dtype=torch.uint8))

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts."""
        device = next(self.text_model.parameters()).device
        ids, mask = self._tokenize(texts)
        masks = {} if mask is None else {"attention_mask": mask.to(device)}
        pooled = self.text_model(input_ids=ids.to(device), **masks).pooler_output
        return cast("Tensor", self.text_projection(pooled) if hasattr(self, "text_projection") else pooled)


def split(model: Any, folder: Path, origin: str) -> tuple[ImageTower, TextTower]:
    """Divide a model into the images' side and the texts' side.

    Args:
        model: the model.
        folder: the folder with its tokenizer.
        origin: its name, for errors.

    Raises:
        ConfigError: the tokenizer cannot be used.
    """
    config = model.config.text_config
    tokenize = tokenizer.FolderTokenizer(folder, origin, config.max_position_embeddings, config.vocab_size)
    bias = float(model.logit_bias.detach()) if hasattr(model, "logit_bias") else 0.0
    return ImageTower(model), TextTower(
        TextEncoder(model, tokenize),
        scale=float(model.logit_scale.detach().exp()),
        bias=bias,
        exclusive=model.config.model_type == "clip",
    )
