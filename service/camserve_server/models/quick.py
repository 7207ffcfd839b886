"""A second, quicker copy of a model, for passes that look at its default layer or behind it.

In such a pass nobody looks before that layer, and nothing there is differentiated. So the copy may compute that part
in another way: with each batch norm folded into the convolution before it, on a CPU by oneDNN's own functions, with
weights in half precision, converted once, and compiled where that is asked for. Behind the layer all is as it was, in
float32, with the same parameters, but for three things. `nn.MultiheadAttention`, which goes back through transposed
copies of all it holds, is called in a way that does not. Where the answer is made of the class token alone, what other
tokens have no part in is left out: of a transformer's last block, five sixths. And of a model in half precision, linear
maps over all tokens are in half precision there too.

What lies before the layer is found by running the model once and watching which functions take which parameters; no
graph of the model is needed, and any that runs will do. The copy is tried before it is used: one that fails, or says
something else than the model, is thrown away, and the model serves as it is.
"""

import copy
import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import timm.layers
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree  # every shape of output that torch itself knows

from camserve_server.hooks import output_of
from camserve_server.models import layout, onednn
from camserve_server.models.compiled import ROWS, compiled, missing, too_far
from camserve_server.models.onednn import Direct, Site
from camserve_server.models.prefix import on_prefix, padded, partial_to
from camserve_server.models.uses import Uses, hooked, used
from camserve_server.types import ModelInfo

log = logging.getLogger(__name__)

Pair: TypeAlias = tuple[str, str]
"""A convolution and the batch norm behind it, by name."""

KINDS = ("cam", "curvature", "score")
"""What the copy can run: all that differentiates nothing before a layer, and keeps nothing from there."""

APART = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far the default layer's output may be from the model's, as a share of its norm.

Measured on a photo: at most 6e-7, 0.014 and 0.002 in ten architectures with random weights.
"""

_KERNEL = 4
"""Dimensions of a convolution's weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Quick:
    """A quicker copy.

    Attributes:
        module: with the same names; what lies behind the layer shares the model's parameters.
        layers: the names of those that it can be watched at.
        dtype: of its input.
        folded: how many batch norms are in the convolutions before them.
        compiled: the names of the modules that are compiled.
        direct: those that oneDNN is asked for directly.
        channels_last: whether that is the memory layout in which it is faster.
    """

    module: nn.Module
    layers: frozenset[str]
    dtype: torch.dtype
    folded: int
    compiled: tuple[str, ...]
    direct: Direct
    channels_last: bool


def quickened(module: nn.Module, info: ModelInfo, *, compiling: bool = False, rows: int = layout.ROWS) -> Quick | None:
    """Make the quicker copy of a model.

    Args:
        module: frozen, in evaluation mode, on its device.
        info: of it.
        compiling: whether what lies before its default layer is to be compiled.
        rows: of the batch in which the memory layouts are timed.

    Returns:
        The copy; None where nothing would be quicker, or where the model does not allow it, which is logged in words.
    """
    if info.task == "detect" or info.layers[info.default_layer].calls != 1:
        if compiling:
            _refuse(info, "it detects objects, or calls its default layer more than once")
        return None
    try:
        return _quickened(module, info, compiling=compiling, rows=rows)
    except Exception as error:  # noqa: BLE001 -- whatever a user's model does: without the copy it runs as before
        _refuse(info, f"{type(error).__name__}: {error}")
        return None


def _refuse(info: ModelInfo, reason: str) -> None:
    instead = "as it is" if info.precision == "float32" else f"in {info.precision} by autocast, which is slower"
    log.info("model %s runs %s: no quicker copy of it can be made (%s)", info.name, instead, reason)


def _quickened(module: nn.Module, info: ModelInfo, *, compiling: bool, rows: int) -> Quick | None:
    dtype: torch.dtype = getattr(torch, info.precision)
    image = layout.images(info, 1)
    with torch.no_grad():
        uses, expected = used(module, info.default_layer, image)
        pairs = _pairs(module, uses)
        sites = onednn.sites(module, uses, dict(pairs)) if onednn.usable(info.device, dtype) else []
        tail = _tail(module, uses)
        short = partial_to(module, info, image, tail)
        if dtype == torch.float32 and not (pairs or sites or tail or short or compiling):
            return None
        quick = _copied(module, uses, pairs, dtype)
        _hasten(quick, tail, _spread(module, uses) if dtype != torch.float32 else [], short)
        if dtype != torch.float32:
            quick.get_submodule(info.default_layer).register_forward_hook(_in_full)

        def off() -> str:
            return too_far(output_of(quick, info.default_layer, image.to(dtype)), expected, APART[dtype])

        if reason := off():
            _refuse(info, reason)
            return None
        nothing = Direct(quick, (), set())
        direct = _direct(quick, module, sites, off) or nothing
    weights = _own_kernels(quick, module)
    last = layout.is_channels_last_faster(quick, info, weights, dtype=dtype, rows=rows)
    parts = _compiled(quick, info, dtype, direct, channels_last=last) if compiling else ()
    if not parts:
        direct.settle()
    return Quick(quick, _behind(info, short), dtype, len(pairs), parts, nothing if parts else direct, last)


def _own_kernels(quick: nn.Module, module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of convolutions that a copy does not share with the model."""
    shared = {id(one) for one in module.parameters()}
    return [one for one in quick.parameters() if one.dim() == _KERNEL and id(one) not in shared]


def _direct(quick: nn.Module, module: nn.Module, sites: Sequence[Site], off: Callable[[], str]) -> Direct | None:
    """Ask oneDNN for what a copy computes before the layer, if that works and says the same."""
    direct = None
    try:
        direct = Direct(quick, sites, {id(one) for one in module.parameters()})
        direct.on()
        reason = off()
    except Exception as error:  # noqa: BLE001 -- whatever oneDNN complains about: torch can do it
        reason = f"{type(error).__name__}: {error}"
    if not reason:
        return direct
    log.info("oneDNN is not asked directly: %s", reason)
    if direct:
        direct.off()
    return None


def _compiled(
    quick: nn.Module, info: ModelInfo, dtype: torch.dtype, direct: Direct, *, channels_last: bool
) -> tuple[str, ...]:
    """Compile a copy where that can be done and pays; return the names of its modules that are compiled."""
    if reason := missing(info.device):
        log.warning("model %s runs without being compiled: %s", info.name, reason)
        return ()
    log.info("compiling model %s, which can take minutes", info.name)
    batches = [layout.images(info, rows, channels_last=channels_last).to(dtype) for rows in ROWS]
    found = compiled(quick, info.default_layer, batches, APART[dtype], direct)
    for name, reason in found.failed.items():
        log.warning("%s of model %s runs without being compiled: %s", name, info.name, reason)
    if found.reason:
        log.warning("model %s runs without being compiled: %s", info.name, found.reason)
    else:
        parts = ", ".join(found.parts)
        log.info("model %s: %s compiled in %.0f s: %.2f of the time", info.name, parts, found.seconds, found.share)
    return found.parts


def _behind(info: ModelInfo, short: Collection[str]) -> frozenset[str]:
    """Return the layers that finish with the default one or after it, and before anything that is left out."""
    names = list(info.layers)
    start = names.index(info.default_layer)
    stops = (place for place, name in enumerate(names) if any(f"{name}.".startswith(f"{one}.") for one in short))
    return frozenset(names[start : min(stops, default=None)])


def _in_full(_layer: nn.Module, _args: Any, output: Any) -> Any:
    """Let the model go on in float32: the forward hook of the default layer of a copy in half precision."""
    return pytree.tree_map(lambda part: part.float() if _is_number(part) else part, output)


def _is_number(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


# --- batch norms, folded ---


def _pairs(module: nn.Module, uses: Uses) -> list[Pair]:
    """Find the batch norms that can be folded into the convolution before them."""
    convolutions = {
        id(one.weight): name for name, one in module.named_modules() if isinstance(one, nn.Conv2d) and not hooked(one)
    }
    norms = {id(one.running_mean): name for name, one in module.named_modules() if _is_norm(one)}
    found = []
    for output, (mean, _) in uses.normed.items():
        weight = uses.mapped.get(output)
        convolution, norm = convolutions.get(id(weight)), norms.get(id(mean))
        once = uses.takers[output] == uses.before[id(weight)] == uses.before[id(mean)] == 1
        if convolution and norm and once and _all_before(module, (convolution, norm), uses):
            found.append((convolution, norm))
    return found


def _is_norm(module: nn.Module) -> bool:
    known = type(module) in (nn.BatchNorm2d, timm.layers.BatchNormAct2d)
    return known and isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and not hooked(module)


def _all_before(module: nn.Module, pair: Pair, uses: Uses) -> bool:
    convolution, norm = _both(module, pair)
    return all(uses.only_before(one) for one in (*convolution.parameters(), *norm.parameters()))


def _fused(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a convolution and the batch norm behind it together, computed in float64."""
    mean, variance = cast("Tensor", norm.running_mean).double(), cast("Tensor", norm.running_var).double()
    scale = (variance + norm.eps).rsqrt() * (norm.weight if norm.affine else 1)
    bias = -mean if convolution.bias is None else convolution.bias - mean
    shift = bias * scale + (norm.bias if norm.affine else 0)
    return (convolution.weight * scale[:, None, None, None]).float(), shift.float()


def _behind_norm(norm: nn.Module) -> nn.Module:
    """Return what remains of a batch norm without the normalisation, by the same names."""
    if not isinstance(norm, timm.layers.BatchNormAct2d):
        return nn.Identity()
    return nn.Sequential(OrderedDict(drop=norm.drop, act=norm.act))


# --- the copy ---


def _copied(module: nn.Module, uses: Uses, pairs: Collection[Pair], dtype: torch.dtype) -> nn.Module:
    """Copy a model; what is used only before the layer is converted, the rest shared with the model."""
    halved = (*_tail(module, uses), *_spread(module, uses)) if dtype != torch.float32 else ()
    memo: dict[int, Any] = {}
    for one in (*module.parameters(), *module.buffers()):
        memo[id(one)] = _converted(one, dtype) if uses.only_before(one) and one.is_floating_point() else one
    for name in halved:
        memo |= {id(one): _converted(one, dtype) for one in module.get_submodule(name).parameters()}
    folded = [(name, norm, *_fused(*_both(module, (name, norm)))) for name, norm in pairs]
    for name, _, weight, _ in folded:
        memo[id(module.get_submodule(name).weight)] = _parameter(weight, dtype)
    quick = copy.deepcopy(module, memo)
    for name, norm, _, bias in folded:
        quick.get_submodule(name).bias = _parameter(bias, dtype)
        quick.set_submodule(norm, _behind_norm(quick.get_submodule(norm)))
    return quick.eval().requires_grad_(requires_grad=False)


def _hasten(quick: nn.Module, tail: Sequence[str], linear: Sequence[str], short: Mapping[str, int]) -> None:
    """Have modules behind the layer called otherwise: attentions, linear maps, and what is run on the prefix alone."""
    for name in tail:
        attention: Any = quick.get_submodule(name)
        attention.forward = functools.partial(_attend, attention, attention.forward, asking=short.get(name))
    for name in linear:
        part: Any = quick.get_submodule(name)
        part.forward = functools.partial(_map, part, part.forward)
    for name, prefix in short.items():
        if name not in tail:
            one: Any = quick.get_submodule(name)
            one.forward = functools.partial(on_prefix, one.forward, prefix)


def _both(module: nn.Module, pair: Pair) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution, norm = (module.get_submodule(name) for name in pair)
    return cast("nn.Conv2d", convolution), cast("nn.BatchNorm2d", norm)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a weight; one that needs no change is shared with the model."""
    if tensor.dtype == dtype:
        return tensor
    return _parameter(tensor, dtype) if isinstance(tensor, nn.Parameter) else tensor.to(dtype)


def _parameter(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    order = torch.channels_last if tensor.dim() == _KERNEL else torch.preserve_format
    return nn.Parameter(tensor.detach().to(dtype, memory_format=order), requires_grad=False)


def _tail(module: nn.Module, uses: Uses) -> list[str]:
    """Return the attentions behind the layer that can be called otherwise."""
    return [
        name
        for name, one in module.named_modules()
        if type(one) is nn.MultiheadAttention and _is_plain(one) and uses.after[id(one.in_proj_weight)]
    ]


def _spread(module: nn.Module, uses: Uses) -> list[str]:
    """Return the linear maps over all tokens behind the layer."""
    return [
        name
        for name, one in module.named_modules()
        if type(one) is nn.Linear and id(one.weight) in uses.spread and uses.after[id(one.weight)] == 1
    ]


def _map(linear: nn.Linear, otherwise: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Map tokens in the precision of the weights, and return them in their own."""
    return otherwise(tokens.to(linear.weight.dtype)).to(tokens.dtype)


def _is_plain(attention: nn.MultiheadAttention) -> bool:
    more = attention.bias_k is not None or attention.add_zero_attn
    return attention.batch_first and attention.kdim == attention.vdim == attention.embed_dim and not more


def _attend(
    attention: nn.MultiheadAttention,
    otherwise: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    asking: int | None = None,
    **more: Any,
) -> Any:
    """Attend to oneself without a mask, images first; anything else as the module would.

    Torch's own way puts the tokens first, and going back through that copies all three projections. Where only the
    first tokens are asking, what the others get is 0.
    """
    asked = {name: one for name, one in more.items() if one is not None and name != "average_attn_weights"}
    given = query.to(attention.in_proj_weight.dtype)
    if not (query is key is value) or query.dim() != 3 or asked != {"need_weights": False}:  # noqa: PLR2004 -- [B,N,C]
        mixed, weights = otherwise(given, key.to(given.dtype), value.to(given.dtype), **more)
        return mixed.to(query.dtype), weights
    alone = [] if asking is None else _heads(attention, given[:, :asking], 0, 1)
    mixed = _mixed(*alone, *_heads(attention, given, len(alone), 3))
    return padded(attention.out_proj(mixed.transpose(1, 2).flatten(2)).to(query.dtype), query.shape[1]), None


def _heads(attention: nn.MultiheadAttention, tokens: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return projections of tokens, [B,heads,N,c] each: from one up to another of queries, keys and values."""
    rows = slice(start * attention.embed_dim, stop * attention.embed_dim)
    bias = cast("Tensor | None", attention.in_proj_bias)
    projected = functional.linear(tokens, attention.in_proj_weight[rows], None if bias is None else bias[rows])
    heads = projected.view(*tokens.shape[:2], -1, attention.num_heads, attention.head_dim)
    return list(heads.permute(2, 0, 3, 1, 4))


def _mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Mix values [B,heads,N,c] by softmax(q kᵀ / √c)."""
    if query.device.type != "cpu" or query.dtype == torch.float32:
        return functional.scaled_dot_product_attention(query, key, value)
    # On a CPU the fused way back takes three times as long in half precision.
    return (query / math.sqrt(query.shape[-1]) @ key.transpose(-2, -1)).softmax(-1) @ value
