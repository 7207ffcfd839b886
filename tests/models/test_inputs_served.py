"""Photos, options and targets as people give them have the same answers through a server as in process."""

import contextlib
import logging

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import nn
from torchvision import transforms
from torchvision.transforms import functional
from transformers import ViTImageProcessor

import camserve
import camserve_server
from as_written import PREPROCESS, SIZE, Reshape, Unsqueezed, changed, lenet, plain
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError
from camserve_server.imaging.inputs import preprocess_of
from camserve_server.models import Source
from camserve_server.models.source import IMAGENET_MEAN, IMAGENET_STD
from methods.tools import doubled, error_ratio
from models.test_as_written import IMAGE, LABELS, OPTIONS, segmenter
from models.test_independence import AlwaysDropping, Drifting
from models.test_without_gradient import counter

HALF = (0.5,) * 3
QUARTER = (0.25,) * 3
PHOTO = np.random.default_rng(6).integers(0, 256, (48, 80, 3), np.uint8)
FLOATS = PHOTO.astype(np.float32)
SOME = ("gradcam", "saliency", "rise")
"""Methods that are compared where other tests compare all: what is different here, no method sees."""
NORMALISED = [transforms.ToTensor(), transforms.Normalize(HALF, QUARTER)]


class Named:
    """A transform that is called as those of Albumentations are, and returns a mapping with an array [H,W,C]."""

    def __call__(self, *, image):
        assert isinstance(image, np.ndarray)
        return {"image": ((image[8:40, 20:52] / 255 - 0.5) / 0.25).astype(np.float32)}


TRANSFORMS = {
    "crop": transforms.Compose([transforms.Resize(40), transforms.CenterCrop(SIZE), *NORMALISED]),
    "squashed": transforms.Compose([transforms.Resize((SIZE, SIZE)), *NORMALISED]),
    "unknown": lambda image: functional.normalize(functional.to_tensor(image)[:, 8:40, 20:52], HALF, QUARTER),
    "named": Named(),
    "processor": ViTImageProcessor(
        size={"height": SIZE, "width": SIZE}, image_mean=list(HALF), image_std=list(QUARTER)
    ),
}


def grey():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()


def clip():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**sizes, "image_size": SIZE, "patch_size": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


@contextlib.contextmanager
def both(network, source, max_pixels=2**24, **options):
    """Explain a network in process with some options, and serve it from a source; yield both clients."""
    settings = {"max_batch_rows": 1}  # the rounding of a matrix product depends on the size of the batch
    with contextlib.ExitStack() as stack:
        explainer = stack.enter_context(Explainer(network, settings=settings, **options))
        threads = torch.get_num_threads()  # the rounding of small layers depends on it
        running = camserve_server.running({"net": source}, threads=threads, max_pixels=max_pixels, **settings)
        yield explainer, stack.enter_context(camserve.Client(stack.enter_context(running)))


def explained(each, method, image, **options):
    """Return explanations by a method, or why the network does not offer it."""
    try:
        return each.explain(image, methods=method, overlay=None, heatmap=True, **options).explanations
    except camserve.FailedPrecondition as error:
        return error.message


def check_alike(explainer, client, image, *, methods=(), targets=(1, 3), **options):
    """Check that both have the same maps, scores and parts of the photo, by every method if none is named.

    Returns:
        The explanations by saliency of the server.
    """
    compared = {}
    for method in methods or [method.name for method in explainer.methods()]:
        ours, served = (explained(each, method, image, targets=targets, **options) for each in (explainer, client))
        if isinstance(ours, str):
            assert served == ours.replace(explainer.model().name, "net")
            continue
        for one, other in zip(ours, served, strict=True):
            assert np.array_equal(one.heatmap, other.heatmap), method
            assert (one.score, one.layer, one.target) == (other.score, other.layer, other.target)
            assert one.photo == other.photo
        compared[method] = served
    assert len(compared) >= (len(methods) or 5)
    return compared.get("saliency")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_shows_the_same_part_when_it_is_served(name):
    preprocess = preprocess_of(None, None, HALF, QUARTER, TRANSFORMS[name])
    with both(plain(), Source(plain(), preprocess), transform=TRANSFORMS[name]) as (explainer, client):
        check_alike(explainer, client, PHOTO, methods=() if name == "crop" else SOME)


@pytest.mark.slow
@pytest.mark.parametrize(
    "image",
    [PHOTO, FLOATS / 255, PHOTO / 255, Image.fromarray(PHOTO), Image.fromarray(PHOTO[:, :, 0].astype(np.int32))],
    ids=["array", "floats", "doubles", "PIL", "PIL I"],
)
def test_photo_has_the_same_maps_when_it_is_served(image):
    with both(plain(), Source(plain(), PREPROCESS), **OPTIONS) as (explainer, client):
        check_alike(explainer, client, image, methods=() if image is PHOTO else SOME)


@pytest.mark.slow
@pytest.mark.parametrize("image", [FLOATS, Image.fromarray(PHOTO).convert("F")], ids=["array", "PIL F"])
def test_floats_in_another_unit_are_refused_when_they_are_served(image):
    words = []
    with both(plain(), Source(plain(), PREPROCESS), **OPTIONS) as (explainer, client):
        for each in (explainer, client):
            with pytest.raises(camserve.InvalidArgument, match=r"name .* such as 0 and 255") as caught:
                each.explain(image)
            words.append(caught.value.message)
        check_alike(
            explainer, client, image, methods=() if isinstance(image, np.ndarray) else SOME, value_range=(0, 255)
        )
    assert words[0] == words[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "labels",
    [dict(enumerate(LABELS)), {label: index for index, label in enumerate(LABELS)}, np.array(LABELS)],
    ids=["id2label", "class_to_idx", "array"],
)
def test_labels_of_a_served_network_are_given_as_libraries_have_them(labels):
    with both(plain(), Source(plain(), PREPROCESS, labels), labels=labels, **OPTIONS) as (explainer, client):
        assert client.model().labels == explainer.model().labels == LABELS
        (found,) = check_alike(explainer, client, IMAGE, methods=SOME, targets="owl")
    assert found.target.class_index == 3


@pytest.mark.slow
@pytest.mark.parametrize("targets", [[np.int64(1), np.uint8(3)], np.array([1, 3]), torch.tensor([1, 3])])
def test_classes_of_a_served_network_are_numbers_of_numpy_and_torch(targets):
    with both(plain(), Source(plain(), PREPROCESS), **OPTIONS) as (explainer, client):
        found = check_alike(explainer, client, IMAGE, methods=SOME, targets=targets)
    assert [each.target.class_index for each in found] == [1, 3]


def grey_saliency(network, photo):
    """Return the gradient of class 1 at a photo of one channel, by autograd and the averages of ImageNet's channels."""
    mean, std = (sum(values) / 3 for values in (IMAGENET_MEAN, IMAGENET_STD))
    values = torch.from_numpy(((photo / 255 - mean) / std)[None, None]).to(next(network.parameters()).dtype)
    values.requires_grad_()
    return torch.autograd.grad(network(values)[0, 1], values)[0][0, 0].abs().numpy()


@pytest.mark.slow
def test_channels_of_a_served_network_are_those_of_its_first_convolution():
    photo = np.kron(IMAGE[:, :, 0], np.ones((8, 8), np.uint8))  # 256 pixels, whose centre of 224 is the input
    with both(grey(), grey()) as (explainer, client):
        assert client.model().input_channels == explainer.model().input_channels == 1
        found = check_alike(explainer, client, photo, methods=SOME, targets=[1, 2])[0]
    plain_map, truth = (grey_saliency(each, photo[16:240, 16:240]) for each in (grey(), doubled(grey())))
    assert error_ratio(found.heatmap, plain_map, truth) <= 1


TASKS = {
    "one number": (lambda: nn.Sequential(plain(1), Reshape((-1,))), "regress"),
    "one number, with an axis": (lambda: plain(1), "regress"),
    "one logit": (lambda: nn.Sequential(plain(1), Reshape((-1,))), "binary"),
    "one logit, with an axis": (lambda: plain(1), "binary"),
    "places of one cell": (lambda: changed(Unsqueezed), None),
    "every pixel": (segmenter, None),
    "dead for noise": (counter, "regress"),
    "view of contiguous features": (lenet, None),
}
"""Networks with other outputs, and one that needs contiguous inputs; and their tasks if they must be said."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_network_has_the_same_maps_when_it_is_served(name):
    make, task = TASKS[name]
    network = make()
    with both(network, Source(network, PREPROCESS, task=task), task=task, **OPTIONS) as (explainer, client):
        assert client.model().task == explainer.model().task
        check_alike(explainer, client, np.full_like(IMAGE, 255), targets=None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AlwaysDropping, Drifting])
def test_output_that_differs_in_each_run_is_named_by_a_server(kind, caplog):
    with (
        caplog.at_level(logging.WARNING, "camserve_server"),
        camserve_server.running({"net": Source(changed(kind), PREPROCESS)}) as address,
        camserve.Client(address) as client,
    ):
        assert client.explain(IMAGE, targets=1, overlay=None).explanations
    assert "model net has another output in each run, first in " in caplog.text


@pytest.mark.slow
def test_photo_of_a_phone_is_explained_by_a_server_that_allows_it():
    photo = np.kron(PHOTO, np.ones((84, 76, 1), np.uint8))  # 24 megapixels
    source = Source(plain(), PREPROCESS)
    with (
        camserve_server.running({"net": source}) as address,
        camserve.Client(address) as client,
        pytest.raises(camserve.InvalidArgument, match="6,080 x 4,032 pixels: 16,777,216 in all are accepted"),
    ):
        client.explain(photo)
    with both(plain(), source, max_pixels=photo.size // 3, **OPTIONS) as (explainer, client):
        check_alike(explainer, client, photo, methods=("gradcam", "saliency"))


def test_transformer_that_takes_texts_is_refused_with_the_way_out_when_it_is_served():
    words = "it takes texts, too: name its saved folder as hf:FOLDER, or give its part for texts as text="
    for serve in (lambda: Explainer(clip(), size=SIZE), lambda: camserve_server.running({"net": clip()})):
        with pytest.raises(ConfigError, match=words), serve():
            pass
