"""What a capture costs: the probe behind the layer, hooks on the layer itself, and the peers, against a plain forward.

All of them compute a class's gradient at a layer of a model with random weights, for the same batch.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from captum.attr import LayerGradCam
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torchcam.methods import GradCAM as TorchCam

from camserve_server.hooks import watching

ROUNDS, BATCH, CLASS = 7, 8, 3
CASES = (("resnet50", "layer4"), ("resnet50", "layer3"), ("mobilenet_v3_large", "features"))

Timed = dict[str, Callable[[], object]]


def on_the_layer(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """Cut the graph at the layer's input by a forward pre-hook, and hang the full backward hook on the layer."""
    seen: list[Tensor] = []
    target = model.get_submodule(layer)
    with (
        target.register_forward_pre_hook(lambda _layer, args: (args[0].detach().requires_grad_(),)),
        target.register_full_backward_hook(lambda _layer, _inputs, outputs: seen.append(outputs[0])),
    ):
        model(images)[:, CLASS].sum().backward()
    return seen[0]


def behind_the_layer(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """Capture as camserve does."""
    with watching({layer: model.get_submodule(layer)}) as captures:
        model(images)[:, CLASS].sum().backward()
    gradient = captures[layer].gradient
    if gradient is None:
        raise RuntimeError("no gradient came back")
    return gradient


def plain(model: nn.Module, images: Tensor) -> Tensor:
    """Predict only."""
    with torch.inference_mode():
        logits: Tensor = model(images)
    return logits


def peers(name: str, layer: str, images: Tensor) -> Timed:
    """Grad-CAM by the libraries, each on a model of its own as its documentation says."""
    theirs, ours = made(name), made(name).requires_grad_(requires_grad=True)
    grad_cam = GradCAM(ours, [ours.get_submodule(layer)])
    targets = [ClassifierOutputTarget(CLASS)] * BATCH
    captum = LayerGradCam(theirs, theirs.get_submodule(layer))
    extractor_model = made(name).requires_grad_(requires_grad=True)
    extractor = TorchCam(extractor_model, layer)
    return {
        "pytorch-grad-cam": lambda: grad_cam(input_tensor=images, targets=targets),
        "torchcam": lambda: extractor([CLASS] * BATCH, extractor_model(images)),
        "captum": lambda: captum.attribute(images, CLASS),
    }


def made(name: str) -> nn.Module:
    """Make a model with random weights, frozen, without in-place modules (hooks on a layer do not bear them)."""
    model: nn.Module = torchvision.models.get_model(name, weights=None).eval()
    for part in model.modules():
        if hasattr(part, "inplace"):
            setattr(part, "inplace", False)  # noqa: B010 -- the attribute is there, but torch types it as a module
    return model.requires_grad_(requires_grad=False)


def ratios(timed: Timed) -> dict[str, float]:
    """Time everything in turn; return the median of each one's ratio to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(ROUNDS + 1):
        for name, run in timed.items():
            began = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    base = next(iter(seconds.values()))
    return {name: statistics.median(a / b for a, b in zip(some, base, strict=True)) for name, some in seconds.items()}


def main() -> None:
    """Print a row for each case: time over that of a plain forward pass, lower is better."""
    print(f"capture: time / plain forward, batch {BATCH}, float32, median of {ROUNDS} rounds in turn")
    for name, layer in CASES:
        model, images = made(name), torch.randn(BATCH, 3, 224, 224)
        timed: Timed = {
            "plain": lambda model=model, images=images: plain(model, images),
            "camserve": lambda model=model, layer=layer, images=images: behind_the_layer(model, layer, images),
            "hooks on the layer": lambda model=model, layer=layer, images=images: on_the_layer(model, layer, images),
        }
        row = ratios(timed | peers(name, layer, images))
        print(f"{name} {layer}: " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()))
