"""Hugging Face image classifiers from folders: the same results as transformers, and no code from the folder."""

import contextlib
import io
import json
import os
import pickle
import shutil
import socket
import struct
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

import camserve
import needs
from camserve_server import models
from camserve_server.core.errors import ConfigError, FailedPrecondition
from camserve_server.imaging import fitting
from camserve_server.methods import METHODS
from camserve_server.models import checkpoint, huggingface, parse
from camserve_server.models.huggingface import folder as folder_checks
from camserve_server.models.huggingface import loading, network
from camserve_server.targets.values import ClassTarget
from methods.tools import call, error_ratio, explain, inputs, job, maps, noise
from models.lazy_folders import Servers, marked_except
from support import PHOTOS

hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

LABELS = {index: f"thing {index}" for index in range(5)}
FAST = ("vit", "resnet")
FEW = {"samples": 2, "steps": 2, "scales": 1, "top_channels": 2, "cells": 2, "k": 0.5}
SURROGATES = {"lime", "kernel_shap"}
"""They run the model as other perturbations do, and import captum, which takes 2 s: in the slow part only."""
SQUARE = {"size": {"height": 64, "width": 64}}


def vit(**options):
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=64,
            patch_size=8, **{"id2label": LABELS, **options},
        )
    )  # fmt: skip


def resnet():
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, id2label=LABELS))


def convnext():
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(
            hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], layer_scale_init_value=1.0, id2label=LABELS
        )
    )


def swin():
    sizes = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes, window_size=4, id2label=LABELS))


def dino():
    sizes = {"image_size": 64, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.Dinov2ForImageClassification(hf.Dinov2Config(**sizes, id2label=LABELS))


KINDS = {"vit": vit, "resnet": resnet, "convnext": convnext, "swin": swin, "dino": dino}
NO_ATTENTION = {"attention_rollout", "gradient_rollout", "chefer", "legrad", "gradeclip"}
NO_RELU = {"guided_backprop", "deconvnet", "guided_gradcam"}
REFUSED = {"vit": NO_RELU, "resnet": NO_ATTENTION, "swin": NO_RELU | NO_ATTENTION}
"""Methods that do not fit a network, as with timm's networks. All others explain it."""


def processor(kind):
    if kind in ("resnet", "convnext"):
        return hf.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.875)
    if kind == "dino":
        return hf.BitImageProcessor(size={"shortest_edge": 80}, crop_size={"height": 64, "width": 64})
    return hf.ViTImageProcessor(**SQUARE)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Return a folder per kind of network, from save_pretrained; camserve's random weights are others."""
    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
    root = tmp_path_factory.mktemp("zoo")
    torch.manual_seed(99)
    for kind, make in KINDS.items():
        network = make()
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)  # so that no bias and no class token is zero
        network.save_pretrained(root / kind)
        processor(kind).save_pretrained(root / kind)
    return root


@pytest.fixture
def folder(zoo, tmp_path):
    """Return a copy of a ViT's folder, for tests that change it."""
    return shutil.copytree(zoo / "vit", tmp_path / "vit")


def loaded(folder, options=""):
    return models.load(parse(f"hf:{folder}{options}"))


def transformers_model(folder):
    return hf.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()


def changed(folder, file="config.json", **values):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def complaint(folder, options=""):
    with pytest.raises(ConfigError) as caught:
        loaded(folder, options)
    return str(caught.value)


# --- the same results as transformers ---


@pytest.fixture(scope="module")
def servers():
    with Servers() as running:
        yield running


@pytest.fixture(scope="module")
def shared(zoo, servers):
    """Return a function that returns the model of a kind's server, for tests that only read it."""
    return lambda kind: servers.model(f"hf:{zoo / kind}")


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST, KINDS))
def test_predictions_equal_those_of_transformers_pipeline(kind, zoo, servers):
    photo = "chelsea" if kind == "vit" else "rocket"
    pipeline = hf.pipeline("image-classification", model=str(zoo / kind), device="cpu", top_k=5)
    expected = {entry["label"]: entry["score"] for entry in pipeline(Image.open(PHOTOS[photo]).convert("RGB"))}
    with camserve.Client(servers.address(f"hf:{zoo / kind}")) as client:
        result = client.explain(PHOTOS[photo], model=kind, top_k=5)

    probabilities = {prediction.label: prediction.probability for prediction in result.predictions}
    assert probabilities.keys() == set(LABELS.values())
    assert max(abs(probabilities[label] - expected[label]) for label in probabilities) < 2e-6
    assert all(explanation.verdict != "ZERO_GRADIENT" and explanation.overlay for explanation in result.explanations)


def by_hand(net, layer, image):
    """Compute a layer's feature maps and the gradients of the logit of class 1, by autograd alone."""
    captured = []

    def keep(_module, _args, output):
        first = output[0] if isinstance(output, tuple | dict) else output
        captured.append(first)
        first.retain_grad()

    leaf = image.clone().requires_grad_()
    with net.get_submodule(layer).register_forward_hook(keep):
        net(leaf).logits[0, 1].backward()
    return captured[-1].detach(), captured[-1].grad, leaf.grad


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST, KINDS))
def test_maps_equal_those_from_autograd(kind, zoo, shared):
    model, image = shared(kind), noise(1, 64)
    layer = model.info.default_layer
    results = maps(model, image, layer)
    results["saliency"] = explain(model, image, job(model, ["saliency"], [ClassTarget(1)])).explanations[0].heatmap

    plain, truth = (
        maps_by_hand(transformers_model(zoo / kind).to(precision), layer, inputs(model, image).to(precision))
        for precision in PRECISIONS
    )
    for name in plain:
        assert error_ratio(results[name], plain[name], truth[name]) <= 1


PRECISIONS = (torch.float32, torch.float64)


def maps_by_hand(net, layer, image):
    """Compute maps by their formulas."""
    activations, gradients, at_input = by_hand(net, layer, image)
    if activations.dim() == 3:  # tokens, the patches last
        activations, gradients = (
            tensor[:, -64:].transpose(1, 2).reshape(1, -1, 8, 8) for tensor in (activations, gradients)
        )
    return {
        "gradcam": (gradients.mean((2, 3), keepdim=True) * activations).sum(1)[0],
        "hirescam": (gradients * activations).sum(1)[0],
        "saliency": at_input.abs().amax(1)[0],
    }


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [("vit", SURROGATES), *(pytest.param(kind, (), marks=pytest.mark.slow) for kind in ("resnet", "swin"))],
)
def test_every_method_explains_it_or_says_what_is_missing(kind, left_out, shared):
    model, refused = shared(kind), {}
    for name, method in METHODS.items():
        if name in left_out or (method.tasks and model.info.task not in method.tasks):
            continue  # refused with the request
        method_call = call(
            name, **{parameter.name: FEW[parameter.name] for parameter in method.parameters if parameter.name in FEW}
        )
        try:
            (explanation,) = explain(model, noise(2, 64), job(model, [method_call], [ClassTarget(1)])).explanations
        except FailedPrecondition as error:
            refused[name] = str(error)
        else:
            assert np.isfinite(explanation.heatmap).all()
            assert np.ptp(explanation.heatmap) > 0 or name == "lime"  # sparse: of a net this faint nothing may be left

    assert refused.keys() == REFUSED[kind]
    assert all(
        "no ReLU" in words or "needs global (not windowed) self-attention" in words for words in refused.values()
    )


def test_module_whose_first_output_is_unused_is_not_explainable(shared):
    """ResNetModel pools its own feature maps: later layers use only the pooled ones, so the maps have no gradient."""
    layers = shared("resnet").info.layers

    assert layers["resnet"].reason.startswith("the score does not depend on its grid")
    assert layers["resnet.encoder"].layout


@pytest.mark.parametrize(
    ("make", "resize"),
    [
        (lambda: hf.ViTImageProcessor(**SQUARE), (64, 64)),
        (lambda: hf.ViTImageProcessor(**SQUARE, resample=3, image_mean=[0.1, 0.2, 0.3]), (64, 64)),
        (lambda: hf.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.75), 85),
        (lambda: hf.ConvNextImageProcessor(size={"shortest_edge": 384}), (384, 384)),
        (lambda: hf.CLIPImageProcessor(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64}), 72),
        (lambda: hf.BitImageProcessor(size={"shortest_edge": 90}, crop_size={"height": 64, "width": 64}), 90),
        (lambda: hf.EfficientNetImageProcessor(**SQUARE, rescale_offset=True, rescale_factor=1 / 127.5), (64, 64)),
        (lambda: hf.ViTImageProcessor(**SQUARE, do_rescale=False), (64, 64)),
        (lambda: hf.ViTImageProcessor(**SQUARE, do_normalize=False), (64, 64)),
    ],
)
@pytest.mark.parametrize("photo", marked_except(pytest.mark.slow, ["chelsea"], ["chelsea", "coffee"]))
def test_preprocessing_equals_the_processors(make, resize, photo):
    reference, pixels = make(), np.asarray(Image.open(PHOTOS[photo]).convert("RGB"))
    preprocess = huggingface.preprocess_of(reference, "hf:net")
    expected = reference(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0].float().numpy()
    ready = fitting.fit(pixels, preprocess)[0].astype(np.float32) / 255
    mean, std = np.array(preprocess.mean, np.float32), np.array(preprocess.std, np.float32)

    assert preprocess.resize == resize
    assert np.abs(((ready - mean) / std).transpose(2, 0, 1) - expected).max() < 1.01 / 255 / min(std)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.BitImageProcessor(size={"shortest_edge": 64}, do_center_crop=False),
        lambda: hf.ViTImageProcessor(do_resize=False),
    ],
)
def test_unsupported_processor_is_refused(make):
    """The first keeps a photo's proportions at any length of the longer side, the second keeps its size."""
    with pytest.raises(ConfigError, match="does more than resize, crop to the middle and normalise"):
        huggingface.preprocess_of(make(), "hf:net")


# --- labels, task, weights ---


def test_labels_are_those_of_the_config_without_placeholders(folder):
    assert loaded(folder).info.labels == tuple(LABELS.values())

    changed(folder, id2label={str(index): f"LABEL_{index}" for index in range(5)}, label2id={})
    info = loaded(folder).info
    assert (info.labels, info.classes) == ((), 5)


@pytest.mark.parametrize(
    ("problem", "task"),
    [
        ("multi_label_classification", "multilabel"),
        ("regression", "regress"),
        pytest.param(None, "classify", marks=pytest.mark.slow),
    ],
)
def test_task_is_that_of_the_config(folder, problem, task):
    changed(folder, problem_type=problem)

    assert loaded(folder).info.task == task


def test_operators_task_overrides_that_of_the_config(folder):
    changed(folder, problem_type="regression")

    assert loaded(folder, "?task=embed").info.task == "embed"


def test_weights_saved_in_half_precision_run_in_float32(folder):
    vit().half().save_pretrained(folder)

    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert {weight.dtype for weight in loaded(folder).module.parameters()} == {torch.float32}


def test_weights_in_several_files_are_loaded(folder, shared):
    net = transformers_model(folder)
    (folder / "model.safetensors").unlink()
    net.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1

    assert loaded(folder).info.digest == shared("vit").info.digest


def test_network_can_have_random_weights_or_those_of_another_file(folder, tmp_path):
    random = loaded(folder, "?weights=none&size=32")
    assert (random.info.weights, random.info.preprocess.size) == ("none", (32, 32))
    assert random.info.digest == loaded(folder, "?weights=none&size=32").info.digest

    state = transformers_model(folder).state_dict()
    safetensors.torch.save_file({**state, "classifier.bias": torch.ones(5)}, tmp_path / "next.safetensors")
    other = loaded(folder, f"?weights={tmp_path / 'next.safetensors'}")
    assert other.info.weights == "file"
    assert other.module.classifier.bias.tolist() == [1] * 5


def test_last_part_of_the_folder_is_the_only_public_name(zoo):
    spec = parse(f"hf:{zoo}/vit?precision=bfloat16")
    assert (spec.name, spec.origin, spec.folder, spec.precision) == ("vit", "hf:vit", f"{zoo}/vit", "bfloat16")
    assert parse("birds=hf:./models/a b/vit-1.0/").name == "birds"
    with pytest.raises(ConfigError, match="write NAME=hf:FOLDER"):
        parse("hf:models/..")


# --- nothing is fetched, no code is run ---


@pytest.fixture
def offline(monkeypatch):
    """Refuse and record all network connections."""
    tried = []
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, lambda _socket, address: tried.append(address) or 1 / 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_more: tried.append(address) or 1 / 0)
    return tried


def test_no_folder_causes_a_connection(folder, offline):
    with pytest.raises(ZeroDivisionError):
        socket.create_connection(("192.0.2.1", 80))  # planted
    assert offline.pop()

    loaded(folder)
    changed(folder, attn_implementation="kernels-community/flash-attn", _attn_implementation="kernels-community/vit")
    loaded(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    assert "holds an adapter" in complaint(folder)
    assert "nothing is fetched from the Hub" in complaint("google/vit-base-patch16-224")
    assert not offline


@pytest.fixture
def timm_folder(tmp_path):
    """Return a folder like timm's own models on the Hub, with the preprocessing in config.json."""
    wants = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}
    config = hf.TimmWrapperConfig(
        architecture="test_vit", num_labels=5, pretrained_cfg={"input_size": [3, 64, 64], **wants},
        model_args={"img_size": 64},
    )  # fmt: skip
    hf.TimmWrapperForImageClassification(config).save_pretrained(tmp_path / "net")
    return tmp_path / "net"


def test_timms_own_models_are_loaded_from_folders(timm_folder, offline):
    model = loaded(timm_folder)

    assert model.info.preprocess.size == (64, 64)
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(model.module(images).logits, transformers_model(timm_folder)(images).logits)
    assert not offline


@pytest.mark.parametrize("options", ["", "?weights=none"])
@pytest.mark.parametrize(
    "architecture", ["hf-hub:owner/name", "hf_hub:owner/name", "local-dir:/elsewhere", "owner/name", 7]
)
def test_architecture_that_timm_would_fetch_is_refused(timm_folder, offline, architecture, options):
    changed(timm_folder, architecture=architecture)

    assert f"its architecture is '{architecture}', which is not in timm" in complaint(timm_folder, options)
    with pytest.raises(ConfigError, match=r"timm:NAME\?weights=FILE"):
        huggingface.check(parse(f"hf:{timm_folder}{options}"))
    assert not offline


def test_timm_would_fetch_the_refused_architecture(timm_folder, offline, monkeypatch):
    """Without the refusal and without the guard against downloads, timm connects to the Hub."""
    monkeypatch.setattr(folder_checks, "check_timm", lambda *_: None)
    changed(timm_folder, architecture="hf-hub:owner/name")
    with pytest.raises(ConfigError):
        loaded(timm_folder, "?weights=none")
    assert not offline
    monkeypatch.setattr(loading, "offline", contextlib.nullcontext)
    changed(timm_folder, architecture="hf-hub:owner/name")
    with pytest.raises(Exception):  # noqa: B017, PT011 -- clients raise many errors without a network
        loaded(timm_folder, "?weights=none")
    assert offline


@pytest.mark.parametrize("name", ["checkpoint_path", "pretrained", "pretrained_cfg", "cache_dir"])
def test_unknown_arguments_of_timm_are_refused(timm_folder, offline, name):
    changed(timm_folder, model_args={"img_size": 64, name: "/elsewhere/net.pth"})

    assert f"its model_args has '{name}'" in complaint(timm_folder)
    changed(timm_folder, model_args=name)
    assert f"its model_args has '{name}'" in complaint(timm_folder, "?weights=none")
    assert not offline


CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
class Config(ViTConfig):
    model_type = {kind!r}
class Net(ViTForImageClassification):
    config_class = Config
class Ready(ViTImageProcessor):
    pass
"""


@pytest.mark.parametrize("kind", ["vit", "something-new"])
def test_code_in_the_folder_is_never_run(folder, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask
    mark = tmp_path / "it ran"
    (folder / "theirs.py").write_text(CODE.format(mark=str(mark), kind=kind))
    brought = {"AutoConfig": "theirs.Config", "AutoModelForImageClassification": "theirs.Net"}
    changed(folder, model_type=kind, auto_map=brought)
    changed(folder, folder_checks.PROCESSOR, auto_map={"AutoImageProcessor": "theirs.Ready"})
    if kind == "vit":  # one that transformers has itself
        assert type(loaded(folder).module).__module__.startswith("transformers.")
    else:
        assert "cannot read its config.json" in complaint(folder)
    assert not mark.exists()


def test_pickle_is_not_read(folder, tmp_path):
    class Planted:
        def __reduce__(self):
            return (tmp_path / "it ran").touch, ()

    (folder / "model.safetensors").unlink()
    torch.save({"classifier.weight": Planted()}, folder / "pytorch_model.bin")

    assert "pytorch_model.bin is a pickle, which is not read here" in complaint(folder)
    assert not (tmp_path / "it ran").exists()


def indexed(name, **options):
    """Return a function that writes an index with all weights in one file."""

    def write(folder):
        names = dict.fromkeys(safetensors.torch.load_file(folder / "model.safetensors"), name)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        changed(folder, **options)

    return write


def other_config(folder):
    (folder / "config.5.0.0.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"transformers_weights": "evil.bin"})
    )
    changed(folder, configuration_files=["config.5.0.0.json"])


WAYS_TO_A_PICKLE = {
    "an index": indexed("evil.bin"),
    "an index, through a folder": indexed("../evil.bin"),
    "an index of a pickle called safe": indexed("evil.bin.safetensors"),
    "an index in the config": indexed("evil.bin", transformers_weights="model.safetensors.index.json"),
    "the config": lambda folder: changed(folder, transformers_weights="evil.bin"),
    "the config, through a folder": lambda folder: changed(folder, transformers_weights="../evil.bin"),
    "the config, with a number": lambda folder: changed(folder, transformers_weights=7),
    "another config": other_config,
    "a distributed checkpoint": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("way", WAYS_TO_A_PICKLE)
def test_no_file_in_a_folder_makes_transformers_read_a_pickle(folder, way, monkeypatch):
    mark, loads = folder.parent / "it ran", []

    class Planted:
        def __reduce__(self):
            return mark.touch, ()

    planted = io.BytesIO()
    torch.save({"classifier.weight": Planted()}, planted)
    for name in ("evil.bin", "../evil.bin", "evil.bin.safetensors"):
        (folder / name).write_bytes(planted.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    WAYS_TO_A_PICKLE[way](folder)
    monkeypatch.setattr(torch, "load", lambda *arguments, **_: loads.append(arguments))

    assert len(complaint(folder)) < 600
    assert not loads
    assert not mark.exists()


def test_weights_named_in_the_config_are_loaded(folder, shared):
    (folder / "model.safetensors").rename(folder / "best.safetensors")
    changed(folder, transformers_weights="best.safetensors")

    assert loaded(folder).info.digest == shared("vit").info.digest


# --- errors ---


def no_head(folder):
    path = folder / "model.safetensors"
    state = {name: tensor for name, tensor in safetensors.torch.load_file(path).items() if "classifier" not in name}
    safetensors.torch.save_file(state, path, {"format": "pt"})


def half_a_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def not_finite(folder):
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**state, "classifier.bias": torch.full((5,), torch.nan)}, path, {"format": "pt"})


def endless(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def without_writer(folder):
    (folder / "processor_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "processor_config.json")


def index_of_a_tokenizer(folder):
    name = "tokenizer.safetensors.index.json"
    (folder / name).symlink_to("/dev/null")
    changed(folder, transformers_weights=name)


def long_header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**6) + b" " * 10**6)


def huge(folder):
    with (folder / "preprocessor_config.json").open("r+") as file:
        file.truncate(17 * 2**20)


def processing(**settings):
    return lambda folder: changed(folder, "preprocessor_config.json", **settings)


def other_shapes(folder):
    changed(folder, id2label={"0": "cat", "1": "dog"}, label2id={"cat": 0, "dog": 1})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no readable config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (
            lambda folder: changed(folder, model_type="bert"),
            'is a "bert", for which transformers has no image classifier',
        ),
        (
            lambda folder: changed(folder, architectures=["SegformerForSemanticSegmentation"]),
            'is a "vit", for which transformers has no model for semantic segmentation',
        ),
        (
            lambda folder: changed(folder, architectures=["ViTForMaskedImageModeling"]),
            "was saved as ViTForMaskedImageModeling, and hf: is for …ForImageClassification, …ForObjectDetection",
        ),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
        (lambda folder: changed(folder, text_config={"backbone": "owner/name"}), "names the backbone 'owner/name'"),
        (lambda folder: changed(folder, backbone={"model": "owner/name"}), "which is not in timm"),
        (lambda folder: changed(folder, architectures=["ViTModel"]), "your.module:factory"),
        (lambda folder: changed(folder, model_type="nonsense"), "cannot read its config.json"),
        (lambda folder: changed(folder, quantization_config={"quant_method": "bitsandbytes"}), "is quantised"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "preprocessor_config.json does not exist"),
        (
            lambda folder: (folder / "preprocessor_config.json").write_text("?"),
            "preprocessor_config.json cannot be used",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "has no model.safetensors: save it with save_pretrained",
        ),
        (half_a_file, "cannot be read"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(checkpoint.LFS_POINTER + b"v1"),
            "cannot be read: model.safetensors is a Git LFS pointer, not the weights: run `git lfs pull`",
        ),
        (no_head, "lack classifier.bias, classifier.weight: is it a trained image classifier?"),
        (not_finite, "the weights of hf:vit cannot be used: classifier.bias is not finite"),
        (other_shapes, "classifier"),
        (processing(size={"height": 32, "width": 32}), "32"),
        (
            processing(size={"height": 9000, "width": 9000}),
            "height in its preprocessor_config.json is 9,000",
        ),
        (processing(size=9000), "in its preprocessor_config.json is 9,000, and 2,048 is the limit"),
        (processing(do_center_crop=True, crop_size={"height": 9000, "width": 9}), "is 9,000, and 2,048 is the limit"),
        (processing(crop_pct=1e-4), "crop_pct in its preprocessor_config.json is 0.0001, and 0.1 is the least"),
        (
            processing(image_processor_type="LlavaNextImageProcessor", image_grid_pinpoints=[[8000, 8000]]),
            "image_grid_pinpoints in its preprocessor_config.json is 8,000",
        ),
        (
            processing(
                image_processor_type="Qwen2VLImageProcessor",
                size={"shortest_edge": 100, "longest_edge": 1000},
                patch_size=64,
                merge_size=64,
            ),
            "patch_size times merge_size in its preprocessor_config.json is above 2,048",
        ),
        (long_header, "its header has 1,000,000 bytes; the limit for this model is"),
        (lambda folder: changed(folder, num_labels=5_000_000), "'num_labels' in its config.json is above 250,000"),
        (lambda folder: changed(folder, image_size=9000), "'image_size' in its config.json is above 8,192"),
        (endless, "its config.json is not a file"),
        (index_of_a_tokenizer, "its tokenizer.safetensors.index.json is not a file"),
        (without_writer, "its processor_config.json is not a file"),
        (huge, "its preprocessor_config.json has 17,825,792 bytes; 1 to 16,777,216 are accepted"),
    ],
)
def test_unusable_folder_is_refused_with_a_reason(folder, spoil, words):
    spoil(folder)
    message = complaint(folder)

    assert words in message
    assert "Traceback" not in message
    assert len(message) < 600


def test_network_of_more_modules_than_the_limit_is_refused(folder, monkeypatch):
    monkeypatch.setattr(network, "MAX_MODULES", 10)

    assert "it has more than 10 modules" in complaint(folder)
    monkeypatch.undo()
    models.load(parse(f"hf:{folder}"))


def test_buffers_count_as_numbers_of_a_network(folder, monkeypatch):
    def built(*_):
        module = nn.Module()
        module.register_buffer("table", torch.empty(11_000_000))
        return module

    monkeypatch.setattr(network, "_build", built)
    assert "describes a network of 11,000,000 numbers" in complaint(folder)


def test_label_is_no_setting(folder):
    changed(folder, label2id={"toy blocks": 5000, "backbone": 1})

    assert folder_checks.read_config(folder)["label2id"]["toy blocks"] == 5000


def test_file_of_a_folder_is_a_regular_one_that_is_read_up_to_a_limit(tmp_path):
    pipe, file = tmp_path / "pipe", tmp_path / "file.json"
    os.mkfifo(pipe)
    file.write_bytes(b"12345")

    assert folder_checks.read_file(file, 5, "hf:vit") == b"12345"
    for path, limit, words in ((file, 4, "has more than 4 bytes"), (pipe, 4, "pipe cannot be read: it is not a reg")):
        with pytest.raises(ConfigError, match=words):
            folder_checks.read_file(path, limit, "hf:vit")


def test_error_without_transformers_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert 'pip install "camserve[hf]"' in complaint(folder)


@pytest.mark.parametrize("name", ["net.pt", "folder/net.torchscript", "it=net.onnx", "net.pt?size=64"])
def test_file_instead_of_a_model_is_refused_with_a_suggestion(name):
    with pytest.raises(ConfigError, match=r"is a file, .*SOURCE:ARCH\?weights=.*TorchScript and ONNX"):
        parse(name)
