"""A user's own transform: how it is called, and which part of a photo it shows."""

import random
from collections import UserDict

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision import models, transforms
from torchvision.transforms import v2
from transformers import ViTImageProcessor

from camserve_server.core.errors import ConfigError
from camserve_server.imaging import inputs
from camserve_server.imaging.transforms import as_array_transform, shown_part
from camserve_server.imaging.values import Box

PHOTO = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
TO_TENSOR = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
SIZES = [(480, 640), (640, 480), (333, 517), (1200, 600), (224, 224)]


def after_resize(size, shortest, crop):
    """Return the part of a photo that a centre crop of a resized photo shows, in the photo's pixels."""
    resized = [int(side * shortest / min(size)) for side in size]
    edges = []
    for side, length in zip(size, resized, strict=True):
        start = round((length - crop) / 2)
        edges.append((start * side / length, (start + crop) * side / length))
    (top, bottom), (left, right) = edges
    return Box(left, top, right, bottom)


def preset(crop, resize):
    return models.ResNet18_Weights.IMAGENET1K_V1.transforms(crop_size=crop, resize_size=resize)


def timms(crop, share):
    return timm.data.create_transform((3, crop, crop), crop_pct=share)


CROPS = {
    "Resize, CenterCrop": (transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *TO_TENSOR]), 256),
    "v2": (
        v2.Compose([v2.ToImage(), v2.Resize(256), v2.CenterCrop(224), v2.ToDtype(torch.float32, scale=True)]),
        256,
    ),
    "preset of torchvision": (preset(224, 232), 232),
    "of timm": (timms(224, 0.875), 256),
    "without a crop": (timms(224, 1.0), 224),
}


def part(transform, size, channels=3):
    run, _ = as_array_transform(transform, PHOTO[:, :, :channels])
    return shown_part(run, size, channels)


def check_box(found, expected, within):
    edges = [(getattr(found, name), getattr(expected, name)) for name in ("left", "top", "right", "bottom")]
    assert max(abs(ours - right) for ours, right in edges) <= within, (found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CROPS)
def test_part_that_a_centre_crop_shows(name, size):
    transform, shortest = CROPS[name]

    check_box(part(transform, size), after_resize(size, shortest, 224), within=max(size) / 224)


@pytest.mark.parametrize("size", SIZES)
def test_whole_photo_is_shown_by_a_resize_to_the_input(size):
    height, width = size
    for transform in (transforms.Compose([transforms.Resize((96, 96)), *TO_TENSOR]), processor(96)):
        check_box(part(transform, size), Box(0, 0, width, height), within=max(size) / 96)


def test_crop_may_be_anywhere_and_without_a_resize():
    transform = transforms.Compose([transforms.Lambda(lambda image: image.crop((30, 20, 130, 110))), *TO_TENSOR])

    check_box(part(transform, (240, 320)), Box(30, 20, 130, 110), within=1)


@pytest.mark.parametrize("fill", [0, 114, 255])
def test_border_lies_beyond_the_photo(fill):
    def letterbox(image):
        scaled = image.resize((224, round(224 * image.height / image.width)))
        result = Image.new("RGB", (224, 224), (fill,) * 3)
        result.paste(scaled, (0, (224 - scaled.height) // 2))
        return transforms.functional.to_tensor(result)

    check_box(part(letterbox, (240, 320)), Box(0, -40, 320, 280), within=320 / 224)


@pytest.mark.parametrize("channels", [1, 4])
def test_photos_with_other_channels(channels):
    def halve(image):
        rows = np.array(image, np.float32)[::2, ::2] / 255
        return rows.reshape(*rows.shape[:2], channels).transpose(2, 0, 1)

    photo = np.repeat(PHOTO[:, :, :1], channels, 2)
    run, _ = as_array_transform(halve, photo)

    check_box(shown_part(run, (240, 320), channels), Box(0, 0, 320, 240), within=2)


def to_tensor(*steps):
    return transforms.Compose([*steps, transforms.ToTensor()])


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (to_tensor(transforms.RandomHorizontalFlip(1.0)), "it mirrors the photo"),
        (to_tensor(transforms.RandomVerticalFlip(1.0)), "it mirrors the photo"),
        (to_tensor(transforms.Lambda(lambda image: image.rotate(30))), "it turns or warps the photo"),
        (to_tensor(transforms.Lambda(lambda image: image.transpose(Image.Transpose.TRANSPOSE))), "it turns or warps"),
        (lambda image: transforms.functional.to_tensor(image) ** 3, "it warps the photo, or changes its contrast"),
        (lambda image: torch.zeros(3, 8, 8) + len(np.array(image)), "its values do not depend"),
    ],
    ids=["mirrored", "upside down", "turned", "transposed", "contrast", "constant"],
)
def test_what_cannot_be_measured_is_said(transform, words):
    with pytest.raises(ValueError, match=words):
        part(transform, (240, 320))


def processor(side):
    """Return an image processor of transformers; by default it returns lists of arrays."""
    return ViTImageProcessor(size={"height": side, "width": side})


class Named:
    """A transform that is called as those of Albumentations are, and returns an array [H,W,C]."""

    def __call__(self, *, image):
        assert isinstance(image, np.ndarray)
        return UserDict(image=image[20:110, 30:130].astype(np.float32) / 255)


def test_named_arguments_and_mappings():
    run, made = as_array_transform(Named(), PHOTO)

    assert np.array_equal(made, PHOTO[20:110, 30:130] / np.float32(255))
    check_box(shown_part(run, (240, 320), 3), Box(30, 20, 130, 110), within=1)


def test_processor_of_transformers_makes_the_input():
    _, made = as_array_transform(processor(96), PHOTO)
    expected = processor(96)(Image.fromarray(PHOTO), return_tensors="pt")["pixel_values"][0]

    assert np.array_equal(made, expected.permute(1, 2, 0).numpy())


def test_mapping_without_an_input_is_refused():
    with pytest.raises(ConfigError, match="a mapping without pixel_values or image is not an input: it has a, b"):
        as_array_transform(lambda _image=None, **_: {"a": 1, "b": 2}, PHOTO)


def prepared(transform, crop=None):
    return inputs.preprocess_of(None, crop, (0.5,) * 3, (0.25,) * 3, transform).prepare


def shown_of(prepare, photo):
    return prepare(photo, b"", None)[1]


def test_measured_part_belongs_to_the_size_of_the_photo():
    prepare = prepared(CROPS["Resize, CenterCrop"][0])

    for size in SIZES[:2]:
        check_box(shown_of(prepare, np.zeros((*size, 3), np.uint8)), after_resize(size, 256, 224), within=640 / 224)


def test_crop_that_is_given_is_believed(caplog):
    whole = prepared(CROPS["Resize, CenterCrop"][0], "whole")

    assert shown_of(whole, PHOTO) == Box(0, 0, 320, 240)
    assert caplog.messages == []


def test_part_that_cannot_be_measured_is_the_whole_photo_with_a_warning(caplog):
    prepare = prepared(to_tensor(transforms.RandomHorizontalFlip(1.0)))

    assert shown_of(prepare, PHOTO) == Box(0, 0, 320, 240)
    (message,) = caplog.messages
    assert message.endswith("which part of a photo the transform shows (it mirrors the photo): crop= says it")


def test_random_transform_is_warned_of(caplog):
    chance = random.Random(0)
    prepared(lambda image: transforms.functional.to_tensor(image.resize((32, 32))) + chance.random())

    assert "the transform makes another input of the same photo each time" in caplog.messages[0]
