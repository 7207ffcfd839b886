"""The codec checks every field of a request before any work starts, and writes complete responses."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api import codec
from camserve_server.api.codec import replies, targets
from camserve_server.core import errors
from camserve_server.core.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError
from camserve_server.core.limits import Limits
from camserve_server.imaging.values import Box, Picture, Preprocess, Rendering
from camserve_server.jobs import Explanation, Job
from camserve_server.jobs.cost import runs_unchanged
from camserve_server.jobs.verdict import Verdict
from camserve_server.methods import METHODS, Parameter, Perturbation
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import LayerInfo, Layout, ModelInfo, TextHead
from camserve_server.serving.receipts import Receipt
from camserve_server.serving.requests import ExplainRequest
from camserve_server.serving.results import ExplainResult, ModelPrediction, Timing
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    MaskTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    TextTarget,
)

PARAMETERS = [parameter for name in METHODS for parameter in METHODS[name].parameters]
RANGES = [parameter for parameter in PARAMETERS if not parameter.choices]
WORDS = [parameter for parameter in PARAMETERS if parameter.choices]
NO_GRID = "its output has no grid over the image"


def layer(name, layout=None):
    return LayerInfo(name, "Conv2d", (1, 4, 7, 7), 112, 1, layout, "" if layout else NO_GRID)


def model(name, labels=(), classes=4):
    layers = [
        layer("stem", Layout("nchw", 14, 14)),
        layer("stem.conv", Layout("nchw", 14, 14)),
        layer("features", Layout("nchw", 7, 7)),
        layer("head"),
    ]
    return ModelInfo(
        name=name,
        source=f"timm:{name}",
        weights="default",
        digest="ab" * 32,
        labels=tuple(labels),
        classes=classes,
        parameters=1234,
        preprocess=Preprocess((224, 192), 256, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        layers={each.name: each for each in layers},
        default_layer="features",
        precision="float32",
        device="cpu",
    )


NET = model("resnet50", ["tabby cat", "Egyptian cat", "crane", "crane"])
MODELS = {
    "resnet50": NET,
    "wordless": model("wordless"),
    "large": model("large", [f"c{i}" for i in range(1000)], classes=1000),
    "ticks": replace(model("ticks"), task="multilabel"),
    "numbers": replace(model("numbers"), task="regress"),
    "pixels": replace(model("pixels", ["background", "cat", "dog", "sky"]), task="segment"),
    "boxes": replace(model("boxes", ["background", "cat", "dog", "sky"]), task="detect"),
    "scored boxes": replace(
        model("scored boxes", ["background", "cat", "dog", "sky"]), task="detect", object_classes=3
    ),
    "scales": replace(model("scales"), task="detect", pyramid=("stem", "features")),
    "vectors": replace(model("vectors"), task="embed"),
    "pairs": replace(model("pairs"), task="embed", text=TextHead(100.0, 0.0, exclusive=True, length=4)),
    "apart": replace(
        model("apart", ["a cat", "a dog"]), task="embed", text=TextHead(10.0, -5.0, exclusive=False, length=4)
    ),
    "rich": replace(model("rich"), embedding="head"),
    "lonely": model("lonely", classes=1),
    "spectra": replace(model("spectra"), preprocess=Preprocess((32, 32), 32, "bicubic", (0.5,) * 1000, (0.25,) * 1000)),
    "odd": replace(
        model("odd"),
        layers={
            **NET.layers,
            "table": LayerInfo("table", "Table", (), 0, 1, None, "it returns no tensor of numbers"),
            "volume": LayerInfo("volume", "Conv3d", (1, 4, 2, 7, 7), 0, 1, None, NO_GRID),
        },
    ),
}


def ask(limits=Limits(), **fields):  # noqa: B008 -- frozen
    return codec.read_explanation(explain_pb2.ExplainRequest(**fields), MODELS, limits)


def method(name, **parameters):
    values = {
        key: explain_pb2.Parameter(text=value) if isinstance(value, str) else explain_pb2.Parameter(number=value)
        for key, value in parameters.items()
    }
    return explain_pb2.Method(name=name, parameters=values)


def per_channel(*channels, name="saliency"):
    return {"methods": [explain_pb2.Method(name=name, per_channel=True, input_channels=channels)]}


def changed(layer="stem", **fields):
    return {"interventions": [explain_pb2.Intervention(layer=layer, **fields)]}


def index(value):
    return explain_pb2.Target(class_index=value)


def label(value):
    return explain_pb2.Target(label=value)


def contrast(why, why_not):
    def name(value):
        return explain_pb2.ClassName(**({"label": value} if isinstance(value, str) else {"class_index": value}))

    return explain_pb2.Target(contrast=explain_pb2.Contrast(why=name(why), why_not=name(why_not)))


def finer(why, *against, **more):
    against = [explain_pb2.ClassName(class_index=each) for each in against]
    return explain_pb2.Target(
        finer=explain_pb2.Finer(why=explain_pb2.ClassName(class_index=why), against=against, **more)
    )


def segment(value, **edges):
    region = explain_pb2.Box(**({"left": 1, "top": 2, "right": 20, "bottom": 30} | edges)) if edges else None
    name = explain_pb2.ClassName(class_index=value)
    return {"model": "pixels", "targets": [explain_pb2.Target(segment={"class_name": name, "region": region})]}


def detection(value, **edges):
    box = explain_pb2.Box(**({"left": 1, "top": 2, "right": 20, "bottom": 30} | edges)) if edges else None
    name = explain_pb2.ClassName(class_index=value)
    return {"model": "boxes", "targets": [explain_pb2.Target(detection={"class_name": name, "box": box})]}


def model_for(name):
    """Return the name of a model that a method explains."""
    return "boxes" if METHODS[name].tasks == ("detect",) else "resnet50"


def masked(mask, **fields):
    name = explain_pb2.ClassName(class_index=1)
    return explain_pb2.Target(segment=explain_pb2.Segment(class_name=name, mask=mask, **fields))


def similarity(image=b"photo"):
    return explain_pb2.Target(similarity=explain_pb2.Similarity(image=image))


def rendering(**fields):
    return {"rendering": explain_pb2.Rendering(**fields)}


# ----------------------------------------------------------------------------------------------------------- requests


def test_absent_fields_have_the_defaults_that_explain_proto_states():
    order = ask(image=b"photo")

    assert order.image == b"photo"
    assert order.job.model is NET  # "the first model that the server was given"
    assert order.job.calls == (MethodCall("gradcam"),)  # "Default: gradcam."
    assert order.job.targets == (RankTarget(0),)  # "Default: the top_k classes", and of top_k "Default: 1."
    assert order.job.layers == ("features",)  # "Default: the model's default layer."
    assert order.predictions == 5  # "Default: 5."
    assert order.rendering == Rendering(
        overlay=None,  # "Default: no overlay."
        heatmap_image=None,  # "Default: none."
        heatmap=False,
        colormap="jet",  # "Default: "jet"."
        alpha=0.5,  # "Default: 0.5."
        max_side=None,  # "Default: the photo's."
        quality=90,  # "Default: 90."
    )


def test_zero_differs_from_an_absent_field():
    order = ask(max_predictions=0, **rendering(alpha=0.0))

    assert order.predictions == 0
    assert order.rendering.alpha == 0.0


def test_every_field_of_a_request_is_decoded():
    order = ask(
        model="large",
        methods=[method("gradcam"), method("smoothgrad", samples=4, seed=7)],
        targets=[index(999), label("C17"), contrast(1, "c2")],
        layers=["features", "stem.conv"],
        max_predictions=1000,
        **rendering(
            overlay=explain_pb2.IMAGE_FORMAT_JPEG,
            heatmap_image=explain_pb2.IMAGE_FORMAT_WEBP,
            heatmap=True,
            colormap="viridis",
            alpha=1.0,
            max_side=16,
            quality=100,
            profile=explain_pb2.PROFILE_PAPER,
        ),
    )

    assert order.job.model.name == "large"
    assert order.job.calls == (
        MethodCall("gradcam", {}),
        MethodCall("smoothgrad", {"samples": 4, "noise": 0.15, "seed": 7}),
    )
    assert order.job.targets == (ClassTarget(999), ClassTarget(17), ContrastTarget(1, 2))
    assert order.job.layers == ("features", "stem.conv")
    assert order.predictions == 1000
    assert order.rendering == Rendering("jpeg", "webp", True, "viridis", 1.0, 16, 100)


def test_window_reaches_half_of_its_width_to_both_sides_of_its_centre():
    assert ask(**rendering(window={"centre": 40, "width": 30})).rendering.window == (25, 55)


def test_top_k_becomes_rank_targets():
    assert ask(model="large", top_k=16).job.targets == tuple(RankTarget(rank) for rank in range(16))


@pytest.mark.parametrize("written", ["Egyptian cat", "egyptian_cat", " EGYPTIAN CAT ", "Egyptian_Cat"])
def test_label_matches_in_any_case_and_with_underscores_for_spaces(written):
    assert ask(targets=[label(written)]).job.targets == (ClassTarget(1),)


def test_classes_that_share_a_label_can_be_named_by_index():
    assert ask(targets=[index(3)]).job.targets == (ClassTarget(3),)


SOFT = explain_pb2.Target(class_index=2, softmax=True)
BOX = Box(1.0, 2.0, 20.0, 30.0)


@pytest.mark.parametrize(
    ("fields", "target"),
    [
        ({"targets": [SOFT]}, ProbabilityTarget(2)),
        ({"model": "ticks", "targets": [SOFT]}, ProbabilityTarget(2, apart=True)),
        ({"model": "ticks", "targets": [contrast(0, 1)]}, ContrastTarget(0, 1)),
        ({"model": "numbers", "targets": [index(3)]}, ClassTarget(3)),
        ({"targets": [finer(1)]}, FinerTarget(1)),
        ({"targets": [finer(1, 0, 3, weight=0.5)]}, FinerTarget(1, (0, 3), 0.5)),
        ({"targets": [finer(1, weight=0)]}, FinerTarget(1, (), 0.0)),
        (detection(2), DetectionTarget(2)),
        (detection(2, left=1), DetectionTarget(2, BOX)),
        ({"model": "scored boxes", "targets": [contrast(1, 2)]}, DetectionTarget(1, against=2)),
        ({"model": "boxes"}, RankTarget(0)),
        ({"model": "pixels"}, RankTarget(0)),
    ],
)
def test_every_kind_of_target_is_decoded(fields, target):
    assert ask(**fields).job.targets == (target,)


def test_segment_and_similarity_targets_are_decoded():
    (everywhere,), (there,) = (ask(**fields).job.targets for fields in (segment(3), segment(3, left=1)))
    (alike,), (embedded,) = (ask(**likeness(name)).job.targets for name in ("rich", "vectors"))

    assert (everywhere.index, everywhere.box) == (3, None)
    assert (there.index, there.box) == (3, BOX)
    assert alike.file == embedded.file == b"photo"


WRONG = {
    # what: (request, error, field, words that the message has)
    "unknown model": ({"model": "resnet5"}, NotFound, "model", ["resnet5", 'did you mean "resnet50"', "wordless"]),
    "unknown method": (
        {"methods": [method("gradcam"), method("grdcam")]},
        NotFound,
        "methods[1].name",
        ["grdcam", 'did you mean "gradcam"', "smoothgrad"],
    ),
    "method without a name": ({"methods": [method("")]}, NotFound, "methods[0].name", ["gradcam"]),
    "unknown layer": (
        {"layers": ["features", "feature"]},
        NotFound,
        "layers[1]",
        ["feature", 'did you mean "features"', "stem, features"],
    ),
    "layer without a grid": (
        {"layers": ["head"]},
        FailedPrecondition,
        "layers[0]",
        ["head", NO_GRID, 'the default is "features"'],
    ),
    "layer named twice": ({"layers": ["stem", "stem"]}, InvalidArgument, "layers", ["twice"]),
    "empty layer name": ({"layers": [""]}, NotFound, "layers[0]", ["features"]),
    "pyramid of a classifier": (
        {"layers": ["pyramid"]},
        FailedPrecondition,
        "layers[0]",
        ["resnet50 has no pyramid", "it is no detector", 'the default is "features"'],
    ),
    "pyramid of a detector with one scale": (
        {"model": "boxes", "layers": ["pyramid"]},
        FailedPrecondition,
        "layers[0]",
        ["boxes has no pyramid", "its objects come from one grid"],
    ),
    "pyramid and another layer": (
        {"model": "scales", "layers": ["features", "pyramid"]},
        InvalidArgument,
        "layers",
        ["name no layer beside it"],
    ),
    "pyramid named twice": (
        {"model": "scales", "layers": ["pyramid", "pyramid"]},
        InvalidArgument,
        "layers",
        ["name no layer beside it"],
    ),
    "unknown label": (
        {"targets": [index(0), label("egyptian_catt")]},
        NotFound,
        "targets[1].label",
        ["egyptian_catt", 'did you mean "Egyptian cat"'],
    ),
    "empty label": ({"targets": [label("")]}, NotFound, "targets[0].label", ["resnet50"]),
    "ambiguous label": (
        {"targets": [label("Crane")]},
        InvalidArgument,
        "targets[0].label",
        ["Crane", "classes 2 and 3", "index"],
    ),
    "label of a model without labels": (
        {"model": "wordless", "targets": [label("tabby cat")]},
        NotFound,
        "targets[0].label",
        ["wordless has no labels", "index"],
    ),
    "class too large": ({"targets": [index(4)]}, NotFound, "targets[0].class_index", ["no class 4", "has 4, from 0"]),
    "empty target": ({"targets": [explain_pb2.Target()]}, InvalidArgument, "targets[0]", ["class_index"]),
    "contrast of nothing": (
        {"targets": [explain_pb2.Target(contrast=explain_pb2.Contrast())]},
        InvalidArgument,
        "targets[0].contrast.why",
        ["class_index"],
    ),
    "contrast with nothing": (
        {
            "targets": [
                explain_pb2.Target(contrast=explain_pb2.Contrast(why=explain_pb2.ClassName(class_index=1))),
            ]
        },
        InvalidArgument,
        "targets[0].contrast.why_not",
        ["class_index"],
    ),
    "contrast of a class with itself": (
        {"targets": [contrast(1, "egyptian cat")]},
        InvalidArgument,
        "targets[0].contrast.why_not",
        ["two different classes"],
    ),
    "contrast with a class too large": (
        {"targets": [contrast(1, 4)]},
        NotFound,
        "targets[0].contrast.why_not.class_index",
        ["no class 4"],
    ),
    "contrast of an unknown label": (
        {"targets": [contrast("tabby kat", 1)]},
        NotFound,
        "targets[0].contrast.why.label",
        ['did you mean "tabby cat"'],
    ),
    "top_k 0": ({"top_k": 0}, InvalidArgument, "top_k", ["1 to 4", "not 0"]),
    "top_k above the number of classes": ({"top_k": 5}, InvalidArgument, "top_k", ["1 to 4", "not 5"]),
    "top_k above the limit": ({"model": "large", "top_k": 17}, InvalidArgument, "top_k", ["1 to 16", "not 17"]),
    "too many methods": ({"methods": [method("gradcam")] * 17}, InvalidArgument, "methods", ["17", "16 is the limit"]),
    "too many targets": ({"targets": [index(1)] * 17}, InvalidArgument, "targets", ["17", "16 is the limit"]),
    "too many layers": ({"layers": ["stem"] * 9}, InvalidArgument, "layers", ["9", "8 is the limit"]),
    "too many predictions": ({"max_predictions": 1001}, InvalidArgument, "max_predictions", ["0 to 1000", "1001"]),
    "too many rows": (
        {"methods": [method("smoothgrad", samples=512, seed=seed) for seed in range(16)], "top_k": 4},
        InvalidArgument,
        "methods",
        ["32772 rows", "16384 is the limit"],
    ),
    "unknown parameter": (
        {"methods": [method("smoothgrad", sample=3)]},
        InvalidArgument,
        "methods[0].parameters",
        ['smoothgrad has no parameter "sample"', 'did you mean "samples"', "samples, noise, seed"],
    ),
    "parameter of a method that takes none": (
        {"methods": [method("gradcam", samples=3)]},
        InvalidArgument,
        "methods[0].parameters",
        ['gradcam has no parameter "samples"', "none"],
    ),
    "text for a number": (
        {"methods": [method("smoothgrad", samples="many")]},
        InvalidArgument,
        'methods[0].parameters["samples"]',
        ["samples is a number"],
    ),
    "a parameter without a value": (
        {"methods": [explain_pb2.Method(name="smoothgrad", parameters={"samples": explain_pb2.Parameter()})]},
        InvalidArgument,
        'methods[0].parameters["samples"]',
        ["samples is a number"],
    ),
    "a fraction of a sample": (
        {"methods": [method("smoothgrad", samples=1.5)]},
        InvalidArgument,
        'methods[0].parameters["samples"]',
        ["whole number", "1.5"],
    ),
    "too few samples": (
        {"methods": [method("smoothgrad", samples=0)]},
        InvalidArgument,
        'methods[0].parameters["samples"]',
        ["1 to 512", "not 0"],
    ),
    "too many samples": (
        {"methods": [method("gradcam"), method("smoothgrad", samples=513)]},
        InvalidArgument,
        'methods[1].parameters["samples"]',
        ["1 to 512", "not 513"],
    ),
    "a noise that is no number": (
        {"methods": [method("smoothgrad", noise=math.nan)]},
        InvalidArgument,
        'methods[0].parameters["noise"]',
        ["0 to 1", "nan"],
    ),
    "infinite noise": (
        {"methods": [method("smoothgrad", noise=math.inf)]},
        InvalidArgument,
        'methods[0].parameters["noise"]',
        ["0 to 1", "inf"],
    ),
    "alpha NaN": (rendering(alpha=math.nan), InvalidArgument, "rendering.alpha", ["0 to 1", "nan"]),
    "alpha -0.1": (rendering(alpha=-0.1), InvalidArgument, "rendering.alpha", ["0 to 1", "-0.1"]),
    "alpha 1.1": (rendering(alpha=1.1), InvalidArgument, "rendering.alpha", ["0 to 1", "1.1"]),
    "max_side 15": (rendering(max_side=15), InvalidArgument, "rendering.max_side", ["16 to 16384", "15"]),
    "max_side 16385": (rendering(max_side=16385), InvalidArgument, "rendering.max_side", ["16 to 16384", "16385"]),
    "quality 101": (rendering(quality=101), InvalidArgument, "rendering.quality", ["100", "101"]),
    "unknown overlay": (rendering(overlay=99), InvalidArgument, "rendering.overlay", ["unknown image format 99"]),
    "unknown heatmap": (rendering(heatmap_image=-1), InvalidArgument, "rendering.heatmap_image", ["image format -1"]),
    "unknown profile": (rendering(profile=77), InvalidArgument, "rendering.profile", ["unknown profile 77"]),
}


def likeness(model_, image=b"photo"):
    return {"model": model_, "targets": [similarity(image)]}


WRONG |= {
    # targets that do not fit what the model answers with
    "a class of pixels": (
        {"model": "pixels", "targets": [index(1)]},
        FailedPrecondition,
        "targets[0].class_index",
        ["pixels returns a class for every pixel: explain one with segment(...)"],
    ),
    "a contrast of boxes": (
        {"model": "boxes", "targets": [contrast(1, 2)]},
        FailedPrecondition,
        "targets[0].contrast",
        ["boxes does not score its objects in class 2: a contrast needs a detector that returns class_scores"],
    ),
    "a contrast with a class that is not scored": (
        {"model": "scored boxes", "targets": [contrast(1, 3)]},
        FailedPrecondition,
        "targets[0].contrast",
        ["scored boxes does not score its objects in class 3"],
    ),
    "drise of a contrast": (
        {"model": "scored boxes", "methods": [method("gradcam"), method("drise")], "targets": [contrast(1, 2)]},
        FailedPrecondition,
        "methods[1].name",
        ["drise compares detected objects, which have one class each: use another method for contrasts"],
    ),
    "channels of a cam": (
        per_channel(name="gradcam"),
        FailedPrecondition,
        "methods[0].per_channel",
        ["gradcam has no map of each channel of the input; methods that have: saliency, input_x_gradient"],
    ),
    "channels of a product": (
        per_channel(name="guided_gradcam"),
        FailedPrecondition,
        "methods[0].per_channel",
        ["guided_gradcam has no map"],
    ),
    "a channel that the model lacks": (
        per_channel(1, 3),
        InvalidArgument,
        "methods[0].input_channels[1]",
        ["is 0 to 2, not 3"],
    ),
    "a channel twice": (per_channel(1, 1), InvalidArgument, "methods[0].input_channels", ["twice"]),
    "channels without per_channel": (
        {"methods": [explain_pb2.Method(name="saliency", input_channels=[1])]},
        InvalidArgument,
        "methods[0].input_channels",
        ["methods[0].input_channels needs per_channel"],
    ),
    "channels with eigen smoothing": (
        {"methods": [explain_pb2.Method(name="saliency", per_channel=True, eigen_smoothing=True)]},
        FailedPrecondition,
        "methods[0].eigen_smoothing",
        ["no principal component"],
    ),
    "a thousand channels": (
        {"model": "spectra", **per_channel()},
        InvalidArgument,
        "methods[0].per_channel",
        ["spectra has 1000 channels, and 64 explanations is the limit: choose some with input_channels"],
    ),
    "a thousand named channels": (
        {"model": "spectra", **per_channel(*range(65))},
        InvalidArgument,
        "methods[0].input_channels",
        ["65 methods[0].input_channels, and 64 is the limit"],
    ),
    "64 channels of two targets": (
        {"model": "spectra", **per_channel(*range(64)), "targets": [index(0), index(1)]},
        InvalidArgument,
        "methods",
        ["128 explanations, and 64 is the limit"],
    ),
    "drise of a classifier": (
        {"methods": [method("gradcam"), method("drise")]},
        FailedPrecondition,
        "methods[1].name",
        ["drise needs a detector, and resnet50 is none"],
    ),
    "a segment of a classifier": (
        {**segment(1), "model": "resnet50"},
        FailedPrecondition,
        "targets[0].segment",
        ["resnet50 returns classes: explain one by its label or index"],
    ),
    "a detection in pixels": (
        {**detection(1), "model": "pixels"},
        FailedPrecondition,
        "targets[0].detection",
        ["pixel"],
    ),
    "a finer number": (
        {"model": "numbers", "targets": [finer(1)]},
        FailedPrecondition,
        "targets[0].finer",
        ["numbers returns numbers: explain one"],
    ),
    "the likeness of boxes": (likeness("boxes"), FailedPrecondition, "targets[0].similarity", ["detection(...)"]),
    "text for classes": (
        {"targets": [explain_pb2.Target(text="a cat")]},
        FailedPrecondition,
        "targets[0].text",
        ["no texts"],
    ),
    "texts for classes": ({"texts": ["a cat"]}, FailedPrecondition, "texts", ["no texts", "SigLIP"]),
    "text for vectors": (
        {"model": "vectors", "targets": [explain_pb2.Target(text="a cat")]},
        FailedPrecondition,
        "targets[0].text",
        ["no texts"],
    ),
    "nothing for pairs": (
        {"model": "pairs"},
        FailedPrecondition,
        "targets",
        ['text("a photo of a cat")', "texts=[...]"],
    ),
    "class without texts": (
        {"model": "pairs", "targets": [index(0)]},
        FailedPrecondition,
        "targets[0].class_index",
        ["text("],
    ),
    "long text": (
        {"model": "pairs", "targets": [explain_pb2.Target(text="x" * 1001)]},
        InvalidArgument,
        "targets[0].text",
        ["1,001", "1,000"],
    ),
    "long texts": ({"model": "pairs", "texts": ["a", "x" * 1001]}, InvalidArgument, "texts[1]", ["1,001", "1,000"]),
    "10,000 texts": ({"model": "pairs", "texts": map(str, range(10_000))}, InvalidArgument, "texts", ["10000", "1000"]),
    "text named twice": (
        {"model": "pairs", "texts": ["a", "b", "a"]},
        InvalidArgument,
        "texts[2]",
        ["same", "index 0"],
    ),
    "unknown text": (
        {"model": "pairs", "texts": ["a cat", "a dog"], "targets": [explain_pb2.Target(label="a cta")]},
        NotFound,
        "targets[0].label",
        ['pairs has no label "a cta"'],
    ),
    "a change to no layer": (changed("stem.cnv", scale=2), NotFound, "interventions[0].layer", ['"stem.conv"']),
    "no change": (changed(), InvalidArgument, "interventions[0]", ["one of silence, scale, clamp"]),
    "silence that is false": (changed(silence=False), InvalidArgument, "interventions[0].silence", ["true"]),
    "a mean that is false": (changed(replace_mean=False), InvalidArgument, "interventions[0].replace_mean", ["true"]),
    "channel 99": (
        changed(silence=True, channels=[1, 99]),
        InvalidArgument,
        "interventions[0].channels",
        ['no channel 99: layer "stem" has 4 channels, from 0'],
    ),
    "a channel named twice": (
        changed(silence=True, channels=[1, 2, 1]),
        InvalidArgument,
        "interventions[0].channels",
        ["twice"],
    ),
    "too many channels": (
        changed(silence=True, channels=range(8193)),
        InvalidArgument,
        "interventions[0].channels",
        ["8193", "8192 is the limit"],
    ),
    "too many changes": (
        {"interventions": [explain_pb2.Intervention(layer="stem", scale=2)] * 17},
        InvalidArgument,
        "interventions",
        ["17 interventions, and 16 is the limit"],
    ),
    "a clamp of nothing": (changed(clamp={}), InvalidArgument, "interventions[0].clamp", ["a minimum, a maximum"]),
    "a clamp the wrong way": (
        changed(clamp={"minimum": 2, "maximum": 1}),
        InvalidArgument,
        "interventions[0].clamp",
        ["the minimum 2 is greater than the maximum 1"],
    ),
    "a scale that is no number": (
        changed(scale=math.nan),
        InvalidArgument,
        "interventions[0].scale",
        ["a finite number, not nan"],
    ),
    "a gradient of nothing": (
        changed(clip_gradient=0),
        InvalidArgument,
        "interventions[0].clip_gradient",
        ["greater than 0, not 0"],
    ),
    "a gradient at an input": (
        changed(clip_gradient=1, input=True),
        InvalidArgument,
        "interventions[0].input",
        ["at a layer's output"],
    ),
    "a mean without a grid": (
        changed("head", replace_mean=True),
        FailedPrecondition,
        "interventions[0].replace_mean",
        ["no grid to take the mean over"],
    ),
    "a layer without a tensor": (
        {"model": "odd", **changed("table", silence=True)},
        FailedPrecondition,
        "interventions[0].layer",
        ["cannot be changed: it returns no tensor"],
    ),
    "a layer with five axes": (
        {"model": "odd", **changed("volume", silence=True)},
        FailedPrecondition,
        "interventions[0].layer",
        ["unknown: its output has 5 axes"],
    ),
    "no target for vectors": ({"model": "vectors"}, FailedPrecondition, "targets", ["similarity(...)"]),
    "a likeness without an embedding": (
        likeness("resnet50"),
        FailedPrecondition,
        "targets[0].similarity",
        ["resnet50 does not end in a linear layer", "timm:NAME?classes=0"],
    ),
    "a likeness to nothing": (likeness("rich", b""), InvalidArgument, "targets[0].similarity.image", ["empty"]),
    "the probability of a number": (
        {"model": "numbers", "targets": [explain_pb2.Target(class_index=1, softmax=True)]},
        FailedPrecondition,
        "targets[0].softmax",
        ["not probabilities"],
    ),
    "the probability of a contrast": (
        {"targets": [explain_pb2.Target(contrast=contrast(0, 1).contrast, softmax=True)]},
        InvalidArgument,
        "targets[0].softmax",
        ["only a class has a probability"],
    ),
    "finer against itself": ({"targets": [finer(1, 0, 1)]}, InvalidArgument, "targets[0].finer.against", ["once"]),
    "finer against one twice": ({"targets": [finer(1, 0, 0)]}, InvalidArgument, "targets[0].finer.against", ["once"]),
    "finer against too many": (
        {"model": "large", "targets": [finer(0, *range(1, 10))]},
        InvalidArgument,
        "targets[0].finer.against",
        ["8 is the limit"],
    ),
    "finer with one class": (
        {"model": "lonely", "targets": [finer(0)]},
        FailedPrecondition,
        "targets[0].finer",
        ["only one class"],
    ),
    "an empty box": (
        detection(1, left=20),
        InvalidArgument,
        "targets[0].detection.box",
        ["left is 20, and right is 20: the box is empty"],
    ),
    "a box without numbers": (segment(1, top=math.nan), InvalidArgument, "targets[0].segment.region.top", ["nan"]),
    "an empty mask": (
        {"model": "pixels", "targets": [masked(b"")]},
        InvalidArgument,
        "targets[0].segment.mask",
        ["the mask is empty: responses leave its file out"],
    ),
    "a mask and a region": (
        {"model": "pixels", "targets": [masked(b"mask", region=explain_pb2.Box(right=1, bottom=1))]},
        InvalidArgument,
        "targets[0].segment.mask",
        ["a region or a mask, not both"],
    ),
    "a segment of no class": (
        {"model": "pixels", "targets": [explain_pb2.Target(segment=explain_pb2.Segment())]},
        InvalidArgument,
        "targets[0].segment.class_name",
        ["class_index"],
    ),
}


@pytest.mark.parametrize(("request_", "error", "field", "words"), WRONG.values(), ids=WRONG)
def test_invalid_field_is_refused_with_its_name_and_the_valid_values(request_, error, field, words):
    with pytest.raises(ServiceError) as caught:
        ask(image=b"photo", **request_)

    assert type(caught.value) is error
    assert caught.value.field == field
    assert [word for word in words if word not in caught.value.message] == []


def test_every_limit_on_requests_can_be_lowered_by_the_operator():
    low = Limits(rows=8, methods=1, targets=2, layers=1)
    for fields, field in (
        ({"methods": [method("gradcam")] * 2}, "methods"),
        ({"targets": [index(0)] * 3}, "targets"),
        ({"top_k": 3}, "top_k"),
        ({"layers": ["stem", "features"]}, "layers"),
        ({"methods": [method("smoothgrad", samples=8)]}, "methods"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            ask(low, **fields)
        assert caught.value.field == field


@pytest.mark.parametrize("layers", [[], ["pyramid"]])
@pytest.mark.parametrize(
    ("fusion", "expected"), [(explain_pb2.FUSION_UNSPECIFIED, "sum"), (explain_pb2.FUSION_MAX, "max")]
)
def test_layers_of_a_pyramid_are_all_scales_in_one_map(layers, fusion, expected):
    job = ask(model="scales", layers=layers, fusion=fusion).job

    assert (job.layers, job.fusion, job.pyramid) == (("stem", "features"), expected, True)
    assert job.explanations == 1


def test_layers_of_a_pyramid_named_one_by_one_have_a_map_each():
    job = ask(model="scales", layers=["stem", "features"]).job

    assert (job.layers, job.fusion, job.pyramid) == (("stem", "features"), None, False)
    assert job.explanations == 2


def test_module_named_pyramid_is_a_layer():
    net = replace(NET, layers={**NET.layers, "pyramid": layer("pyramid", Layout("nchw", 7, 7))})
    order = codec.read_explanation(explain_pb2.ExplainRequest(layers=["pyramid"]), {"net": net}, Limits())

    assert (order.job.layers, order.job.fusion, order.job.pyramid) == (("pyramid",), None, False)


def test_maps_of_channels_cost_the_rows_of_one_map():
    whole, parts, some = (
        ask(**each).job for each in ({"methods": [method("saliency")]}, per_channel(), per_channel(2, 0))
    )

    assert (whole.explanations, parts.explanations, some.explanations) == (1, 3, 2)
    assert whole.rows == parts.rows == some.rows == 1
    assert [job.calls[0].input_channels for job in (whole, parts, some)] == [(), (0, 1, 2), (2, 0)]
    assert len({job.calls[0].key for job in (whole, parts, some)}) == 3


def test_maps_of_channels_are_not_evaluated():
    request = explain_pb2.ExplainRequest(**per_channel())
    with pytest.raises(FailedPrecondition, match="metrics change all channels of a pixel") as caught:
        codec.read_evaluation(evaluate_pb2.EvaluateRequest(explain=request), MODELS, Limits())

    assert caught.value.field == "explain.methods[0].per_channel"


def test_interventions_cost_one_more_row():
    """The row of the model without them, whose predictions are returned too."""
    assert ask().job.rows == 1
    assert ask(interventions=CHANGES).job.rows == 2
    assert ask(interventions=CHANGES, methods=[method("smoothgrad", samples=8)]).job.rows == 10


def test_methods_and_layers_of_one_pass_cost_one_row_for_each_target():
    cams = [method(name) for name in METHODS if runs_unchanged(MethodCall(name))]
    request = {"methods": cams, "layers": ["stem", "features"], "targets": [index(0), index(1)]}

    assert ask(Limits(rows=2), **request).job.rows == 2
    with pytest.raises(InvalidArgument, match="costs 2 rows, and 1 is the limit"):
        ask(Limits(rows=1), **request)


HOSTILE = {
    "model": lambda name: {"model": name},
    "method": lambda name: {"methods": [method(name)]},
    "parameter": lambda name: {"methods": [method("smoothgrad", **{name: 1})]},
    "layer": lambda name: {"layers": [name]},
    "label": lambda name: {"targets": [label(name)]},
    "label in a contrast": lambda name: {"targets": [contrast(0, name)]},
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_errors_repeat_at_most_64_characters_of_a_name(make):
    with pytest.raises(ServiceError) as caught:
        ask(**make("Ж" * Limits().text))

    assert "Ж" * 63 + "…" in caught.value.message
    assert "Ж" * 64 not in caught.value.message + caught.value.field
    assert len(caught.value.message) < 500


def test_errors_repeat_a_name_of_64_characters_unchanged():
    with pytest.raises(NotFound, match=f'"{"z" * 64}"'):
        ask(model="z" * 64)


def test_padded_ambiguous_label_is_truncated_in_the_error():
    with pytest.raises(InvalidArgument) as caught:
        ask(targets=[label("_" * 10_000 + "crane")])

    assert len(caught.value.message) < 500


def test_error_for_a_label_of_1000_classes_names_only_some_classes():
    """A status is sent in trailers, which gRPC limits to 8 KiB."""
    net = replace(NET, labels=("unused",) * 1000, classes=1000)
    with pytest.raises(InvalidArgument, match="0 and 1 and 2 ") as caught:
        codec.read_explanation(explain_pb2.ExplainRequest(targets=[label("unused")]), {"net": net}, Limits())

    assert len(caught.value.message) < 500


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_huge_name_is_refused_without_a_search_for_similar_names(make, monkeypatch):
    """Requests are checked on the event loop, where seconds of work would block every call."""
    searched, search = [], errors.difflib.get_close_matches

    def searching(word, *among, **how):
        searched.append(len(word))
        return search(word, *among, **how)

    monkeypatch.setattr(errors.difflib, "get_close_matches", searching)
    with pytest.raises(ServiceError):
        ask(**make("tabby cat " * 1_500_000))

    assert max(searched, default=0) <= errors.LONGEST_NAME


def test_error_names_twelve_layers_and_counts_the_others():
    layers = {f"block{i}": layer(f"block{i}", Layout("nchw", 7, 7)) for i in range(50)}
    net = replace(NET, layers=layers)
    with pytest.raises(NotFound) as caught:
        codec.read_explanation(explain_pb2.ExplainRequest(layers=["zzz"]), {"net": net}, Limits())

    assert "block11 and 38 more" in caught.value.message
    assert "block12" not in caught.value.message


SMALLEST, LARGEST = (float(value) for value in (np.float32(1e-45), np.finfo(np.float32).max))

NUMBERS = {
    # every number and enum in an ExplainRequest, its least and its greatest value, and how a request says it
    "methods.parameters.value.number": (1, 512, lambda v: {"methods": [method("smoothgrad", samples=v)]}),
    "methods.input_channels": (0, 2, per_channel),
    "targets.class_index": (0, 3, lambda v: {"targets": [index(v)]}),
    "targets.contrast.why.class_index": (0, 3, lambda v: {"targets": [contrast(v, 2)]}),
    "targets.contrast.why_not.class_index": (0, 3, lambda v: {"targets": [contrast(2, v)]}),
    "targets.finer.why.class_index": (0, 3, lambda v: {"targets": [finer(v, 2)]}),
    "targets.finer.against.class_index": (0, 3, lambda v: {"targets": [finer(2, v)]}),
    "targets.finer.weight": (0, 1, lambda v: {"targets": [finer(0, weight=v)]}),
    "targets.segment.class_name.class_index": (0, 3, segment),
    "targets.segment.region.left": (-16384, 19.5, lambda v: segment(1, left=v)),
    "targets.segment.region.top": (-16384, 29.5, lambda v: segment(1, top=v)),
    "targets.segment.region.right": (1.5, 32768, lambda v: segment(1, right=v)),
    "targets.segment.region.bottom": (2.5, 32768, lambda v: segment(1, bottom=v)),
    "targets.detection.class_name.class_index": (0, 3, detection),
    "targets.detection.box.left": (-16384, 19.5, lambda v: detection(1, left=v)),
    "targets.detection.box.top": (-16384, 29.5, lambda v: detection(1, top=v)),
    "targets.detection.box.right": (1.5, 32768, lambda v: detection(1, right=v)),
    "targets.detection.box.bottom": (2.5, 32768, lambda v: detection(1, bottom=v)),
    "top_k": (1, 4, lambda v: {"top_k": v}),
    "max_predictions": (0, 1000, lambda v: {"max_predictions": v}),
    "rendering.overlay": (0, 3, lambda v: rendering(overlay=v)),
    "rendering.heatmap_image": (0, 3, lambda v: rendering(heatmap_image=v)),
    "rendering.alpha": (0, 1, lambda v: rendering(alpha=v)),
    "rendering.max_side": (16, 16384, lambda v: rendering(max_side=v)),
    "rendering.quality": (1, 100, lambda v: rendering(quality=v)),
    "rendering.profile": (0, 5, lambda v: rendering(profile=v)),
    "rendering.sign": (0, 4, lambda v: rendering(sign=v)),
    "rendering.scale_value": (SMALLEST, LARGEST, lambda v: rendering(scale_value=v)),
    "rendering.threshold_quantile": (0, 1, lambda v: rendering(threshold_quantile=v)),
    "rendering.threshold_value": (0, LARGEST, lambda v: rendering(threshold_value=v)),
    "rendering.contour_lines": (0, 16, lambda v: rendering(contour_lines=v)),
    "rendering.regions.quantile": (0, 1, lambda v: rendering(regions={"quantile": v})),
    "rendering.regions.mass": (0, 1, lambda v: rendering(regions={"mass": v})),
    "rendering.regions.max_regions": (1, 64, lambda v: rendering(regions={"max_regions": v})),
    "rendering.bands": (0, 511, lambda v: rendering(bands=[v])),
    "rendering.window.centre": (-LARGEST, LARGEST, lambda v: rendering(window={"centre": v, "width": 1})),
    "rendering.window.width": (SMALLEST, LARGEST, lambda v: rendering(window={"centre": 0, "width": v})),
    "fusion": (0, 4, lambda v: {"fusion": v}),
    "value_range.minimum": (-LARGEST, 1.5, lambda v: {"value_range": {"minimum": v, "maximum": 2}}),
    "value_range.maximum": (2, LARGEST, lambda v: {"value_range": {"minimum": 1.5, "maximum": v}}),
    "interventions.channels": (0, 3, lambda v: changed(silence=True, channels=[v])),
    "interventions.scale": (-LARGEST, LARGEST, lambda v: changed(scale=v)),
    "interventions.clamp.minimum": (-LARGEST, LARGEST, lambda v: changed(clamp={"minimum": v})),
    "interventions.clamp.maximum": (-LARGEST, LARGEST, lambda v: changed(clamp={"maximum": v})),
    "interventions.clip_gradient": (SMALLEST, LARGEST, lambda v: changed(clip_gradient=v)),
}
ZERO_IS_ABSENT = {"rendering.max_side", "rendering.quality"}
SAME_CLASS = {
    (f"targets.{path}.class_index", 2) for path in ("contrast.why", "contrast.why_not", "finer.why", "finer.against")
}
TRIED = {
    "TYPE_UINT32": [0, 2**31 - 1, 2**31, 2**32 - 1],  # the last is what another language's -1 arrives as
    "TYPE_ENUM": [-(2**31), -1, 0, 2**31 - 1],
    "TYPE_FLOAT": [-math.inf, -1, -0.1, 0, 0.5, 2**31 - 1, math.inf, math.nan],
    "TYPE_DOUBLE": [-math.inf, -1, 0, 0.5, 2**31 - 1, 1e308, math.inf, math.nan],
}


def numbers(descriptor, prefix=""):
    """Yield path and type of every number and enum below a message."""
    for field in descriptor.fields:
        path = prefix + field.name
        if field.type == field.TYPE_MESSAGE:
            yield from numbers(field.message_type, f"{path}.")
        elif field.type not in (field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_BOOL):
            yield path, next(name for name in TRIED if getattr(field, name) == field.type)


def tries(path, kind):
    least, greatest, _ = NUMBERS[path]
    return [*TRIED[kind], least, greatest, greatest + 1]


def allowed(path, value):
    least, greatest, _ = NUMBERS[path]
    if value == 0 and path in ZERO_IS_ABSENT:
        return True
    whole = path != "methods.parameters.value.number" or float(value).is_integer()
    return least <= value <= greatest and whole and (path, value) not in SAME_CLASS


@pytest.mark.parametrize(("path", "kind"), list(numbers(explain_pb2.ExplainRequest.DESCRIPTOR)))
def test_number_is_accepted_only_within_its_range(path, kind):
    for value in tries(path, kind):
        request = NUMBERS[path][2](value)
        if allowed(path, value):
            ask(**request)
        else:
            with pytest.raises((InvalidArgument, NotFound)) as caught:
                ask(**request)
            assert caught.value.field


@pytest.mark.parametrize("parameter", RANGES, ids=lambda p: p.name)
def test_any_number_is_accepted_or_refused_by_a_parameter(parameter):
    name = next(name for name in METHODS if parameter in METHODS[name].parameters)
    for value in (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 2.0**63, -0.0):
        request = {"model": model_for(name), "methods": [method(name, **{parameter.name: value})]}
        whole = not parameter.integer or (math.isfinite(value) and value == int(value))
        if parameter.minimum <= value <= parameter.maximum and whole:
            assert ask(**request).job.calls[0].parameters[parameter.name] == value
        else:
            with pytest.raises(InvalidArgument, match=f"{parameter.name}"):
                ask(**request)


# ------------------------------------------------------------------------------------------------------------ replies


def finding(heatmap=None, verdict=Verdict.OK, target=ClassTarget(1), **rest):  # noqa: B008 -- frozen
    heatmap = np.zeros((2, 3), np.float32) if heatmap is None else heatmap
    call = MethodCall("smoothgrad", {"samples": 4, "noise": 0.25, "seed": 0})
    return Explanation(call, rest.get("layer", ""), target, rest.get("score", 1.5), heatmap, verdict)


CHANGES = (
    explain_pb2.Intervention(layer="stem", channels=[0, 3], silence=True),
    explain_pb2.Intervention(layer="head", input=True, scale=-0.5),
    explain_pb2.Intervention(layer="stem", clamp={"minimum": -1}),
    explain_pb2.Intervention(layer="stem", clamp={"minimum": 0, "maximum": 0}),
    explain_pb2.Intervention(layer="features", replace_mean=True),
    explain_pb2.Intervention(layer="features", clip_gradient=2),
)
RECEIPT = Receipt(
    *("timm:resnet50", "default", "d1", "float32", "cpu", "d2", "d3", {"torch": "2.11"}, ("a cat",), (0.0, 4095.0)),
    ask(interventions=CHANGES).job.interventions,
)


def reply(logits=(0.0, 1.0, 2.0, 3.0), predictions=4, answers=(), net=NET, *, heatmap=True):
    logits = np.asarray(logits, np.float32)
    request = ExplainRequest(Job(net, (), (), ()), Rendering(heatmap=heatmap), predictions, b"")
    prediction = ModelPrediction(net, logits, Box(80.0, 0.0, 560.0, 480.0))
    timing = Timing(0.001, 0.002, 0.003, 0.004, 5)
    return codec.explain_response(request, ExplainResult(prediction, list(answers), (480, 640), RECEIPT, timing))


def explained(net, values, target, score=1.5):
    (explanation,) = reply(values, answers=[finding(target=target, score=score)], net=net).explanations
    return explanation


def test_multilabel_models_have_sigmoids_and_regressors_no_probabilities():
    ticks, numbers = (reply(net=MODELS[name], logits=[0, 3, -1, -1000]) for name in ("ticks", "numbers"))

    assert [prediction.class_index for prediction in ticks.predictions] == [1, 0, 2, 3]
    assert [prediction.probability for prediction in ticks.predictions] == pytest.approx(
        [0.95257413, 0.5, 0.26894143, 0.0]
    )
    assert [prediction.score for prediction in numbers.predictions] == [3, 0, -1, -1000]
    assert [prediction.probability for prediction in numbers.predictions] == [0] * 4


def test_segmentation_predicts_classes_by_area_with_the_background_last():
    covered = [[0.5, 0.9, 4.0], [0.2, 0.8, 3.0], [0.0, 0.0, 0.0], [0.3, 0.7, 2.0]]
    response = reply(net=MODELS["pixels"], logits=covered)

    assert [prediction.label for prediction in response.predictions] == ["sky", "cat", "background"]
    assert [prediction.area for prediction in response.predictions] == pytest.approx([0.3, 0.2, 0.5])
    assert [prediction.probability for prediction in response.predictions] == pytest.approx([0.7, 0.8, 0.9])
    assert [prediction.score for prediction in response.predictions] == pytest.approx([2, 3, 4])
    assert explained(MODELS["pixels"], covered, SegmentTarget(1)).target == response.predictions[1]


def test_predicted_objects_have_boxes_in_pixels_of_the_photo():
    # The model's input of 192 x 224 pixels shows the photo from 80 to 560 across, and from 0 to 480 down.
    objects = [[2, 0.75, 0, 0, 192, 224], [1, 0.5, 48, 112, 96, 168], [-1, -1, -1, -1, -1, -1]]
    whole, part = reply(net=MODELS["boxes"], logits=objects).predictions

    assert (whole.label, whole.probability, whole.score) == ("dog", 0.75, 0.75)
    assert (part.label, part.probability, part.score) == ("cat", 0.5, 0.5)
    assert whole.box == explain_pb2.Box(left=80, top=0, right=560, bottom=480)
    assert part.box == explain_pb2.Box(left=200, top=240, right=320, bottom=360)
    target = DetectionTarget(1, Box(48, 112, 96, 168), found=True, rank=1)
    assert explained(MODELS["boxes"], objects, target, 0.5).target == part
    compared = explained(MODELS["boxes"], objects, replace(target, against=3), 0.375)
    assert compared.target == part
    assert (compared.contrast.label, compared.contrast.score, compared.contrast.box) == ("sky", 0.125, part.box)


def test_embedding_has_no_predictions_and_a_similarity_target():
    explanation = explained(MODELS["vectors"], [1, 2, 3], SimilarityTarget(), 0.25)

    assert reply(net=MODELS["vectors"], logits=[1, 2, 3]).predictions == []
    assert (explanation.target.label, explanation.target.score) == ("similarity", 0.25)


@pytest.mark.parametrize(
    ("model_", "target", "expected"),
    [
        ("resnet50", ClassTarget(1), index(1)),
        ("resnet50", ProbabilityTarget(1), explain_pb2.Target(class_index=1, softmax=True)),
        ("resnet50", ContrastTarget(1, 2), contrast(1, 2)),
        ("resnet50", FinerTarget(1, (0, 2), 0.5), finer(1, 0, 2, weight=0.5)),
        ("rich", SimilarityTarget(), similarity(b"")),
        ("pixels", SegmentTarget(1), segment(1)["targets"][0]),
        ("pixels", MaskTarget(1, mask=np.ones((2, 2), bool)), masked(b"")),
        (
            "pixels",
            SegmentTarget(1, Box(48, 112, 96, 168)),
            segment(1, left=200, top=240, right=320, bottom=360)["targets"][0],
        ),
        (
            "boxes",
            DetectionTarget(1, Box(48, 112, 96, 168), found=True),
            detection(1, left=200, top=240, right=320, bottom=360)["targets"][0],
        ),
    ],
)
def test_target_of_a_job_is_encoded_as_resolved_target(model_, target, expected):
    net = MODELS[model_]
    values = np.ones((4, 3)) if net.task == "segment" else np.ones((1, 6)) if net.task == "detect" else np.arange(4)

    assert explained(net, values, target).resolved_target == expected


def test_times_are_in_milliseconds():
    timing = reply().timing

    assert [timing.decode_ms, timing.queue_ms, timing.compute_ms, timing.render_ms] == pytest.approx([1, 2, 3, 4])
    assert timing.batch_rows == 5


def test_predictions_are_sorted_by_probability_then_by_index():
    predictions = reply([1.0, 3.0, 3.0, -2.0]).predictions

    assert [each.class_index for each in predictions] == [1, 2, 0, 3]
    assert [each.label for each in predictions] == ["Egyptian cat", "crane", "tabby cat", "crane"]
    assert [each.score for each in predictions] == [3.0, 3.0, 1.0, -2.0]


@pytest.mark.parametrize(("wanted", "got"), [(0, 0), (1, 1), (4, 4), (1000, 4)])
def test_number_of_predictions_is_the_requested_one_or_that_of_the_classes(wanted, got):
    assert len(reply(predictions=wanted).predictions) == got


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("logits", "probabilities"),
    [
        ([0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]),
        ([1000, 1000, 0, -1000], [0.5, 0.5, 0, 0]),
        ([LARGEST, -LARGEST, 0, 0], [1, 0, 0, 0]),
        ([-LARGEST] * 4, [0.25] * 4),
        ([-1e5, -1e5 - 1, -np.inf, -1e6], [1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0, 0]),
    ],
)
def test_softmax_of_large_logits_does_not_overflow(logits, probabilities):
    result = {prediction.class_index: prediction.probability for prediction in reply(logits).predictions}

    np.testing.assert_allclose([result[i] for i in range(4)], probabilities, rtol=1e-6, atol=0)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nan_logits_still_give_a_response(broken):
    predictions = reply([0.0, broken, 1.0, 2.0]).predictions

    assert sorted(each.class_index for each in predictions) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["<f4", ">f4"])
def test_heatmap_is_encoded_as_little_endian_floats_in_row_order(order):
    values = np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5
    sent = reply(answers=[finding(values.astype(order))]).explanations[0].heatmap

    assert (sent.height, sent.width) == (2, 3)
    assert sent.data[:4] == b"\x00\x00\x20\xc0"  # -2.5
    np.testing.assert_array_equal(np.frombuffer(sent.data, "<f4").reshape(2, 3), values)


def test_heatmap_that_is_a_view_is_encoded_in_its_own_order():
    values = np.arange(6, dtype=np.float32).reshape(3, 2).T
    sent = reply(answers=[finding(values)]).explanations[0].heatmap

    np.testing.assert_array_equal(np.frombuffer(sent.data, "<f4").reshape(2, 3), values)


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_has_its_own_wire_value_and_message(verdict):
    sent = reply(answers=[finding(verdict=verdict)]).explanations[0]

    assert explain_pb2.Verdict.Name(sent.verdict) == f"VERDICT_{verdict.name}"
    assert sent.verdict_message == ("" if verdict is Verdict.OK else verdict.value)


def test_every_specified_verdict_of_the_proto_is_used():
    assert {value.name for value in explain_pb2.Verdict.DESCRIPTOR.values} == {
        "VERDICT_UNSPECIFIED",
        *(f"VERDICT_{verdict.name}" for verdict in Verdict),
    }


def test_explanation_has_its_target_method_and_layer():
    pictures = {"overlay": Picture("jpeg", b"over", 640, 480), "heatmap_image": Picture("png", b"heat", 320, 240)}
    sent = reply(
        answers=[replace(finding(target=ContrastTarget(1, 0), layer="features", score=1.0), **pictures)]
    ).explanations[0]

    assert (sent.method, sent.layer, sent.score) == ("smoothgrad", "features", 1.0)
    assert (sent.target.class_index, sent.target.label, sent.target.score) == (1, "Egyptian cat", 1.0)
    assert (sent.contrast.class_index, sent.contrast.label, sent.contrast.score) == (0, "tabby cat", 0.0)
    assert {name: value.number for name, value in sent.parameters.items()} == {"samples": 4, "noise": 0.25, "seed": 0}
    assert (sent.overlay.format, sent.overlay.data) == (explain_pb2.IMAGE_FORMAT_JPEG, b"over")
    assert (sent.overlay.width, sent.overlay.height) == (640, 480)
    assert (sent.heatmap_image.format, sent.heatmap_image.data) == (explain_pb2.IMAGE_FORMAT_PNG, b"heat")
    assert (sent.heatmap_image.width, sent.heatmap_image.height) == (320, 240)


def test_first_channel_differs_from_a_map_of_all_channels():
    first, whole = reply(answers=[replace(finding(), input_channel=0), finding()]).explanations

    assert (first.HasField("input_channel"), first.input_channel) == (True, 0)
    assert not whole.HasField("input_channel")


def test_parts_that_were_not_requested_are_absent():
    sent = reply(answers=[finding()], heatmap=False).explanations[0]

    assert [name for name in ("contrast", "heatmap", "overlay", "heatmap_image") if sent.HasField(name)] == []


def test_response_has_the_model_and_the_visible_box_of_the_photo():
    sent = reply()

    assert sent.model == "resnet50"
    assert (sent.photo.height, sent.photo.width) == (480, 640)
    assert sent.photo.seen == explain_pb2.Box(left=80, top=0, right=560, bottom=480)


def test_texts_of_a_request_are_the_classes_of_its_model():
    exclusive, apart = (ask(model=name, texts=["a cat", "a dog", "A CAR"]) for name in ("pairs", "apart"))
    named = [explain_pb2.Target(label="a_car"), explain_pb2.Target(text="a bird"), index(1)]

    assert (exclusive.job.model.task, apart.job.model.task) == ("classify", "multilabel")
    assert exclusive.job.model.labels == exclusive.job.texts == ("a cat", "a dog", "A CAR")
    assert (exclusive.job.targets, exclusive.job.rows) == ((RankTarget(0),), 1 + 3)
    found = ask(model="pairs", texts=["a cat", "a dog", "A CAR"], targets=named).job
    assert [found.targets[0], found.targets[1].text, found.targets[2]] == [ClassTarget(2), "a bird", ClassTarget(1)]
    assert found.texts == ("a cat", "a dog", "A CAR", "a bird")


def test_label_is_not_looked_for_among_long_names_or_the_texts_of_a_request(monkeypatch):
    assert errors.did_you_mean("a b", ["a b " + "c" * errors.LONGEST_NAME]) == ""
    calls = []
    monkeypatch.setattr(targets, "did_you_mean", lambda *names: calls.append(names))
    with pytest.raises(NotFound, match=r'pairs has no label "a cta"$'):
        ask(model="pairs", texts=["a cat", "a dog"], targets=[explain_pb2.Target(label="a cta")])
    assert not calls


def test_texts_of_a_models_entry_are_its_classes_unless_a_request_has_others():
    assert ask(model="apart").job.model.labels == ("a cat", "a dog")
    assert ask(model="apart", texts=["a bird"]).job.model.labels == ("a bird",)
    described = codec.describe_model(MODELS["apart"])
    assert (described.task, described.classes, described.accepts_texts) == ("multilabel", 2, True)
    assert codec.describe_model(MODELS["pairs"]).task == "embed"


def test_explained_text_has_the_text_as_its_label_and_can_be_sent_again():
    explanation = explained(MODELS["pairs"], [1, 2, 3], TextTarget("a cat"), 25.5)

    assert (explanation.target.label, explanation.target.score, explanation.target.probability) == ("a cat", 25.5, 0)
    assert explanation.resolved_target == explain_pb2.Target(text="a cat")


def test_response_has_the_complete_receipt():
    sent = reply().receipt

    values = explain_pb2.ValueRange(minimum=0, maximum=4095)
    messages = {"texts": ["a cat"], "value_range": values, "interventions": list(CHANGES)}
    assert {name: getattr(sent, name) for name in asdict(RECEIPT)} == asdict(RECEIPT) | messages
    assert {field.name for field in sent.DESCRIPTOR.fields} == set(asdict(RECEIPT))


def test_model_without_labels_gives_empty_labels():
    assert [prediction.label for prediction in reply(net=MODELS["wordless"]).predictions] == [""] * 4


# ------------------------------------------------------------------------------------------------------- descriptions


def unfilled(message, *, but=()):
    """Return the fields of a message that are not set."""
    filled = {field.name for field, _ in message.ListFields()}
    return sorted({field.name for field in message.DESCRIPTOR.fields} - filled - set(but))


def test_model_description_is_complete():
    described = codec.describe_model(replace(NET, version=2, pyramid=("stem", "features")))

    assert unfilled(described, but=["accepts_texts"]) == []
    assert described.pyramid == ["stem", "features"]
    assert described.version == 2
    assert (described.input_height, described.input_width) == (224, 192)
    assert (described.name, described.source, described.weights) == ("resnet50", "timm:resnet50", "default")
    assert (described.classes, described.parameters, described.default_layer) == (4, 1234, "features")
    assert (described.digest, described.precision, described.device) == ("ab" * 32, "float32", "cpu")


def test_layer_description_has_its_grid_or_the_reason_for_none():
    with_grid, without = (codec.describe_layer(NET.layers[name]) for name in ("features", "head"))

    assert unfilled(with_grid, but=["reason"]) == []
    assert (with_grid.name, with_grid.type, with_grid.parameters, with_grid.calls) == ("features", "Conv2d", 112, 1)
    assert (list(with_grid.output_shape), with_grid.grid_height, with_grid.grid_width) == ([1, 4, 7, 7], 7, 7)
    assert with_grid.explainable
    assert not with_grid.reason
    assert unfilled(without) == ["explainable", "grid_height", "grid_width", "kinds"]
    assert without.reason == NO_GRID


@pytest.mark.parametrize("name", METHODS)
def test_method_description_is_complete(name):
    described = codec.describe_method(name)

    optional = ["parameters", "layered", "eigen_smoothing", "per_channel", "needs", "formula"]
    assert unfilled(described, but=optional) == []
    assert described.name == name
    assert described.kind == codec.kind_of(METHODS[name]) != models_pb2.METHOD_KIND_UNSPECIFIED
    assert not described.summary.endswith(".")
    assert [each.name for each in described.parameters] == [each.name for each in METHODS[name].parameters]
    job = ask(model=model_for(name), methods=[method(name)], top_k=1).job
    job = replace(job, model=replace(job.model, preprocess=replace(job.model.preprocess, size=(224, 224))))
    if not needs_channels(METHODS[name]):  # that pass is not counted which says what the model predicts
        assert described.rows == max(1, job.rows - (job.calls[0] not in job.clean))


def needs_channels(method):
    return isinstance(method, Perturbation) and method.layered


@pytest.mark.parametrize("name", [name for name in METHODS if needs_channels(METHODS[name])])
def test_rows_of_a_method_that_tries_every_channel_are_those_for_512(name):
    defaults = {each.name: each.default for each in METHODS[name].parameters}
    assert codec.describe_method(name).rows == METHODS[name].count(channels=512, **defaults)


@pytest.mark.parametrize("parameter", WORDS, ids=lambda p: p.name)
def test_text_parameter_description_lists_its_choices(parameter):
    described = replies.parameter_info(parameter)

    assert (described.name, described.default_value.text) == (parameter.name, parameter.default)
    assert described.summary
    assert parameter.default in described.choices
    assert tuple(described.choices) == parameter.choices


@pytest.mark.parametrize("parameter", WORDS, ids=lambda p: p.name)
def test_text_outside_a_parameters_choices_is_refused(parameter):
    name = next(name for name in METHODS if parameter in METHODS[name].parameters)
    for value in (parameter.choices[0] + "?", "", 1.0):
        with pytest.raises(InvalidArgument, match=f"{parameter.name} is one of {parameter.choices[0]}"):
            ask(methods=[method(name, **{parameter.name: value})])


@pytest.mark.parametrize("parameter", RANGES, ids=lambda p: p.name)
def test_parameter_description_gives_its_range_and_default(parameter):
    described = replies.parameter_info(parameter)

    assert described.name == parameter.name
    assert described.summary
    assert described.default_value.WhichOneof("value") == "number"
    assert described.minimum <= described.default_value.number == parameter.default <= described.maximum
    assert (described.minimum, described.maximum) == (parameter.minimum, parameter.maximum)
    assert described.integer == parameter.integer
    assert list(described.choices) == []


def test_default_of_a_parameter_can_be_text():
    described = replies.parameter_info(Parameter("finish", "How.", "max", 0, 0))

    assert described.default_value.text == "max"


# ---------------------------------------------------------------------------------------------- remembered options


def test_requests_with_the_same_options_share_a_job_and_keep_their_own_image():
    first = ask(image=b"one", model="resnet50", methods=[method("gradcam")])
    second = ask(image=b"two", model="resnet50", methods=[method("gradcam")])

    assert first.job is second.job
    assert (first.image, second.image) == (b"one", b"two")


def test_other_options_model_version_or_limits_get_a_job_of_their_own():
    options = {"methods": [method("smoothgrad", samples=3)], "top_k": 2}
    jobs = [
        ask(**options).job,
        ask(methods=[method("smoothgrad", samples=4)], top_k=2).job,
        ask(**options, model="large").job,
        ask(Limits(rows=99), **options).job,
        codec.read_explanation(
            explain_pb2.ExplainRequest(**options), {"resnet50": replace(NET, version=2)}, Limits()
        ).job,
    ]

    assert len({id(job) for job in jobs}) == len(jobs)
    assert jobs[-1].model.version == 2


def test_reading_a_request_does_not_change_it():
    request = explain_pb2.ExplainRequest(image=b"one", methods=[method("smoothgrad", samples=3)], top_k=2)
    before = request.SerializeToString(deterministic=True)
    codec.read_explanation(request, MODELS, Limits())

    assert request.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(("model_", "make"), [("vectors", similarity), ("pixels", lambda: masked(b"mask"))])
def test_image_of_a_target_is_not_remembered(model_, make):
    assert ask(model=model_, targets=[make()]).job is not ask(model=model_, targets=[make()]).job
