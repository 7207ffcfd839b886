"""Parity of the class activation maps."""

import pytorch_grad_cam
import torchcam.methods
from captum.attr import LayerGradCam

from methods.parity import Case, library

GRAD_CAM, TORCHCAM, CAPTUM = library("grad-cam"), library("torchcam"), library("captum")

EVERYWHERE = ("efficientnet_lite0", "resnet50", "densenet121", "vgg16", "convnext_tiny", "swin_t", "vit_b_16")


def grad_cam(peer, *, eigen=False, **options):
    """The raw map of a class of pytorch-grad-cam, before its ReLU."""

    def theirs(subject):
        kind, options["reshape_transform"] = getattr(pytorch_grad_cam, peer), subject.reshape
        with kind(subject.theirs, [subject.module], **options) as cam:
            image = subject.input
            cam(image, subject.targets)
            (activations,), (gradients,) = cam.activations_and_grads.activations, cam.activations_and_grads.gradients
            seen = (one.detach().numpy() if cam.detach else one for one in (activations, gradients))
            return cam.get_cam_image(image, subject.module, subject.targets, *seen, eigen_smooth=eigen)[0]

    return theirs


def torch_cam(peer, **options):
    """The map of a class of torchcam on the layer's own grid, after its ReLU."""

    def theirs(subject):
        kind = getattr(torchcam.methods, peer)
        with kind(subject.theirs, subject.module, reshape_transform=subject.reshape, **options) as cam:
            return cam(subject.index, subject.theirs(subject.input), normalized=False)[0][0].numpy()

    return theirs


def captum(subject):
    """The signed map of captum's LayerGradCam, on the layer's own grid."""
    found = LayerGradCam(subject.theirs, subject.module).attribute(subject.input, subject.index)
    return found.detach()[0, 0].numpy()


def cut(method):
    """Our map after the ReLU, as torchcam gives it."""
    return lambda subject: subject.ours(method).clip(min=0)


def same(method, models, oracle, theirs, **options):
    """One case for each model."""
    return [Case(method, model, oracle, theirs, **options) for model in models]


CASES = [
    *same("gradcam", EVERYWHERE, f"{GRAD_CAM} GradCAM", grad_cam("GradCAM")),
    *same("hirescam", EVERYWHERE, f"{GRAD_CAM} HiResCAM", grad_cam("HiResCAM")),
    *same("layercam", EVERYWHERE, f"{GRAD_CAM} LayerCAM", grad_cam("LayerCAM")),
    *same("gradcam", EVERYWHERE, f"{TORCHCAM} GradCAM", torch_cam("GradCAM"), ours=cut("gradcam")),
    *same("layercam", EVERYWHERE, f"{TORCHCAM} LayerCAM", torch_cam("LayerCAM"), ours=cut("layercam")),
    *same("gradcam", EVERYWHERE[:5], f"{CAPTUM} LayerGradCam", captum),
]
