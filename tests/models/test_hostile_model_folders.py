"""Folders of detectors and segmentation models from a stranger: no code, no network, no flood of memory."""

import io
import json
import pickle
import re
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

import needs
from camserve_server import models
from camserve_server.core.errors import ConfigError
from camserve_server.models import parse, sources
from models.lazy_folders import Folders, marked_except

hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

from docs.generate import small_transformers  # noqa: E402 -- after the check for transformers

KINDS = ("detr", "d_fine", "yolos", "segformer", "upernet", "mask2former")
FAST = ("detr", "yolos", "segformer", "mask2former")
WITH_BACKBONE = ("detr", "upernet", "mask2former")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return Folders(small_transformers.save, tmp_path_factory.mktemp("originals"))


@pytest.fixture(params=marked_except(pytest.mark.slow, FAST, KINDS))
def folder(request, originals, tmp_path):
    """Return a copy of a folder of each kind, for tests that change it."""
    return shutil.copytree(originals[request.param], tmp_path / request.param)


@pytest.fixture
def offline(monkeypatch):
    """Refuse and record all network connections."""
    tried = []
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, lambda _socket, address: tried.append(address) or 1 / 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_more: tried.append(address) or 1 / 0)
    return tried


def changed(folder, file="config.json", **values):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed_backbone(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["backbone_config"] |= values
    path.write_text(json.dumps(config))


def complaint(folder, options=""):
    with pytest.raises(ConfigError) as caught:
        models.load(parse(f"hf:{folder}{options}"))
    message = str(caught.value)
    assert len(message) < 700
    assert "Traceback" not in message
    return message


CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
"""


def test_code_in_the_folder_is_never_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask
    mark = tmp_path / "it ran"
    (folder / "theirs.py").write_text(CODE.format(mark=str(mark)))
    kinds = ("AutoConfig", "AutoModelForObjectDetection", "AutoModelForSemanticSegmentation", "AutoBackbone")
    changed(folder, auto_map=dict.fromkeys(kinds, "theirs.Net"))
    changed(folder, "preprocessor_config.json", auto_map={"AutoImageProcessor": "theirs.Ready"})

    assert sources.build(parse(f"hf:{folder}")).task in ("detect", "segment")  # nothing later reads the folder
    assert not mark.exists()


def test_pickle_is_never_read(folder, monkeypatch):
    mark, loads = folder.parent / "it ran", []

    class Planted:
        def __reduce__(self):
            return mark.touch, ()

    planted = io.BytesIO()
    torch.save({"class_labels_classifier.weight": Planted()}, planted)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(planted.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    monkeypatch.setattr(torch, "load", lambda *arguments, **_: loads.append(arguments))

    assert "pytorch_model.bin is a pickle, which is not read here" in complaint(folder)
    changed(folder, transformers_weights="pytorch_model.bin")
    assert "only .safetensors files in the folder itself are read" in complaint(folder)
    assert not loads
    assert not mark.exists()


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST, WITH_BACKBONE))
@pytest.mark.parametrize("options", ["", "?weights=none"])
@pytest.mark.parametrize("backbone", ["owner/name", "hf-hub:owner/name", "local-dir:/elsewhere", "../elsewhere"])
def test_backbone_elsewhere_is_refused_without_a_connection(kind, options, backbone, originals, tmp_path, offline):
    folder = shutil.copytree(originals[kind], tmp_path / kind)
    changed(folder, backbone=backbone, backbone_config=None, use_timm_backbone=False, use_pretrained_backbone=True)
    assert f"names the backbone '{backbone}', which is not in timm" in complaint(folder, options)
    changed(folder, backbone=None, backbone_config={"model_type": "timm_backbone", "backbone": backbone})
    assert f"names the backbone '{backbone}', which is not in timm" in complaint(folder, options)
    assert not offline


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST, WITH_BACKBONE))
def test_backbone_by_name_alone_is_not_looked_for(kind, originals, tmp_path, offline):
    """transformers would ask the Hub whether it has a repository of that name."""
    folder = shutil.copytree(originals[kind], tmp_path / kind)
    changed(folder, backbone="resnet18", backbone_config=None, use_timm_backbone=False, use_pretrained_backbone=True)
    assert complaint(folder)
    assert not offline


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST[:-1], KINDS))
def test_attention_kernel_named_in_the_folder_is_not_fetched(kind, originals, tmp_path, offline):
    folder = shutil.copytree(originals[kind], tmp_path / kind)
    changed(folder, attn_implementation="kernels-community/flash-attn", _attn_implementation="kernels-community/vit")
    if "backbone_config" in json.loads((folder / "config.json").read_text()):
        changed_backbone(folder, _attn_implementation="kernels-community/vit", attn_implementation="owner/kernel")

    assert sources.build(parse(f"hf:{folder}")).task in ("detect", "segment")
    assert not offline


HUGE = {
    "detr": {"num_queries": 10**9},
    "d_fine": {"num_queries": 10**9, "learn_initial_query": True},
    "yolos": {"num_detection_tokens": 10**10},
    "segformer": {"decoder_hidden_size": 10**8},
    "upernet": {"hidden_size": 10**6},
    "mask2former": {"num_queries": 10**10},
}


def test_network_far_larger_than_its_weights_is_refused_before_memory_is_taken(folder):
    changed(folder, **HUGE[folder.name])

    message = complaint(folder)
    assert re.search(
        r"describes a network of [\d,]+ numbers, and its weights have [\d,]+|cannot be (built|read)", message
    )


@pytest.mark.parametrize("kind", ["detr", "yolos", "segformer"])
@pytest.mark.parametrize("options", ["", "?weights=none"])
def test_network_of_too_many_layers_is_refused(kind, options, originals, tmp_path):
    folder = shutil.copytree(originals[kind], tmp_path / kind)
    key = {"detr": "decoder_layers", "yolos": "num_hidden_layers", "segformer": "depths"}[kind]
    changed(folder, **{key: [300] * 4 if key == "depths" else 10**6})

    assert f"'{key}' in its config.json is above 1,000" in complaint(folder, options)


@pytest.mark.parametrize(
    "size", [{"shortest_edge": 10**9, "longest_edge": 10**9}, {"height": -1, "width": 5}, "a", [1]]
)
def test_processor_with_an_absurd_size_is_refused(folder, size):
    changed(folder, "preprocessor_config.json", size=size)

    assert "processor" in complaint(folder).lower() or "preprocessor" in complaint(folder)


def test_processor_without_objects_is_refused(originals, tmp_path):
    folder = shutil.copytree(originals["detr"], tmp_path / "detr")
    changed(
        folder, "preprocessor_config.json", image_processor_type="ViTImageProcessor", size={"height": 96, "width": 96}
    )

    assert "its ViTImageProcessor has no post_process_object_detection" in complaint(folder)


def test_weights_without_a_head_name_what_is_missing(originals, tmp_path):
    folder = shutil.copytree(originals["detr"], tmp_path / "detr")
    state = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if "classifier" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})

    message = complaint(folder)
    assert "lack class_labels_classifier.bias, class_labels_classifier.weight" in message
    assert "is it a trained object detector?" in message
