"""The client's codec builds requests from arguments and values from responses."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf import json_format
from PIL import Image

import camserve
from camserve._codec.explain import _FUSIONS, explain_request
from camserve._codec.images import image_bytes
from camserve._codec.models import decode_method
from camserve._codec.rendering import PROFILES, SIGNS
from camserve._codec.results import decode_result
from camserve._values.options import ExplainArguments
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    import pathlib

BOX = {"left": 1.0, "top": 2.0, "right": 3.0, "bottom": 4.0}
RED = (200, 30, 10)


def predicted(**options: Any) -> camserve.Prediction:
    return camserve.Prediction(label="dog", probability=0.9, class_index=7, score=2.2, **options)


def asked(**options: Any) -> dict[str, Any]:
    """Convert a request to JSON with the field names of the proto."""
    request = explain_request(**options)
    return json_format.MessageToDict(request, preserving_proto_field_name=True)


def pixels(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_defaults_ask_for_gradcam_with_a_heatmap_and_a_jpeg() -> None:
    assert asked() == {
        "methods": [{"name": "gradcam"}],
        "top_k": 1,
        "rendering": {
            "overlay": "IMAGE_FORMAT_JPEG",
            "heatmap": True,
            "colormap": "jet",
            "alpha": 0.5,
            "profile": "PROFILE_PAPER",
        },
        "max_predictions": 5,
    }


def test_every_option_reaches_the_request() -> None:
    everything = asked(
        model="m",
        methods=["a"],
        targets=["t"],
        layers=["l"],
        fusion="max",
        top_k=3,
        heatmap=False,
        overlay=None,
        heatmap_image="webp",
        colormap="viridis",
        alpha=0,
        max_side=100,
        quality=80,
        max_predictions=0,
        profile="grad-cam",
        intensity=True,
        sign="absolute",
        scale=2.5,
        threshold=0.75,
        contour_lines=3,
        color_bar=True,
        fade=True,
        regions=camserve.RegionOptions(mass=0.5, max_regions=2, draw=True, masks=True),
        class_map=True,
        interventions=[camserve.silence("l", channels=[3])],
    )
    assert everything == {
        "model": "m",
        "methods": [{"name": "a"}],
        "targets": [{"label": "t"}],
        "layers": ["l"],
        "top_k": 3,
        "rendering": {
            "heatmap_image": "IMAGE_FORMAT_WEBP",
            "colormap": "viridis",
            "alpha": 0.0,
            "max_side": 100,
            "quality": 80,
            "profile": "PROFILE_GRAD_CAM",
            "intensity": True,
            "sign": "SIGN_ABSOLUTE",
            "scale_value": 2.5,
            "threshold_quantile": 0.75,
            "contour_lines": 3,
            "color_bar": True,
            "fade": True,
            "regions": {"mass": 0.5, "max_regions": 2, "draw": True, "masks": True},
        },
        "max_predictions": 0,
        "fusion": "FUSION_MAX",
        "class_map": True,
        "interventions": [{"layer": "l", "channels": [3], "silence": True}],
    }


def rendering(**options: Any) -> dict[str, Any]:
    """Return the options of a request's pictures that are not defaults."""
    defaults = asked()["rendering"]
    return {name: value for name, value in asked(**options)["rendering"].items() if defaults.get(name) != value}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": "map"}, {}),
        ({"scale": "request"}, {"shared_scale": True}),
        ({"scale": np.float32(0.5)}, {"scale_value": 0.5}),
        ({"threshold": 0}, {"threshold_quantile": 0.0}),
        ({"threshold_value": 0}, {"threshold_value": 0.0}),
        ({"profile": "signed"}, {"profile": "PROFILE_SIGNED", "colormap": "coolwarm"}),
        ({"profile": "signed", "sign": "negative"}, {"profile": "PROFILE_SIGNED", "sign": "SIGN_NEGATIVE"}),
        ({"sign": "both"}, {"sign": "SIGN_BOTH", "colormap": "coolwarm"}),
        ({"sign": "both", "colormap": "jet"}, {"sign": "SIGN_BOTH"}),
        ({"sign": None}, {}),
        ({"regions": False}, {}),
        ({"regions": None}, {}),
        ({"regions": True}, {"regions": {"max_regions": 8}}),
        ({"regions": 0}, {"regions": {"quantile": 0.0, "max_regions": 8}}),
        ({"regions": np.float32(0.5)}, {"regions": {"quantile": 0.5, "max_regions": 8}}),
        ({"regions": camserve.RegionOptions(mass=0)}, {"regions": {"mass": 0.0, "max_regions": 8}}),
    ],
)
def test_options_of_pictures_have_short_and_full_forms(options: Any, expected: Any) -> None:
    assert rendering(**options) == expected


def test_typed_options_are_complete() -> None:
    typed = camserve.ExplainOptions.__annotations__

    assert list(typed) == list(ExplainArguments.__dataclass_fields__)


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ("saliency", [{"name": "saliency"}]),
        (("a", "b"), [{"name": "a"}, {"name": "b"}]),
        (camserve.Method("a"), [{"name": "a"}]),
        (("a", {"n": 2}), [{"name": "a", "parameters": {"n": {"number": 2.0}}}]),
        (camserve.Method("a", augmentation_smoothing=True), [{"name": "a", "augmentation_smoothing": True}]),
        (camserve.Method("a", eigen_smoothing=True), [{"name": "a", "eigen_smoothing": True}]),
        (camserve.Method("a", per_channel=True), [{"name": "a", "per_channel": True}]),
        (
            camserve.Method("a", per_channel=np.array([7, 0])),
            [{"name": "a", "per_channel": True, "input_channels": [7, 0]}],
        ),
        (camserve.Method("a", per_channel=[]), [{"name": "a"}]),
        (
            ["a", ("b", {"how": "max"}), camserve.Method("c", {"x": 0.5})],
            [
                {"name": "a"},
                {"name": "b", "parameters": {"how": {"text": "max"}}},
                {"name": "c", "parameters": {"x": {"number": 0.5}}},
            ],
        ),
    ],
)
def test_methods_are_names_pairs_or_values(methods: Any, expected: Any) -> None:
    assert asked(methods=methods)["methods"] == expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("tabby", [{"label": "tabby"}]),
        (0, [{"class_index": 0}]),
        (np.int64(3), [{"class_index": 3}]),
        (np.array([3, 4]), [{"class_index": 3}, {"class_index": 4}]),
        (["tabby", 281], [{"label": "tabby"}, {"class_index": 281}]),
        (
            camserve.contrast("tabby", 282),
            [{"contrast": {"why": {"label": "tabby"}, "why_not": {"class_index": 282}}}],
        ),
        (camserve.probability("tabby"), [{"label": "tabby", "softmax": True}]),
        (camserve.probability(3), [{"class_index": 3, "softmax": True}]),
        (camserve.finer("tabby"), [{"finer": {"why": {"label": "tabby"}, "weight": 1.0}}]),
        (
            camserve.finer(1, 2, "c", weight=0.5),
            [{"finer": {"why": {"class_index": 1}, "against": [{"class_index": 2}, {"label": "c"}], "weight": 0.5}}],
        ),
        (camserve.similarity(b"photo"), [{"similarity": {"image": "cGhvdG8="}}]),
        (camserve.segment("cat"), [{"segment": {"class_name": {"label": "cat"}}}]),
        (
            camserve.segment(8, (1, 2, 3, 4)),
            [{"segment": {"class_name": {"class_index": 8}, "region": BOX}}],
        ),
        (camserve.mask("cat", b"mask"), [{"segment": {"class_name": {"label": "cat"}, "mask": "bWFzaw=="}}]),
        (camserve.detection("dog"), [{"detection": {"class_name": {"label": "dog"}}}]),
        (
            camserve.detection("dog", camserve.Box(1, 2, 3, 4)),
            [{"detection": {"class_name": {"label": "dog"}, "box": BOX}}],
        ),
        (
            camserve.detection("dog", np.array([1, 2, 3, 4])),
            [{"detection": {"class_name": {"label": "dog"}, "box": BOX}}],
        ),
        (predicted(), [{"class_index": 7}]),
        (predicted(area=0.5), [{"segment": {"class_name": {"class_index": 7}}}]),
        (
            [predicted(box=camserve.Box(1, 2, 3, 4)), "tabby"],
            [{"detection": {"class_name": {"class_index": 7}, "box": BOX}}, {"label": "tabby"}],
        ),
    ],
)
def test_targets_are_labels_indices_or_contrasts(targets: Any, expected: Any) -> None:
    assert asked(targets=targets)["targets"] == expected


def test_one_layer_needs_no_list() -> None:
    assert asked(layers="features")["layers"] == ["features"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 17}, "top_k"),
        ({"alpha": 1.1}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"max_side": 15}, "max_side"),
        ({"quality": 0}, "quality"),
        ({"max_predictions": 1001}, "max_predictions"),
        ({"overlay": "gif"}, "rendering.overlay"),
        ({"heatmap_image": "bmp"}, "rendering.heatmap_image"),
        ({"profile": "gradcam"}, "rendering.profile"),
        ({"sign": "any"}, "rendering.sign"),
        ({"scale": "maps"}, "rendering.scale"),
        ({"scale": 0}, "rendering.scale"),
        ({"scale": float("nan")}, "rendering.scale"),
        ({"scale": 1e39}, "rendering.scale"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": 0.5, "threshold_value": 1}, "threshold"),
        ({"threshold_value": -1}, "threshold_value"),
        ({"threshold_value": float("inf")}, "threshold_value"),
        ({"contour_lines": 17}, "contour_lines"),
        ({"regions": 2}, "rendering.regions.quantile"),
        ({"regions": camserve.RegionOptions(mass=-1)}, "rendering.regions.mass"),
        ({"regions": camserve.RegionOptions(max_regions=0)}, "rendering.regions.max_regions"),
        ({"regions": camserve.RegionOptions(quantile=0.5, mass=0.5)}, "rendering.regions.quantile"),
        ({"fusion": "best"}, "fusion"),
        ({"targets": -1}, "targets[0]"),
        ({"targets": [1, 2**32]}, "targets[1]"),
        ({"targets": [True]}, "targets[0]"),
        ({"targets": [1.5]}, "targets[0]"),
        ({"targets": camserve.contrast("a", -1)}, "targets[0].contrast.why_not"),
        ({"targets": camserve.probability(-1)}, "targets[0]"),
        ({"targets": ["a", camserve.finer("a", -1)]}, "targets[1].finer.against[0]"),
        ({"targets": camserve.finer(1.5)}, "targets[0].finer.why"),
        ({"targets": camserve.segment(-1)}, "targets[0].segment.class_name"),
        ({"targets": camserve.segment("a", (1, 2))}, "targets[0].segment.region"),
        ({"targets": camserve.detection("a", "box")}, "targets[0].detection.box"),
        ({"targets": camserve.detection("a", 7)}, "targets[0].detection.box"),
        ({"targets": camserve.similarity("no/such.jpg")}, "targets[0].similarity.image"),
        ({"targets": camserve.similarity(b"")}, "targets[0].similarity.image"),
        ({"targets": camserve.mask(-1, b"mask")}, "targets[0].segment.class_name"),
        ({"targets": camserve.mask(1, b"")}, "targets[0].segment.mask"),
        ({"targets": camserve.mask(1, "no/such.png")}, "targets[0].segment.mask"),
        ({"targets": camserve.mask(1, 7)}, "targets[0].segment.mask"),
        ({"targets": camserve.mask(1, np.zeros((4, 4, 3), np.uint8))}, "targets[0].segment.mask"),
        ({"targets": camserve.mask(1, np.zeros((4, 4)))}, "targets[0].segment.mask"),
        ({"targets": camserve.mask(1, np.zeros((0, 4), bool))}, "targets[0].segment.mask"),
        ({"targets": camserve.mask(1, Image.new("RGB", (4, 4)))}, "targets[0].segment.mask"),
        ({"methods": ("a", {"n": [1]})}, "methods.n"),
    ],
)
def test_value_out_of_range_is_named(options: Any, field: str) -> None:
    with pytest.raises(camserve.InvalidArgument) as caught:
        asked(**options)

    assert list(caught.value.fields) == [field]
    assert str(caught.value) == f"{field}: {caught.value.fields[field]}"


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'method'"):
        asked(method="gradcam")


def test_files_and_bytes_are_sent_untouched(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "any.jpg"
    data = b"\xff\xd8\xff and any bytes"
    path.write_bytes(data)

    for image in (path, str(path), data, bytearray(data), memoryview(data)):
        assert image_bytes(image) == data


def test_array_is_sent_losslessly() -> None:
    array = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)

    for view in (array, array[:, ::-1]):
        sent = pixels(image_bytes(view))
        np.testing.assert_array_equal(np.asarray(sent), view)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pil_images_keep_their_mode(mode: str) -> None:
    image = Image.new(mode, (3, 2))

    sent = pixels(image_bytes(image))

    assert sent.mode == mode
    assert sent.size == (3, 2)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_pil_images_that_png_cannot_hold_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (3, 2), RED).convert(mode)

    sent = pixels(image_bytes(image))

    assert sent.mode == "RGB"
    np.testing.assert_allclose(np.asarray(sent)[0, 0], RED, atol=4)


def test_pil_image_is_rotated_by_its_exif_orientation() -> None:
    image = Image.new("RGB", (4, 2))
    image.getexif()[0x0112] = 6  # the camera was held on its side
    turned = io.BytesIO()
    image.save(turned, "JPEG", exif=image.getexif())

    sent = pixels(image_bytes(pixels(turned.getvalue())))

    assert sent.size == (2, 4)
    assert 0x0112 not in sent.getexif()


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.longdouble, ">f4"])
def test_floats_of_other_types_are_sent_as_float32(dtype: Any) -> None:
    values = (np.arange(12).reshape(2, 2, 3) / 8).astype(dtype)

    assert image_bytes(values) == image_bytes(values.astype(np.float32))


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"", "it is empty"),
        ("no/such/file.jpg", "cannot read 'no/such/file.jpg': No such file"),
        ("a\0b", "cannot read"),
        (".", "Is a directory"),
        (3, "not int"),
        (None, "not NoneType"),
        (np.zeros((2, 2, 3), np.int64), "not int64"),
        (np.zeros((2, 2), np.int16), r"not int16 \(2, 2\)"),
        (np.zeros((1, 2, 2, 3), np.uint8), r"\[H, W, channels\], not uint8 \(1, 2, 2, 3\)"),
        (np.zeros((0, 2, 3), np.uint8), r"not uint8 \(0, 2, 3\)"),
    ],
)
def test_value_that_is_not_an_image_is_refused(image: Any, words: str) -> None:
    with pytest.raises(camserve.InvalidArgument, match=words) as caught:
        image_bytes(image)

    assert list(caught.value.fields) == ["image"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.arange(24, dtype=np.uint16).reshape(2, 3, 4) * 2000,
        np.asfortranarray(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3, 1)),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_array_of_any_channels_is_sent_as_an_npy_file(array: Any) -> None:
    sent = np.load(io.BytesIO(image_bytes(array)), allow_pickle=False)

    assert sent.dtype == array.dtype
    assert np.array_equal(sent, array)


def test_pil_image_of_floats_is_sent_as_an_npy_file() -> None:
    sent = np.load(io.BytesIO(image_bytes(Image.new("F", (3, 2), 0.3))), allow_pickle=False)

    assert np.array_equal(sent, np.full((2, 3), 0.3, np.float32))


def explanation(**fields: Any) -> camserve.Explanation:
    response = explain_pb2.ExplainResponse(explanations=[explain_pb2.Explanation(**fields)])
    return decode_result(response).explanations[0]


def test_heatmap_is_decoded_in_row_order() -> None:
    data = np.arange(6, dtype="<f4").tobytes()

    heatmap = explanation(heatmap=explain_pb2.Heatmap(height=2, width=3, data=data)).heatmap

    np.testing.assert_array_equal(heatmap, [[0, 1, 2], [3, 4, 5]])
    assert heatmap.dtype == np.float32


@pytest.mark.parametrize("size", [0, 5, 20, 28])
def test_heatmap_of_a_wrong_size_raises_internal(size: int) -> None:
    with pytest.raises(camserve.Internal):
        explanation(heatmap=explain_pb2.Heatmap(height=2, width=3, data=bytes(size)))


def test_parts_that_were_not_requested_are_absent() -> None:
    bare = explanation(method="gradcam")

    assert bare.heatmap is None
    assert bare.overlay_picture is None
    assert bare.colored_picture is None
    assert bare.contrast is None


def test_contrast_and_parameters_are_decoded() -> None:
    full = explanation(
        target=explain_pb2.Prediction(label="tabby"),
        contrast=explain_pb2.Prediction(class_index=282),
        parameters={
            "n": explain_pb2.Parameter(number=3),
            "how": explain_pb2.Parameter(text="max"),
        },
    )

    assert full.title == "tabby, not class 282"
    assert full.parameters == {"n": 3.0, "how": "max"}


def test_box_of_a_prediction_is_decoded() -> None:
    box = explain_pb2.Box(left=1, top=2, right=3, bottom=4)
    result = explanation(target=explain_pb2.Prediction(label="dog", box=box, area=0.5)).target

    assert (result.box, result.area) == (camserve.Box(1, 2, 3, 4), 0.5)
    assert explanation(target=explain_pb2.Prediction(label="dog")).target.box is None


@pytest.mark.parametrize(
    "target",
    [
        7,
        camserve.probability(7),
        camserve.contrast(7, 8),
        camserve.finer(7, 8, 9, weight=0.5),
        camserve.segment(7),
        camserve.segment(7, camserve.Box(1, 2, 3, 4)),
        camserve.detection(7, camserve.Box(1, 2, 3, 4)),
    ],
)
def test_resolved_target_can_be_requested_again(target: Any) -> None:
    (sent,) = explain_request(targets=target).targets

    assert explanation(resolved_target=sent).resolved == target


def test_old_server_similarity_and_mask_give_no_resolved_target() -> None:
    (sent,) = explain_request(targets=camserve.similarity(b"photo")).targets
    (masked,) = explain_request(targets=camserve.mask(1, b"mask")).targets
    masked.segment.mask = b""  # as in responses

    assert explanation().resolved is None
    assert explanation(resolved_target=sent).resolved is None
    assert explanation(resolved_target=masked).resolved is None


@pytest.mark.parametrize("mask", [np.eye(5, dtype=bool), np.eye(5, dtype=np.uint8) * 3, Image.fromarray(np.eye(5) > 0)])
def test_mask_is_sent_as_a_png_of_one_bit(mask: Any) -> None:
    (sent,) = explain_request(targets=camserve.mask(1, mask)).targets
    image = Image.open(io.BytesIO(sent.segment.mask))

    assert (image.format, image.mode) == ("PNG", "1")
    np.testing.assert_array_equal(np.asarray(image), np.eye(5) > 0)


@pytest.mark.parametrize("option", ["fusion", "profile", "sign"])
def test_every_fusion_profile_and_sign_of_the_proto_has_a_name(option: str) -> None:
    known: Any = {
        "fusion": _FUSIONS,
        "profile": {None: 0, **PROFILES},
        "sign": SIGNS,
    }[option]
    kind: Any = {"fusion": explain_pb2.Fusion, "profile": explain_pb2.Profile, "sign": explain_pb2.Sign}[option]

    names = {kind.Name(number).lower().replace("_", "-") for number in known.values()}

    assert sorted(known.values()) == sorted(kind.values())
    assert names == {f"{option}-{name or 'unspecified'}" for name in known}


def test_smoothing_and_fusion_of_a_map_are_decoded() -> None:
    plain = explanation(method="m")
    full = explanation(
        method="m",
        augmentation_smoothing=True,
        eigen_smoothing=True,
        completeness_error=0.25,
        fusion=explain_pb2.FUSION_PRODUCT,
        intensity=explain_pb2.Heatmap(height=1, width=2, data=np.array([0, 1], "<f4").tobytes()),
    )

    assert (plain.how, plain.completeness_error, plain.fusion, plain.intensity) == ("m", None, None, None)
    assert full.how == "m, augmentation smoothing, eigen smoothing"
    assert (full.completeness_error, full.fusion) == (0.25, "product")
    np.testing.assert_array_equal(full.intensity, [[0, 1]])


@pytest.mark.parametrize("channels", [3, "all", [1.5], [-1], [True], np.True_])
def test_channels_that_are_no_indices_are_refused(channels: Any) -> None:
    method = camserve.Method("saliency", per_channel=channels)
    with pytest.raises(camserve.InvalidArgument, match="must be a list of indices") as caught:
        explain_request(methods=method)

    assert list(caught.value.fields) == ["methods.per_channel"]


def test_channel_of_a_map_is_decoded() -> None:
    whole, first = explanation(method="m"), explanation(method="m", augmentation_smoothing=True, input_channel=0)

    assert (whole.input_channel, whole.how) == (None, "m")
    assert (first.input_channel, first.how) == (0, "m, augmentation smoothing, channel 0")


@pytest.mark.parametrize("verdict", explain_pb2.Verdict.values())
def test_verdicts_have_the_names_of_the_proto(verdict: int) -> None:
    name = explain_pb2.Verdict.Name(verdict)

    assert f"VERDICT_{explanation(verdict=verdict).verdict}" == name


def test_verdict_of_a_newer_server_is_unspecified() -> None:
    assert explanation(verdict=99).verdict is camserve.Verdict.UNSPECIFIED


def test_kind_of_method_of_a_newer_server_is_its_number() -> None:
    from camserve.v1 import models_pb2  # noqa: PLC0415 -- used here only

    assert decode_method(models_pb2.MethodInfo(kind=99)).kind == "99"


def test_missing_box_means_the_whole_photo_was_visible() -> None:
    photo = decode_result(explain_pb2.ExplainResponse(photo=explain_pb2.Photo(width=4, height=3))).photo

    assert photo.seen == camserve.Box(0, 0, 4, 3)


@pytest.mark.parametrize(
    "option",
    [
        {"methods": [3]},
        {"top_k": "3"},
        {"top_k": 2.5},
        {"layers": [3]},
        {"alpha": "x"},
        {"model": 7},
        {"targets": [None]},
    ],
)
def test_option_of_a_wrong_type_raises_invalid_argument(option):
    with pytest.raises(camserve.InvalidArgument):
        explain_request(**option)


def test_without_methods_the_server_chooses():
    assert list(explain_request(methods=()).methods) == []


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_invalid_timeout_is_refused_before_anything_is_sent(timeout):
    with camserve.Client("127.0.0.1:1") as client, pytest.raises(camserve.InvalidArgument, match="timeout"):
        client.explain(b"photo", timeout=timeout)
