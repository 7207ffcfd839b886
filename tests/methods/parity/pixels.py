"""Parity of the methods that look at the input: its gradients, and what becomes of the score when it is edited."""

import warnings
from unittest.mock import patch

import torch
import torchcam.methods
from captum import attr
from torch import nn

from methods.parity import Case, library, unfrozen
from methods.tools import call

CAPTUM, TORCHCAM = library("captum"), library("torchcam")

RANDOM = ("resnet50", "densenet121", "vgg16")
SMALL = "resnet18, biases drawn"  # for methods of many passes
SEED = {"samples": 6, "seed": 3}


def attributed(peer, fold, *, plain_relus=False, **options):
    """Captum's attribution [3,H,W] of the subject's class, folded into a map."""

    def theirs(subject):
        module = unfrozen(subject.theirs)
        for each in module.modules():
            if plain_relus and isinstance(each, nn.ReLU):
                each.inplace = False  # captum sets hooks on them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            made = peer(module, module.get_submodule(subject.layer)) if peer is attr.GuidedGradCam else peer(module)
            result = made.attribute(subject.input.contiguous().requires_grad_(), target=subject.index, **options)
        return fold(result[0].detach()).numpy()

    return theirs


def total(found):
    return found.sum(0)


def strongest(found):
    return found.abs().amax(0)


def tunnel(kind, share):
    """Captum's noise tunnel on the noise that ours documents."""

    def theirs(subject):
        image = subject.input
        drawn = [torch.Generator().manual_seed(SEED["seed"] * 100_003 + index) for index in range(SEED["samples"])]
        noises = torch.stack([torch.randn(image[0].shape, generator=each) for each in drawn])
        planned = share * (image.max() - image.min()) * noises.to(image.dtype)
        with patch.object(torch, "normal", lambda _mean, _std: planned):
            result = attr.NoiseTunnel(attr.Saliency(subject.theirs)).attribute(
                image.requires_grad_(),
                nt_type=kind,
                nt_samples=SEED["samples"],
                nt_samples_batch_size=None,
                target=subject.index,
                abs=False,
            )
        return strongest(result[0].detach()).numpy()

    return theirs


def cells(size, count):
    """Return the index of the grid cell that each pixel lies in, [1,H,W]."""
    rows, columns = (torch.arange(side) * count // side for side in size)
    return (rows[:, None] * count + columns)[None]


def shapley(subject):
    """Captum's KernelShap over the cells of a grid, with our seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = attr.KernelShap(subject.theirs).attribute(
            subject.input, target=subject.index, feature_mask=cells(subject.size, 4), n_samples=40
        )
    return result[0, 0].numpy()


def scorecam(subject):
    """The map of torchcam's ScoreCAM on the layer's own grid."""
    with torchcam.methods.ScoreCAM(subject.theirs, subject.module) as cam, torch.no_grad():
        return cam(subject.index, subject.theirs(subject.input), normalized=False)[0][0].numpy()


CASES = [
    *(
        Case(name, model, f"{CAPTUM} {peer.__name__}", attributed(peer, fold))
        for name, peer, fold in [
            ("saliency", attr.Saliency, strongest),
            ("input_x_gradient", attr.InputXGradient, total),
        ]
        for model in ("efficientnet_lite0", *RANDOM)
    ),
    *(
        Case(
            "integrated_gradients",
            model,
            f"{CAPTUM} IntegratedGradients",
            attributed(attr.IntegratedGradients, total, n_steps=8, internal_batch_size=9),
            parameters={"steps": 8, "quadrature": "gauss-legendre"},
        )
        for model in ("densenet121", SMALL)
    ),
    *(
        Case(
            name,
            SMALL,
            f"{CAPTUM} NoiseTunnel({kind})",
            tunnel(kind, 0.15),
            parameters={**SEED, "noise": 0.15},
        )
        for name, kind in [("smoothgrad", "smoothgrad"), ("squaregrad", "smoothgrad_sq"), ("vargrad", "vargrad")]
    ),
    *(
        Case(name, model, f"{CAPTUM} {peer.__name__}", attributed(peer, strongest, plain_relus=True))
        for name, peer in [("guided_backprop", attr.GuidedBackprop), ("deconvnet", attr.Deconvolution)]
        for model in ("resnet50", "vgg16")
    ),
    Case(
        "guided_gradcam",
        "vgg16",
        f"{CAPTUM} GuidedGradCam, bilinear",
        attributed(attr.GuidedGradCam, strongest, plain_relus=True, interpolate_mode="bilinear"),
    ),
    Case(
        "occlusion",
        SMALL,
        f"{CAPTUM} Occlusion",
        attributed(
            attr.Occlusion,
            lambda each: each[0],
            sliding_window_shapes=(3, 40, 40),
            strides=(3, 22, 22),
            perturbations_per_eval=36,  # not one by one, with the kernels of the image itself, whose rounding cancels
        ),
        parameters={"window": 40, "stride": 22},
    ),
    Case(
        "kernel_shap",
        SMALL,
        f"{CAPTUM} KernelShap",
        shapley,
        parameters={"samples": 40, "cells": 4},
    ),
    Case(
        "scorecam",
        SMALL,
        f"{TORCHCAM} ScoreCAM",
        scorecam,
        least=0.999,
        ours=lambda subject: subject.finding(call("scorecam")).heatmap.clip(min=0),
        note="torchcam scales each feature map to 0 to 1 before it resizes it. The paper's authors do so afterwards.",
    ),
]
