"""Read the weights of a model from files, check them, and compute their digest."""

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from camserve_server.core.errors import ConfigError
from camserve_server.models import checkpoint, stem
from camserve_server.models.pickles import CorruptFileError, printable
from camserve_server.models.spec import ModelSpec
from camserve_server.models.text import TextTower

log = logging.getLogger(__name__)

WRAPPERS = ("model.", "module.", "_orig_mod.")
"""Prefixes that training tools add to the name of every weight."""

PART_WRAPPER = re.compile(r"\.(module|_orig_mod)(?=\.)")
"""What they add to the names of weights in a part of the network."""


def digest_with_text(sha256: str, tower: TextTower) -> str:
    """Return the digest of a model with its text side."""
    text = f"{sha256} {digest(tower.encoder)} {tower.scale} {tower.bias}"
    return hashlib.sha256(text.encode()).hexdigest()


def read_weights(spec: ModelSpec, module: nn.Module) -> str:
    """Read the weights of a spec into its module; return their kind: "default", "file" or "none".

    Raises:
        ConfigError: they cannot be read, or do not fit the module.
    """
    if spec.weights in ("default", "none"):
        if spec.sha256:
            raise ConfigError(f"model {spec.name}: sha256= needs a weights file, not weights={spec.weights}")
        if spec.source == "hf":
            _check_folder_weights(spec, module)
        # The default weights of a factory are those that it returned.
        return spec.weights
    path = Path(spec.weights)
    if not path.exists():
        raise ConfigError(f"model {spec.name}: there is no weights file {path.name}")
    log.info("reading the weights of model %s from %s", spec.name, path)
    prefix, budget = "", checkpoint.SizeBudget.of(module)
    try:
        state, prefix = _without_prefix(checkpoint.load(path, budget, spec.sha256, spec.model_folder), module)
        module.load_state_dict(stem.adapt_state(state, module, spec.channels))
        _check_finite(module)
    except checkpoint.LfsPointerError as error:
        raise ConfigError(f"model {spec.name}: {error}") from error
    except Exception as error:  # also from load_state_dict, and from a module's own way of loading
        # The log has the whole path. The error may reach a caller, so it has the file's name without the folder.
        raise ConfigError(
            f"model {spec.name}: the weights in {path.name} do not fit {spec.origin}"
            f"{f', also without the prefix {prefix!r} of all their names' if prefix else ''}: {_shorten(error)}"
        ) from error
    return "file"


def _without_prefix(state: Mapping[str, Tensor], module: nn.Module) -> tuple[Mapping[str, Tensor], str]:
    """Return the weights by the module's own names, and the prefix that was removed from all names.

    Lightning saves a network as its attribute "model.", DataParallel as "module.", torch.compile as "_orig_mod.". The
    last two may also be around a part of the network, such as "features.module.0.weight".
    """
    names, removed = module.state_dict().keys(), ""
    while state and names.isdisjoint(state):
        prefix = next(iter(state)).partition(".")[0] + "."
        if prefix not in WRAPPERS or not all(name.startswith(prefix) for name in state):
            break
        state, removed = {name.removeprefix(prefix): tensor for name, tensor in state.items()}, removed + prefix
    return {name if name in names else PART_WRAPPER.sub("", name): state[name] for name in state}, removed


def _check_folder_weights(spec: ModelSpec, module: nn.Module) -> None:
    try:
        _check_finite(module)
    except CorruptFileError as error:
        raise ConfigError(f"the weights of {spec.origin} cannot be used: {error}") from error


def _check_finite(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # One pass over the values, without a temporary tensor as `isfinite` needs one: 0.015 s for resnet50. Both
        # results are NaN if a value is.
        least, greatest = torch.aminmax(tensor.detach())
        # A mask may be minus infinity, a weight may not.
        if least.isnan() or (isinstance(tensor, nn.Parameter) and (least.isinf() or greatest.isinf())):
            raise CorruptFileError(f"{name} is not finite")


def _shorten(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    rest = f" (and {len(lines) - 3} more lines)" if len(lines) > 3 else ""  # noqa: PLR2004 -- lines that fit a message
    first = lines[:3] if isinstance(error, CorruptFileError) else (printable(line, 120) for line in lines[:3])
    return "; ".join(first) + rest


def randomise_zeros(module: nn.Module) -> None:
    """Give random values to weights that are zero by design, so that the output depends on every layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("weight", "gain", "gamma", "class_token", "cls_token")) and not weight.any():
                weight.copy_(
                    torch.randn(weight.shape, generator=generator, dtype=torch.float32) * 0.02 + (weight.dim() == 1)
                )


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values."""
    values = tensor.dequantize() if tensor.is_quantized else tensor.detach()
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest(module: nn.Module) -> str:
    """Return the SHA-256 of the names and values of all parameters and buffers, in hexadecimal."""
    sha256 = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        sha256.update(name.encode())
        for part in pytree.tree_leaves(value):  # quantised weights are tuples
            sha256.update(_bytes_of(part) if isinstance(part, Tensor) else repr(part).encode())
    return sha256.hexdigest()
