"""Measure explanations relative to plain forward passes: camserve's engine and three libraries."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from benchmarks.results import Part, Table
from benchmarks.scale import CONVNEXT, MOBILENET, RESNET, VIT, Scale
from benchmarks.timing import Run, in_turn, ratio
from camserve_server import models
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models.spec import OPTIONS
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget

Cells: TypeAlias = tuple[str, ...]

CLASS = 3
LAYERS = {CONVNEXT: "features.7", MOBILENET: "features", VIT: "encoder.layers.encoder_layer_11.ln_1"}
"""The layers that the libraries are given: camserve's default, or one with the same grid."""

PLAIN, PLAIN_LAST, PLAIN_HALF = "plain", "plain, channels_last", "plain, bfloat16"
OURS, OURS_HALF, COMPILED = "camserve", "camserve, bfloat16", "camserve, bfloat16, compiled"
GRAD_CAM, TORCHCAM, CAPTUM, HOOKS = "pytorch-grad-cam", "torchcam", "Captum", "hooks on the layer"


@dataclass(frozen=True, slots=True)
class Ours:
    """A model as camserve runs it, and what it is asked."""

    model: models.LoadedModel
    layer: str

    @classmethod
    def of(cls, spec: str, layer: str = "") -> "Ours":
        """Load a model."""
        loaded = models.load(models.parse(spec))
        return cls(loaded, layer or loaded.info.default_layer)

    def batch(self, rows: int, seed: int = 0) -> Run:
        """Return a function that explains a number of images by Grad-CAM, from uint8 to maps."""
        info, engine = self.model.info, Engine({self.model.info.name: self.model})
        images = np.random.default_rng(seed).integers(0, 256, (rows, *info.preprocess.size, 3), np.uint8)
        asked = [Row(image, ClassTarget(CLASS), (MethodCall("gradcam"),)) for image in images]
        pass_ = Pass(info.name, "cam", info.preprocess.size, (self.layer,))
        return lambda: engine.run(pass_, asked)


def made(name: str, size: int) -> nn.Module:
    """Make a model with random weights, frozen."""
    sized = {"image_size": size} if name.startswith("vit") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **sized).eval()
    return model.requires_grad_(requires_grad=False)


def _bearing_hooks(model: nn.Module) -> nn.Module:
    """Undo what hooks on a layer do not bear: modules that change their input in place."""
    for part in model.modules():
        if hasattr(part, "inplace"):
            setattr(part, "inplace", False)  # noqa: B010 -- the attribute is there, but torch types it as a module
    return model


def plain(model: nn.Module, images: Tensor) -> Run:
    """Return a function that only predicts."""

    def run() -> None:
        with torch.inference_mode():
            model(images)

    return run


def plainly(name: str, size: int, rows: int) -> dict[str, Run]:
    """Return plain forward passes: as a user runs them, and in the best layout of each precision."""
    images, last = torch.randn(rows, 3, size, size), torch.channels_last
    half = torch.bfloat16
    return {
        PLAIN: plain(made(name, size), images),
        PLAIN_LAST: plain(made(name, size).to(memory_format=last), images.to(memory_format=last)),
        PLAIN_HALF: plain(made(name, size).to(half).to(memory_format=last), images.to(half).to(memory_format=last)),
    }


def _tokens(values: Tensor) -> Tensor:
    """Leave the class token out of what a vision transformer's layer returns, and make a grid of the rest."""
    side = int((values.shape[1] - 1) ** 0.5)
    return values[:, 1:].reshape(len(values), side, side, -1).permute(0, 3, 1, 2)


def peers(name: str, layer: str, size: int, rows: int) -> dict[str, Run]:
    """Return Grad-CAM by the libraries, each on a model of its own as its documentation says."""
    from captum.attr import LayerGradCam  # noqa: PLC0415 -- the small forms of the harness do without them
    from pytorch_grad_cam import GradCAM  # noqa: PLC0415
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget  # noqa: PLC0415
    from torchcam.methods import GradCAM as TorchCam  # noqa: PLC0415

    images = torch.randn(rows, 3, size, size)
    ours, extractor_model, theirs = (_bearing_hooks(made(name, size)) for _ in range(3))
    for model in (ours, extractor_model):
        model.requires_grad_(requires_grad=True)
    reshape = _tokens if name.startswith("vit") else None
    grad_cam = GradCAM(ours, [ours.get_submodule(layer)], reshape)
    extractor = TorchCam(extractor_model, layer)
    captum = LayerGradCam(theirs, theirs.get_submodule(layer))
    given = images.clone().requires_grad_()  # else nothing before the layer would ask for a gradient
    targets: list[Any] = [ClassifierOutputTarget(CLASS)] * rows
    return {
        GRAD_CAM: lambda: grad_cam(input_tensor=images, targets=targets),
        TORCHCAM: lambda: extractor([CLASS] * rows, extractor_model(images)),
        CAPTUM: lambda: captum.attribute(given, CLASS),
        HOOKS: _on_the_layer(_bearing_hooks(made(name, size)), layer, images),
    }


def _on_the_layer(model: nn.Module, layer: str, images: Tensor) -> Run:
    """Cut the graph at the layer's input, and hang a full backward hook on the layer: camserve's probe replaced it."""
    target = model.get_submodule(layer)

    def run() -> None:
        seen: list[Tensor | None] = []
        with (
            target.register_forward_pre_hook(lambda _layer, args: (args[0].detach().requires_grad_(), *args[1:])),
            target.register_full_backward_hook(lambda _layer, _inputs, outputs: seen.extend(outputs)),
        ):
            model(images)[:, CLASS].sum().backward()

    return run


def ours(scale: Scale, name: str, rows: int) -> dict[str, Run]:
    """Return camserve in two precisions, and compiled where that is wanted and there is such an option."""
    runs = {
        OURS: Ours.of(scale.spec(name)).batch(rows),
        OURS_HALF: Ours.of(scale.spec(name, "bfloat16")).batch(rows),
    }
    if scale.compiled and "compile" in OPTIONS:
        runs[COMPILED] = Ours.of(scale.spec(name, "bfloat16") + "&compile=true").batch(rows)
    return runs


def _alive(runs: dict[str, Run], failed: list[str]) -> dict[str, Run]:
    """Leave out, in words, what cannot do this model at all."""
    alive = {}
    for name, run in runs.items():
        try:
            run()
            alive[name] = run
        except Exception as error:  # noqa: BLE001 -- whatever it is, the others are measured
            failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    return alive


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Time every model at every batch size."""
    part, rows, costs, failed = Part("engine"), list[Cells](), list[Cells](), list[str]()
    for name in scale.models:
        for batch in scale.batches:
            runs = plainly(name, scale.size, batch) | ours(scale, name, batch)
            if scale.peers:
                layer = LAYERS.get(name, "layer4")
                runs |= _alive(peers(name, layer, scale.size, batch), failed)
            turns = in_turn(runs, scale.rounds * (3 if batch == 1 else 1))
            first = (name, str(batch), f"{batch / statistics.median(turns.wall[PLAIN]):.1f}")
            rows.append((*first, *_cells(turns.wall)))
            costs.append((*first, *_cells(turns.cpu)))
            say(f"engine: {', '.join(rows[-1])}")
            _hold(part, name, batch, turns.wall)
    part.tables += [_speeds(rows, failed, scale), _costs(costs)]
    return part


_FIRST = ("model", "batch", "plain images/s")
_COLUMNS = (PLAIN_LAST, PLAIN_HALF, OURS, OURS_HALF, COMPILED, GRAD_CAM, TORCHCAM, CAPTUM, HOOKS)


def _cells(took: dict[str, list[float]]) -> list[str]:
    return [f"{ratio(took[PLAIN], took[name]):.2f}" if name in took else "–" for name in _COLUMNS]


def _costs(rows: list[Cells]) -> Table:
    note = "The same by processor time: what a machine that does other things beside disturbs less than speed."
    return Table("Processor time of a plain forward pass over that of each", (*_FIRST, *_COLUMNS), rows, (note,))


def _speeds(rows: list[Cells], failed: list[str], scale: Scale) -> Table:
    title = f"Speed over that of a plain float32 forward pass; the higher the better, median of {scale.rounds} rounds"
    notes = ("`hooks on the layer` cuts the graph as camserve does, but by torch's own full backward hook.",)
    return Table(title, (*_FIRST, *_COLUMNS), rows, notes + tuple(failed))


@dataclass(frozen=True, slots=True)
class _Bars:
    """Target speeds of one model relative to others, in float32 and in bfloat16."""

    plain: float = 1.0
    grad_cam: float = 4.0
    torchcam: float = 1.25
    half: float = 0.9
    half_grad_cam: float | None = None


_BARS = {
    RESNET: _Bars(half_grad_cam=10.0),
    MOBILENET: _Bars(),
    CONVNEXT: _Bars(grad_cam=3.5, torchcam=1.03),
    VIT: _Bars(plain=0.85, half=0.85, grad_cam=0.0, torchcam=0.0),
}


def _hold(part: Part, name: str, batch: int, seconds: dict[str, list[float]]) -> None:
    """Hold one row to its bars, which are for batches of 8 and 32."""
    if name not in _BARS or batch == 1:
        return
    bars, where = _BARS[name], f"{name}, batch {batch}"
    for what, least, slow, fast in (
        ("camserve / plain, float32", bars.plain, PLAIN, OURS),
        ("camserve / pytorch-grad-cam, float32", bars.grad_cam, GRAD_CAM, OURS),
        ("camserve / torchcam, float32", bars.torchcam, TORCHCAM, OURS),
        ("camserve / best plain, bfloat16", bars.half, PLAIN_HALF, OURS_HALF),
        ("camserve bfloat16 / pytorch-grad-cam", bars.half_grad_cam, GRAD_CAM, OURS_HALF),
    ):
        if least and slow in seconds:
            part.at_least(f"{where}: {what}", least, ratio(seconds[slow], seconds[fast]))
