"""Parity of the class activation maps."""

from dataclasses import replace

import cv2
import numpy as np
import pytorch_grad_cam
import torch
import torchcam.methods
from captum.attr import LayerGradCam
from torch import nn
from torch.nn import functional

from methods.parity import Case, cached, captured, gradients, library, unfrozen
from methods.parity.made import relu6_apart
from methods.tools import call

GRAD_CAM, TORCHCAM, CAPTUM = library("grad-cam"), library("torchcam"), library("captum")
PAPER = "the paper"

EVERYWHERE = ("efficientnet_lite0", "resnet50", "densenet121", "vgg16", "convnext_tiny", "swin_t", "vit_b_16")
CONVOLUTIONAL = EVERYWHERE[:5]
SOME = ("efficientnet_lite0", "resnet50", "swin_t")
DRAWN = "resnet18, biases drawn"
BIASED = ("efficientnet_lite0", DRAWN)
RECTIFIED = ("efficientnet_lite0", "resnet50", "vgg16")


@cached
def hooked(subject):
    """Return the activations and gradients, [1,C,h,w], that pytorch-grad-cam's hooks record."""
    with pytorch_grad_cam.GradCAM(subject.theirs, [subject.module], subject.reshape) as cam:
        cam(subject.input, subject.targets)
        seen = cam.activations_and_grads
        return seen.activations[0].numpy(), seen.gradients[0].numpy()


def grad_cam(peer, *, eigen=False, **options):
    """The raw map of a class of pytorch-grad-cam, before its ReLU."""

    def theirs(subject):
        with getattr(pytorch_grad_cam, peer)(subject.theirs, [subject.module], subject.reshape, **options) as cam:
            return cam.get_cam_image(
                subject.input, subject.module, subject.targets, *hooked(subject), eigen_smooth=eigen
            )[0]

    return theirs


def grad_cam_shapley(subject):
    """The raw map of pytorch-grad-cam's ShapleyCAM, whose graph can be gone through once."""
    results = []
    with pytorch_grad_cam.ShapleyCAM(subject.theirs, [subject.module], subject.reshape) as cam:
        weigh = cam.get_cam_image
        cam.get_cam_image = lambda *args: results.append(weigh(*args)) or results[0]
        cam(subject.input, subject.targets)
    return results[0][0]


def torch_cam(peer, **options):
    """The map of a class of torchcam on the layer's own grid, after its ReLU."""

    def theirs(subject):
        kind = getattr(torchcam.methods, peer)
        with kind(subject.theirs, subject.module, reshape_transform=subject.reshape, **options) as cam:
            return cam(subject.index, subject.theirs(subject.input), normalized=False)[0][0].numpy()

    return theirs


def captum(subject):
    """The signed map of captum's LayerGradCam, on the layer's own grid."""
    result = LayerGradCam(subject.theirs, subject.module).attribute(subject.input, subject.index)
    return result.detach()[0, 0].numpy()


def plus_plus(subject):
    """Grad-CAM++, equation 19, to the letter: α is zero where its denominator is."""
    a, g = captured(subject)
    return np.einsum("k,kij->ij", (alpha(a, g) * g.clip(min=0)).sum((1, 2)), a)


def alpha(a, g):
    """Equation 19, with each channel's sum of activations."""
    below = 2 * g**2 + g**3 * a.sum((1, 2), keepdims=True)
    return np.divide(g**2, below, out=np.zeros_like(g), where=below != 0)


def plus_plus_official(subject):
    """Grad-CAM++ as the authors' code has it: α of a channel add up to one over its positive gradients."""
    a, g = captured(subject)
    weights = np.where(g > 0, alpha(a, g), 0)
    total = weights.sum((1, 2), keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(g), where=total != 0)
    return np.einsum("k,kij->ij", (weights * g.clip(min=0)).sum((1, 2)), a)


NOISY = {"samples": 2, "noise": 0.1, "seed": 7}


def smooth_plus_plus(subject):
    """Smooth Grad-CAM++ by a loop over the documented copies."""
    image = subject.input
    deviation = NOISY["noise"] * (image.max() - image.min())
    seen = [gradients(subject, image + deviation * drawn(image, index))[1] for index in range(NOISY["samples"])]
    first, second, third = (np.mean([each**power for each in seen], 0) for power in (1, 2, 3))
    a, _ = captured(subject)
    below = 2 * second + third * a.sum((1, 2), keepdims=True)
    shares = np.divide(second, below, out=np.zeros_like(second), where=below != 0)
    return np.einsum("k,kij->ij", (shares * first.clip(min=0)).sum((1, 2)), a)


def drawn(image, index):
    """The noise that a copy is documented to get."""
    generator = torch.Generator().manual_seed(NOISY["seed"] * 100_003 + index)
    return torch.randn(image.shape[1:], generator=generator).to(image.dtype)


def fullgrad(subject):
    """FullGrad as in its authors' code, on torch's own convolutions and batch normalisations."""
    model, kept, image = relu6_apart(unfrozen(subject.theirs)), [], subject.input.requires_grad_()

    def keep(module, _args, output):
        kept.append((output, bias_of(module)))
        return output.clone()

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d) and bias_of(layer) is not None:
            layer.register_forward_hook(keep)
    result = torch.autograd.grad(model(image)[0, subject.index], [image, *(output for output, _ in kept)])
    terms = [image * result[0]]
    terms += [each * bias[None, :, None, None] for each, (_, bias) in zip(result[1:], kept, strict=True)]
    return sum(spread(each.detach(), subject.size) for each in terms)


def bias_of(layer):
    """The bias of a convolution, or what remains of a batch normalisation that is written as a scale and a shift."""
    if isinstance(layer, nn.Conv2d):
        return layer.bias
    return layer.bias - layer.running_mean * layer.weight / (layer.running_var + layer.eps).sqrt()


def spread(terms, size):
    """Absolute values, scaled to 0 to 1 over all channels, brought to the input's size and added up."""
    terms = terms.abs() - terms.abs().min()
    total = (terms / terms.max()).sum(1, keepdim=True)
    return functional.interpolate(total, size, mode="bilinear", align_corners=True)[0, 0].numpy()


def grad_cam_fullgrad(subject):
    """The map of pytorch-grad-cam's FullGrad, at the input's size."""
    with pytorch_grad_cam.FullGrad(subject.theirs, []) as cam:
        return cam(subject.input, subject.targets)[0]


def grad_cam_sess(subject):
    """The map of pytorch-grad-cam's SESS before its last scaling."""
    with pytorch_grad_cam.sess.SESS(subject.theirs, [subject.module], num_scales=2) as cam:
        return cam.forward_single_image(subject.input, subject.targets[0])


STAGES = ("layer2", "layer3", "layer4")
BLOCKS = ("layer4.0", "layer4.1")


def torch_cam_stages(fuse):
    """torchcam's Grad-CAM maps of three stages of a ResNet, fused."""

    def theirs(subject):
        with torchcam.methods.GradCAM(subject.theirs, list(STAGES)) as cam:
            return fuse(cam(subject.index, subject.theirs(subject.input)))[0].numpy()

    return theirs


def torch_cam_max(maps):
    """The greatest of torchcam's maps."""
    return torchcam.methods.GradCAM.fuse_cams(maps)


def torch_cam_product(maps):
    """The product of torchcam's maps, before its last scaling."""
    return torchcam.methods.RefineCAM.fuse_cams(maps, normalized=False)


def grad_cam_blocks(subject):
    """pytorch-grad-cam's mean over the blocks of a stage, at the input's size."""
    layers = [subject.theirs.get_submodule(name) for name in BLOCKS]
    with pytorch_grad_cam.GradCAM(subject.theirs, layers) as cam:
        return cam(subject.input, subject.targets)[0]


def grad_cam_augmented(subject):
    """pytorch-grad-cam's mean over mirrored and brightened copies, at the input's size."""
    with pytorch_grad_cam.GradCAM(subject.theirs, [subject.module]) as cam:
        return cam(subject.input, subject.targets, aug_smooth=True)[0]


def cut(method, **parameters):
    """Our map after the ReLU, as torchcam gives it."""
    return lambda subject: subject.ours(method, **parameters).clip(min=0)


def modified(method, *layers, fusion=None, **modifiers):
    """Our map of a call with a modifier, on some layers."""
    return lambda subject: subject.finding(replace(call(method), **modifiers), *layers, fusion=fusion).heatmap


def scaled(ours):
    """Our map after the ReLU, drawn at the input's size and scaled to 0 to 1, as pytorch-grad-cam gives it."""

    def drawn_at_size(subject):
        small = ours(subject).clip(min=0)
        large = cv2.resize(small - small.min(), subject.size[::-1], interpolation=cv2.INTER_LINEAR)
        return (large - large.min()) / (large.max() - large.min())

    return drawn_at_size


def same(method, models, oracle, theirs, **options):
    """One case for each model."""
    return [Case(method, model, oracle, theirs, **options) for model in models]


UNSIGNED = {"signed": False, "note": "Equal up to the sign, which the other library leaves to chance."}

CASES = [
    *same("gradcam", EVERYWHERE, f"{GRAD_CAM} GradCAM", grad_cam("GradCAM")),
    *same("hirescam", EVERYWHERE, f"{GRAD_CAM} HiResCAM", grad_cam("HiResCAM")),
    *same("layercam", EVERYWHERE, f"{GRAD_CAM} LayerCAM", grad_cam("LayerCAM")),
    *same("gradcam_elementwise", EVERYWHERE, f"{GRAD_CAM} GradCAMElementWise", grad_cam("GradCAMElementWise")),
    *same("xgradcam", EVERYWHERE, f"{GRAD_CAM} XGradCAM", grad_cam("XGradCAM")),
    *same("fem", EVERYWHERE, f"{GRAD_CAM} FEM", grad_cam("FEM")),
    *same("eigencam", EVERYWHERE, f"{GRAD_CAM} EigenCAM", grad_cam("EigenCAM"), **UNSIGNED),
    *same("eigengradcam", EVERYWHERE, f"{GRAD_CAM} EigenGradCAM", grad_cam("EigenGradCAM"), **UNSIGNED),
    *same("shapleycam", ("densenet121", "convnext_tiny"), f"{GRAD_CAM} ShapleyCAM", grad_cam_shapley),
    *same("gradcam", EVERYWHERE, f"{TORCHCAM} GradCAM", torch_cam("GradCAM"), ours=cut("gradcam")),
    *same("layercam", SOME, f"{TORCHCAM} LayerCAM", torch_cam("LayerCAM"), ours=cut("layercam")),
    *same("xgradcam", SOME, f"{TORCHCAM} XGradCAM", torch_cam("XGradCAM"), ours=cut("xgradcam")),
    *same("gradcam", CONVOLUTIONAL, f"{CAPTUM} LayerGradCam", captum),
    *same("gradcam_plus_plus", RECTIFIED, f"{PAPER}: equation 19", plus_plus),
    *same(
        "gradcam_plus_plus",
        RECTIFIED,
        "the authors' formula",
        plus_plus_official,
        parameters={"variant": "official"},
    ),
    *same(
        "gradcam_plus_plus",
        RECTIFIED,
        f"{GRAD_CAM} GradCAMPlusPlus",
        grad_cam("GradCAMPlusPlus"),
        least=0.9,
        note="The other library adds 1e-6 to the denominator, which is more than most g². camserve adds nothing.",
    ),
    *same(
        "gradcam_plus_plus",
        RECTIFIED,
        f"{TORCHCAM} GradCAMpp",
        torch_cam("GradCAMpp"),
        ours=cut("gradcam_plus_plus"),
        least=0.9,
        note="The other library adds up g³A over the grid, but equation 19 multiplies each g³ by the sum of A.",
    ),
    *same("smoothgradcam_plus_plus", BIASED, f"{PAPER}, same noise", smooth_plus_plus, parameters=NOISY),
    *[
        Case(
            "kpcacam",
            model,
            f"{GRAD_CAM} KPCA_CAM {kernel}",
            grad_cam("KPCA_CAM", kernel=kernel),
            parameters={"kernel": kernel},
            **UNSIGNED,
        )
        for model, kernels in (
            ("efficientnet_lite0", ("sigmoid", "rbf", "poly", "cosine", "linear")),
            ("swin_t", ("sigmoid", "rbf")),
        )
        for kernel in kernels
    ],
    *same(
        "gradcam",
        SOME,
        f"{GRAD_CAM} GradCAM, eigen_smooth",
        grad_cam("GradCAM", eigen=True),
        ours=modified("gradcam", eigen=True),
        **UNSIGNED,
    ),
    Case(
        "gradcam",
        "efficientnet_lite0",
        f"{GRAD_CAM} GradCAM, aug_smooth",
        grad_cam_augmented,
        0.99,
        scaled(modified("gradcam", augmented=True)),
        note="The other library scales the map of each copy to 0 to 1 before the mean. camserve does not.",
    ),
    Case(
        "gradcam",
        DRAWN,
        f"{GRAD_CAM} GradCAM, mean of two layers",
        grad_cam_blocks,
        ours=scaled(modified("gradcam", *BLOCKS, fusion="mean")),
    ),
    Case(
        "gradcam",
        DRAWN,
        f"{TORCHCAM} GradCAM, maximum of three layers",
        torch_cam_stages(torch_cam_max),
        ours=modified("gradcam", *STAGES, fusion="max"),
    ),
    Case(
        "refinecam",
        DRAWN,
        f"{TORCHCAM} RefineCAM of GradCAM",
        torch_cam_stages(torch_cam_product),
        ours=modified("refinecam", *STAGES),
    ),
    *same("fullgrad", BIASED, "the authors' formula", fullgrad),
    *same(
        "fullgrad",
        BIASED[1:],
        f"{GRAD_CAM} FullGrad",
        grad_cam_fullgrad,
        least=0.9,
        note="The other library scales each channel separately, so the weakest counts as much as the strongest.",
    ),
    *same(
        "sess",
        BIASED,
        f"{GRAD_CAM} SESS",
        grad_cam_sess,
        parameters={"scales": 2},
        photos=1,
    ),
]
