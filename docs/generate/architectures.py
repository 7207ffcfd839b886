"""Write docs/architectures.md: explain every architecture with no layer named, and compare the map with autograd's.

    python docs/generate/architectures.py               # all architectures: half an hour on two cores
    python docs/generate/architectures.py swin timm:vit # only names that contain a word; the other rows stay
    python docs/generate/architectures.py hf:           # detectors and segmentation models of transformers

After writing the page, the script fails if an architecture cannot be loaded or explained, if its map is zero, or if the
map differs from that of a few lines of autograd.
"""

import gc
import importlib
import logging
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows
from torchvision import models as zoo

from camserve_server.engine import Engine, normalise
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel, load, parse
from camserve_server.models.values import Layout, Pass
from camserve_server.targets import whole
from camserve_server.targets.values import ClassTarget, RankTarget, SegmentTarget, SimilarityTarget, Target

PAGE = Path(__file__).parent.parent / "architectures.md"
MAX_DEVIATION = 1e-5
CLASS_INDEX = 7

# At least one architecture of every module of timm 1.0 with image classifiers; the smallest, if they differ only in
# size. A question mark precedes an option, for architectures that are slow at their own size.
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

IMAGE_TEXT = ("clip", "siglip", "siglip2")
TESTS = Path(__file__).parents[2] / "tests"

SIZE_OPTIONS = {"regnet_y_128gf": "?size=224"}  # 12 GB at its own 384 pixels

TEXT = """\
# Architectures

This page is for you if you want to know which layer of a model camserve explains by default, and why. It lists the
default layer of {count} architectures of torchvision, timm and transformers. To see the layers of your own model, run
`camserve layers`.

## How the layer is chosen

The default layer is the last module to finish that meets all of these conditions:

1. Its output has a grid over the image with more than one cell.
2. The gradient of the [score](glossary.md#score) at its output is not zero. (In the last block of a transformer with a
   class token, only the class token reaches the score after the block's first norm.)
3. It is not inside an attention: queries, keys and values alone are not features of the image.
4. If its output is tokens, it is a norm or a module with children, such as a block. A single linear map does not count.
5. It changes its input. An identity, a dropout or a permutation does not, so the module before it is used.

A request can name any other layer with a grid and a gradient. The table has the number of these layers. After the last
of them, an output of one cell, such as a pooled one, can be named too: its map is one value, with the verdict `flat`.

## How the grid is found

camserve must know which axes of a layer's output are the rows and columns of the image. It has no table of
architectures, but runs the model on four versions of an image: without noise, with noise that fades from top to bottom,
with noise that fades from left to right, and with noise that does not fade. Where fading noise is weaker, it changes
the output less than the noise that does not fade. So the change decreases along the rows with the first fading noise,
and along the columns with the second. This also shows how many class, distillation and register tokens come first, and
whether tokens are in the image's order.

In some layers the changes show no positions, for example after attention with random weights. Such a layer gets the
grid of other layers with the same shape, or the only grid that its shape allows. Layers with the same number of tokens
get the grid that most of them show. Any other layer is refused, with the reason:

| layer | refused because |
|---|---|
| windows of a Swin or a MaxViT, patches of a MobileViT; position tables | its first axis is not the batch |
| attention matrices; the tokens of a Hiera before its last stage, which follow its windows | not in the image's order |
| outputs of heads and squeezes; queries and keys per head | no grid over the image |
| hidden layers of a Mixer's token mixing; the states of a state space | neither the shape nor the run shows a grid |
| layers after the last norm through which patches reach a class token | every gradient there is zero |
| the decoder of a DETR, and the queries of a Mask2Former | one token per object, not per place |

## Differences from timm's preprocessing

If a timm configuration uses the crop mode `center` for a shape that is not square, camserve resizes the photo to that
shape and does not crop it. A configuration with `crop_mode="border"` is refused, because it adds borders that are not
part of the photo.

## Results

{count} architectures; the largest deviation is {worst}. Written by `make architectures`
({versions}).

Each model has random weights; those of transformers (`hf:`) are small configurations. Each is explained by Grad-CAM at
its default layer, for one class, object or embedding and one image of noise. *Deviation* is the largest difference
from a reference map at the same layer, as a share of that map's largest value. The reference uses a forward hook,
`torch.autograd.grad` and the paper's formula in float64. The script fails if a map deviates by more than 1e-5 or is
zero.

| model | default layer | grid | layout | prefix tokens | layers with a grid | deviation |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """An architecture and its results: a row of the table."""

    model: str
    layer: str
    layout: Layout
    layers: int
    deviation: float

    def row(self) -> str:
        """Return the row in Markdown."""
        grid = f"{self.layout.height} x {self.layout.width}"
        cells = (f"`{self.model}`", f"`{self.layer}`", grid, self.layout.axes, self.layout.prefix, self.layers)
        return f"| {' | '.join(map(str, cells))} | {self.deviation:.0e} |"


def names() -> list[str]:
    """Return the model specs of all architectures."""
    small = small_models()
    transformers_names = (*small.DETECTORS, *small.SEGMENTERS, *small.UNIVERSAL, *IMAGE_TEXT)
    torchvision_names = [f"torchvision:{name}{SIZE_OPTIONS.get(name, '')}" for name in zoo.list_models(module=zoo)]
    return [*torchvision_names, *(f"timm:{name}" for name in TIMM), *(f"hf:{name}" for name in transformers_names)]


def examine(name: str) -> Explanation:
    """Load a model, explain it, and compare the map with autograd's.

    Raises:
        ConfigError: the model cannot be loaded.
        ArithmeticError: the map is zero, or differs from autograd's.
    """
    model = load_random(name)
    info = model.info
    layer = info.layers[info.default_layer]
    if layer.layout is None:
        raise ArithmeticError(f"{name}: the default layer {layer.name} cannot be explained")
    image = np.random.default_rng(0).integers(0, 256, (*info.preprocess.size, 3), np.uint8)
    (result,) = Engine({info.name: model}).run(
        Pass(info.name, "cam", info.preprocess.size, (layer.name,)),
        [Row(image, target_for(model), (MethodCall("gradcam"),))],
    )
    heatmap, expected = result.maps[0][0].astype(np.float64), oracle(model, image, layer.layout)
    if not np.abs(expected).max() > 0:
        raise ArithmeticError(f"{name}: the map at {layer.name} is zero")
    deviation = float(np.abs(heatmap - expected).max() / np.abs(expected).max())
    if not deviation <= MAX_DEVIATION:
        raise ArithmeticError(f"{name}: the map at {layer.name} deviates by {deviation:.1e}")
    explainable = sum(other.layout is not None and other.layout.cells > 1 for other in info.layers.values())
    return Explanation(name, layer.name, layer.layout, explainable, deviation)


def small_models() -> Any:
    """Return the module with small models of transformers, which takes seconds to import."""
    sys.path.append(str(Path(__file__).parent))
    return importlib.import_module("small_transformers")


def load_random(name: str) -> LoadedModel:
    """Load a model with random weights; one of transformers as a small configuration saved in a folder."""
    source, _, arch = name.partition(":")
    if source != "hf":
        return load(parse(f"{name}{'&' if '?' in name else '?'}weights=none"))
    with tempfile.TemporaryDirectory() as folder:
        if arch in IMAGE_TEXT:
            sys.path.insert(0, str(TESTS))
            maker = importlib.import_module("models.image_text_folders")
            saved = maker.save(small_models().hf, arch, Path(folder) / arch)
        else:
            saved = small_models().save(arch, Path(folder))
        return load(parse(f"hf:{saved}"))


def target_for(model: LoadedModel) -> Target:
    """Return a class, a class all over a segmentation, the most certain object, or the similarity to an embedding."""
    targets: dict[str, Target] = {
        "segment": SegmentTarget(0, whole(model.info.preprocess.size)),
        "detect": RankTarget(0),
        "embed": SimilarityTarget(reference=reference(model)),
    }
    return targets.get(model.info.task, ClassTarget(CLASS_INDEX))


def reference(model: LoadedModel) -> np.ndarray:
    """Return the embedding with which those of images are compared, [E]."""
    return np.random.default_rng(1).standard_normal(model.info.classes, np.float32)


def score(model: LoadedModel, output: Any) -> torch.Tensor:
    """Return the score of that target in the output of a model."""
    if model.info.task == "detect":
        best: torch.Tensor = output[0]["scores"].max()
        return best
    logits: torch.Tensor = output["out"] if isinstance(output, dict) and "out" in output else output
    logits = getattr(logits, "logits", logits)
    if model.info.task == "embed":
        return torch.cosine_similarity(logits[0], torch.from_numpy(reference(model)), dim=0)
    return logits[0, 0].mean() if model.info.task == "segment" else logits[0, CLASS_INDEX]


def oracle(model: LoadedModel, image: np.ndarray, layout: Layout) -> np.ndarray:
    """Compute Grad-CAM [h,w] in float64 in the simplest way: a leaf at the layer, and autograd."""
    leaves: list[torch.Tensor] = []

    def make_leaf(_module: nn.Module, _args: object, output: object) -> object:
        (first, *others), structure = pytree.tree_flatten(output)
        leaves[:] = [first.detach().requires_grad_()]
        clone = leaves[0].clone(memory_format=torch.contiguous_format)
        return pytree.tree_unflatten([clone, *others], structure)

    handle = model.module.get_submodule(model.info.default_layer).register_forward_hook(make_leaf)
    output = model.module(normalise(torch.from_numpy(image)[None], model.info.preprocess))
    (gradient,) = torch.autograd.grad(score(model, output), leaves)
    handle.remove()
    return formula(leaves[0].detach(), gradient, layout)


def formula(activations: torch.Tensor, gradients: torch.Tensor, layout: Layout) -> np.ndarray:
    """Compute L = Σ_k mean(g_k) A_k (Selvaraju et al. 2017, eq. 1 and 2, before the ReLU) in float64, [h,w]."""
    a, g = (tensor.double().numpy()[0] for tensor in (activations, gradients))
    if layout.axes == "nchw":
        a, g = a.transpose(1, 2, 0), g.transpose(1, 2, 0)
    elif layout.axes == "tokens":
        cells = slice(layout.prefix, layout.tokens - layout.suffix)
        a, g = (tokens[cells].reshape(layout.height, layout.width, -1) for tokens in (a, g))
    return a @ g.mean((0, 1))


def existing_rows() -> dict[str, str]:
    """Return the rows of the existing page, by model."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    return {row.split("`")[1]: row for row in re.findall(r"^\| `\w+:.*\|$", text, re.MULTILINE)}


def write(rows: dict[str, str]) -> None:
    """Write the page, with the rows in the order of `names`."""
    import timm  # noqa: PLC0415 -- only for its version
    import torchvision  # noqa: PLC0415 -- the same
    import transformers  # noqa: PLC0415 -- the same

    table = [rows[name] for name in names() if name in rows]
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    versions += f", timm {timm.__version__}, transformers {transformers.__version__}"
    worst = max((row.split("|")[-2].strip() for row in table), key=float, default="0")
    text = TEXT.format(versions=re.sub(r"\+\w+", "", versions), count=len(table), worst=worst)
    PAGE.write_text(text + "\n".join(table) + "\n", encoding="utf-8")


def main(words: Iterable[str]) -> int:
    """Examine the architectures whose names contain one of the words, or all; return the number of failures."""
    words = tuple(words)
    logging.disable(logging.WARNING)
    rows, failed = existing_rows() if words else {}, 0
    for name in names():
        if words and not any(word in name for word in words):
            continue
        start = time.monotonic()
        try:
            rows[name] = examine(name).row()
            print(f"{time.monotonic() - start:6.1f} s  {rows[name]}", flush=True)
        except Exception as error:  # noqa: BLE001 -- continue with the other architectures
            rows.pop(name, None)
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        write(rows)
        gc.collect()
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
