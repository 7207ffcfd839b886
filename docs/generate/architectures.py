"""Writes docs/architectures.md: every architecture explained with no layer named, against autograd.

    python docs/generate/architectures.py               # all of them: half an hour on two cores
    python docs/generate/architectures.py swin timm:vit # those whose name holds a word; the other rows stay

Fails, after having written what it found, if an architecture cannot be loaded or explained, if its map is zero, or if
the map is not that of a few lines of autograd.
"""

import gc
import logging
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchvision import models as zoo

from camserve_server.engine import Engine, normalise
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel, load, parse
from camserve_server.models.values import Layout, Pass
from camserve_server.targets.values import ClassTarget

PAGE = Path(__file__).parent.parent / "architectures.md"
EXACT = 1e-5
INDEX = 7

# At least one architecture of every module of timm 1.0 that holds classifiers of images, the smallest where they
# differ in size alone. What follows a question mark is an option, for those that are slow at their own size.
TIMM = """\
beit_base_patch16_224 beitv2_base_patch16_224 eca_botnext26ts_256 eca_halonext26ts lambda_resnet26t mobileone_s0
gernet_s repvgg_a0 resnet50_clip cait_xxs24_224 coat_tiny coat_lite_tiny convit_tiny convmixer_1024_20_ks9_p14
convnext_atto convnextv2_atto convnext_zepto_rms cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_s cspnext_tiny
davit_tiny deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224 densenet121 dla46_c dpn68
edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 tf_efficientnetv2_b0 mnasnet_small
mobilenetv2_050 mobilenetv4_conv_small mobilenetv4_hybrid_medium mixnet_s fbnetc_100 efficientvim_m1 efficientvit_b0
efficientvit_m1 eva02_tiny_patch14_224 vit_tiny_patch16_dinov3_qkvb vit_pe_spatial_tiny_patch16_512?size=256
fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 ghostnetv2_100 ghostnetv3_050 hardcorenas_b
hgnetv2_b0 hgnet_tiny hiera_tiny_224 hiera_small_abswin_256 hieradet_small hrnet_w18_small iformer_t inception_next_atto
inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small levit_128s levit_conv_128s lowformer_b0 mambaout_femto
coatnet_pico_rw_224 coatnext_nano_rw_224 maxvit_pico_rw_256 maxvit_tiny_tf_224 maxxvit_rmlp_nano_rw_256 poolformer_s12
convformer_s18 caformer_s18 gmlp_ti16_224 mixer_s32_224 resmlp_12_224 mobilenetv3_small_050 lcnet_035 mobilenetv5_base
mobilevit_xxs mobilevitv2_050 mvitv2_tiny mvitv2_small_cls naflexvit_base_patch16_siglip naflexvit_base_patch16_gap
nasnetalarge nest_tiny nextvit_small nf_regnet_b0 dm_nfnet_f0 eca_nfnet_l0 pit_ti_224 pit_ti_distilled_224 pnasnet5large
pvt_v2_b0 qwen3_vit_88m?size=256 rdnet_tiny regnetx_002 regnety_002 regnetz_005 repghostnet_050 repvit_m1
res2net50_14w_8s resnest14d resnet10t seresnet18 ecaresnet26t resnetrs50 resnext26ts wide_resnet50_2 resnetv2_18
rexnet_100 rexnetr_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
swin_tiny_patch4_window7_224 swin_s3_tiny_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224
tnt_s_patch16_224 tresnet_m twins_svt_small twins_pcpvt_small vgg11 visformer_tiny vit_tiny_patch16_224
vit_small_patch16_dinov3 vit_small_patch14_reg4_dinov2?size=224 vit_base_patch16_gap_224 vit_wee_patch16_reg1_gap_256
vit_medium_patch16_reg4_gap_256 vit_base_patch16_siglip_224 vit_base_patch32_clip_224 vit_small_patch16_36x1_224
vit_small_patch16_18x2_224 vit_tiny_r_s16_p8_224 vit_small_r26_s32_224 vit_srelpos_small_patch16_224
vit_relpos_small_patch16_rpn_224 vit_base_patch16_rope_reg1_gap_256 samvit_base_patch16_224 vitamin_small_224
volo_d1_224 ese_vovnet19b_slim legacy_xception xception41p xcit_nano_12_p16_224
""".split()  # noqa: SIM905 -- a list would be 160 lines

SMALLER = {"regnet_y_128gf": "?size=224"}  # 12 GB at its own 384 pixels

TEXT = """\
# Architectures

Written by `make architectures` ({versions}). Each was built with random weights and
explained by Grad-CAM with no layer named, for one class of one picture of noise. *Deviation* is the largest difference
from the map that a forward hook, `torch.autograd.grad` and the paper's formula in float64 give at the same layer, as a
share of that map's largest value; a map that deviates by more than 1e-5, or is zero, stops the script.

## How the layer is chosen

The default layer is the last module to finish

1. whose output has a grid over the image of more than one cell,
2. where the gradient of the score is not zero (in the last block of a transformer with a class token, behind its
   first norm only the class token reaches the score),
3. which is not inside an attention: queries, keys and values are no features of the image by themselves,
4. which is, among tokens, a norm or a module that holds others, as a block does, and no lone linear map,
5. which does something: an identity, a dropout or a permutation is named by the module whose output it passes on.

Any other layer with a grid and a gradient can be named in a request; how many there are is in the last column but one.

## How the grid is found

The model is run on an image, and on the image with noise that fades from top to bottom, with noise that fades from left
to right, and with noise that does not fade. In the right reading of a layer's output the share of the change that comes
from fading noise falls with the row, or with the column. So it is seen, and written in no table, which axes are rows
and columns, how many class, distillation and register tokens come first, and whether tokens are in the image's order.
Where no place shows, as behind attention with random weights, a layer is read as others of its shape are, or as its
shape says if that says one thing. Layers with equally many tokens have one grid, the one that most of them show. Else a
layer is refused, with the reason:

| layer | refused because |
|---|---|
| windows of a Swin or a MaxViT, patches of a MobileViT; position tables | its first axis is not the images |
| attention matrices; the tokens of a Hiera before its last stage, which follow its windows | not in the image's order |
| what a pooling, a head or a squeeze leaves; queries and keys per head | no grid over the image |
| hidden layers of a Mixer's token mixing; the states of a state space | neither the shape nor the run shows one |
| behind the last norm through which patches reach a class token | every gradient there is zero |

## What is not followed to the letter

A timm configuration that crops by `center` a shape that is not square is resized to that shape, not cropped. One with
`crop_mode="border"` is refused, as its photos would have borders which are no part of them.

## What was found

{count} architectures; the largest deviation is {worst}.

| model | default layer | grid | layout | prefix tokens | layers with a grid | deviation |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row of the table."""

    model: str
    layer: str
    layout: Layout
    layers: int
    deviation: float

    def row(self) -> str:
        """Write it as a row of the table."""
        grid = f"{self.layout.height} x {self.layout.width}"
        cells = (f"`{self.model}`", f"`{self.layer}`", grid, self.layout.axes, self.layout.prefix, self.layers)
        return f"| {' | '.join(map(str, cells))} | {self.deviation:.0e} |"


def names() -> list[str]:
    """List all architectures, as models are named on a command line."""
    ours = [f"torchvision:{name}{SMALLER.get(name, '')}" for name in zoo.list_models(module=zoo)]
    return [*ours, *(f"timm:{name}" for name in TIMM)]


def examine(name: str) -> Explanation:
    """Load a model, explain it, and compare the map with autograd's.

    Raises:
        ConfigError: it cannot be loaded.
        ArithmeticError: the map is zero, or is not autograd's.
    """
    model = load(parse(f"{name}{'&' if '?' in name else '?'}weights=none"))
    info = model.info
    layer = info.layers[info.default_layer]
    if layer.layout is None:
        raise ArithmeticError(f"{name}: the default layer {layer.name} cannot be explained")
    image = np.random.default_rng(0).integers(0, 256, (*info.preprocess.size, 3), np.uint8)
    (result,) = Engine({info.name: model}).run(
        Pass(info.name, "cam", info.preprocess.size, (layer.name,)),
        [Row(image, ClassTarget(INDEX), (MethodCall("gradcam"),))],
    )
    ours, theirs = result.maps[0][0].astype(np.float64), oracle(model, image, layer.layout)
    if not np.abs(theirs).max() > 0:
        raise ArithmeticError(f"{name}: the map at {layer.name} is zero")
    deviation = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not deviation <= EXACT:
        raise ArithmeticError(f"{name}: the map at {layer.name} deviates by {deviation:.1e}")
    explainable = sum(one.layout is not None for one in info.layers.values())
    return Explanation(name, layer.name, layer.layout, explainable, deviation)


def oracle(model: LoadedModel, image: np.ndarray, layout: Layout) -> np.ndarray:
    """Compute Grad-CAM [h,w] in float64 by what everyone would write: a leaf at the layer, and autograd."""
    kept: list[torch.Tensor] = []

    def leaf(_module: nn.Module, _args: object, output: object) -> object:
        first = output[0] if isinstance(output, tuple | list) else output
        kept[:] = [first.detach().requires_grad_()]
        through = kept[0].clone(memory_format=torch.contiguous_format)
        return type(output)([through, *output[1:]]) if first is not output else through

    handle = model.module.get_submodule(model.info.default_layer).register_forward_hook(leaf)
    logits = model.module(normalise(torch.from_numpy(image)[None], model.info.preprocess))
    (gradient,) = torch.autograd.grad(logits[0, INDEX], kept)
    handle.remove()
    return formula(kept[0].detach(), gradient, layout)


def formula(activations: torch.Tensor, gradients: torch.Tensor, layout: Layout) -> np.ndarray:
    """Compute L = Σ_k mean(g_k) A_k (Selvaraju et al. 2017, eq. 1 and 2, before the ReLU) in float64, [h,w]."""
    a, g = (one.double().numpy()[0] for one in (activations, gradients))
    if layout.axes == "nchw":
        a, g = a.transpose(1, 2, 0), g.transpose(1, 2, 0)
    elif layout.axes == "tokens":
        a, g = (one[layout.prefix :].reshape(layout.height, layout.width, -1) for one in (a, g))
    return a @ g.mean((0, 1))


def known() -> dict[str, str]:
    """Read the rows of the table that there is."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    return {row.split("`")[1]: row for row in re.findall(r"^\| `\w+:.*\|$", text, re.MULTILINE)}


def write(rows: dict[str, str]) -> None:
    """Write the page, its rows in the order of the names."""
    import timm  # noqa: PLC0415 -- for its version
    import torchvision  # noqa: PLC0415 -- the same

    table = [rows[name] for name in names() if name in rows]
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}"
    worst = max((row.split("|")[-2].strip() for row in table), key=float, default="0")
    text = TEXT.format(versions=re.sub(r"\+\w+", "", versions), count=len(table), worst=worst)
    PAGE.write_text(text + "\n".join(table) + "\n", encoding="utf-8")


def main(words: Iterable[str]) -> int:
    """Examine the architectures whose names hold one of the words, or all; return how many failed."""
    words = tuple(words)
    logging.disable(logging.WARNING)
    rows, failed = known() if words else {}, 0
    for name in names():
        if words and not any(word in name for word in words):
            continue
        start = time.monotonic()
        try:
            rows[name] = examine(name).row()
            print(f"{time.monotonic() - start:6.1f} s  {rows[name]}", flush=True)
        except Exception as error:  # noqa: BLE001 -- the others shall be seen as well
            rows.pop(name, None)
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        write(rows)
        gc.collect()
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
