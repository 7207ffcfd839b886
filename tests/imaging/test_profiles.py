"""A profile gives the final map of another library: normalised, in the size of the input."""

import captum.attr
import numpy as np
import pytest
import torch
from captum.attr import visualization
from PIL import Image
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torchcam import methods as torchcam
from torchvision.transforms.functional import to_pil_image

from camserve_server import models
from camserve_server.engine import Engine, normalise
from camserve_server.engine.values import Row
from camserve_server.imaging import scales
from camserve_server.imaging.values import Rendering
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget

EXACT = 1e-4
SIZE = (96, 96)
CLASS = 1  # its Grad-CAM has positive and negative values on each image


def intensities(raw, profile, size=SIZE):
    return scales.on_input(scales.scale_map(raw, Rendering(profile=profile), size), size)


@pytest.fixture(scope="module")
def resnet():
    return models.load(models.parse("timm:test_resnet?weights=none&size=96"))


@pytest.fixture(scope="module", params=[0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def image(request):
    coarse = np.random.default_rng(request.param).integers(0, 256, (6, 6, 3), np.uint8)
    return np.array(Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def seen(resnet, image):
    return normalise(torch.from_numpy(image)[None], resnet.info.preprocess)


@pytest.fixture(scope="module")
def raw(resnet, image):
    pass_ = Pass("resnet", "cam", SIZE, ("layer3",))
    (result,) = Engine({"resnet": resnet}).run(pass_, [Row(image, ClassTarget(CLASS), (MethodCall("gradcam"),))])
    return result.maps[0][0]


@pytest.fixture
def trainable(resnet):
    """Enable gradients of parameters, which the other libraries need."""
    resnet.module.requires_grad_(requires_grad=True)
    yield resnet.module
    resnet.module.requires_grad_(requires_grad=False)
    resnet.module.zero_grad(set_to_none=True)


def test_grad_cam_profile_equals_pytorch_grad_cam(raw, seen, trainable):
    with GradCAM(trainable, [trainable.layer3]) as cam:
        theirs = cam(seen.clone(), [ClassifierOutputTarget(CLASS)])[0]

    np.testing.assert_allclose(intensities(raw, "grad-cam"), theirs, atol=EXACT)


def test_torchcam_profile_equals_torchcam(raw, seen, trainable):
    with torchcam.GradCAM(trainable, "layer3") as cam:
        scores = trainable(seen.clone())
        mask = cam(CLASS, scores)[0][0]
    theirs = np.asarray(to_pil_image(mask, mode="F").resize(SIZE, Image.Resampling.BICUBIC))

    np.testing.assert_allclose(intensities(raw, "torchcam"), theirs, atol=EXACT)


def test_captum_profile_equals_captum(raw, seen, trainable):
    attribution = captum.attr.LayerGradCam(trainable, trainable.layer3).attribute(seen.clone(), CLASS)
    large = captum.attr.LayerAttribution.interpolate(attribution, SIZE).detach().numpy()[0].transpose(1, 2, 0)
    figure, axis = visualization.visualize_image_attr(large, sign="positive", use_pyplot=False)
    theirs = np.asarray(axis.images[0].get_array())

    assert figure is not None
    np.testing.assert_allclose(intensities(raw, "captum"), theirs, atol=EXACT)


@pytest.mark.parametrize("profile", ["grad-cam", "torchcam", "captum"])
@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0, 1e-11, float("nan")])
def test_constant_map_is_accepted_by_every_profile(profile, value):
    result = intensities(np.full((3, 3), value, np.float32), profile, (8, 8))

    assert result.shape == (8, 8)
    assert np.isfinite(result).all()
    assert 0 <= result.min() <= result.max() <= 1


def test_papers_profile_is_resized_bilinearly_between_the_cells_centres(raw):
    large = torch.from_numpy(raw.clip(0) / raw.max())[None, None]
    expected = torch.nn.functional.interpolate(large, SIZE, mode="bilinear", align_corners=False)[0, 0]

    np.testing.assert_allclose(intensities(raw, "paper"), expected, atol=1e-5)
