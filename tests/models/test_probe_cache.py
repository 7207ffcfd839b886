"""Results of probing are kept for the next start: they are exactly what probing finds, and nothing else is believed."""

import json
import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from camserve_server import models
from camserve_server.engine import Engine
from camserve_server.engine.values import Row
from camserve_server.methods.values import MethodCall
from camserve_server.models import parse, probe, probe_cache
from camserve_server.models.values import Pass
from camserve_server.targets import anything
from methods.tools import noise
from models.lazy_folders import marked_except

PLAIN = "timm:test_resnet?weights=none&size=64"
NET = f"{PLAIN}&accelerate=false"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(probe_cache, "folder", lambda: tmp_path / "camserve")
    return tmp_path / "camserve"


@pytest.fixture
def probes(folder, monkeypatch):  # noqa: ARG001 -- it is made empty
    """The modules that were probed, with an empty cache."""
    probed, run = [], probe.probe

    def record(module, *arguments, **options):
        probed.append(module)
        return run(module, *arguments, **options)

    monkeypatch.setattr(probe, "probe", record)
    return probed


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The description of a model, and the folder with its file."""
    with pytest.MonkeyPatch.context() as patch:
        kept = tmp_path_factory.mktemp("cache")
        patch.setattr(probe_cache, "folder", lambda: kept)
        return models.load(parse(NET)).info, kept


@pytest.fixture
def cached(loaded, folder):
    """A cache folder with the file of NET: a start that changes nothing probes nothing."""
    shutil.copytree(loaded[1], folder)


def file_in(folder):
    (file,) = folder.glob("*.json")
    return file


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("efficientnet_lite0?size=64", marks=pytest.mark.slow),
        PLAIN,
        "timm:test_vit?weights=none&size=64&classes=0",
        pytest.param("torchvision:lraspp_mobilenet_v3_large?weights=none&size=64", marks=pytest.mark.slow),
        pytest.param("torchvision:ssdlite320_mobilenet_v3_large?weights=none&size=128", marks=pytest.mark.slow),
    ],
)
def test_cached_start_gives_the_same_description(spec, probes):
    first, second = (models.load(parse(spec)) for _ in range(2))

    assert len(probes) == 1
    assert second.info == first.info
    assert list(second.info.layers) == list(first.info.layers)
    assert repr(second.info) == repr(first.info)  # the same types, such as tuples and not lists


def test_cached_start_gives_the_same_bytes(probes):
    first, second = (models.load(parse(NET)) for _ in range(2))
    assert len(probes) == 1
    row = Row(noise(0, 64), anything(first.info), (MethodCall("gradcam"),))

    def answer(model):
        pass_ = Pass("net", "cam", model.info.preprocess.size, (model.info.default_layer,))
        (result,) = Engine({"net": model}).run(pass_, [row])
        return result

    ours, theirs = answer(second), answer(first)

    assert ours.maps[0][0].tobytes() == theirs.maps[0][0].tobytes()
    assert repr(replace(ours, maps=())) == repr(replace(theirs, maps=()))


@pytest.mark.parametrize(
    "other",
    ["timm:test_resnet?weights=none&size=96&accelerate=false", "timm:test_vit?weights=none&accelerate=false"],
)
@pytest.mark.usefixtures("cached")
def test_other_model_is_probed(other, probes):
    models.load(parse(other))
    assert len(probes) == 1


@pytest.mark.usefixtures("cached")
def test_other_weights_are_probed(probes, tmp_path):
    module = models.load(parse(NET)).module
    assert not probes
    weights = module.state_dict()
    weights["fc.bias"] += 1
    torch.save(weights, tmp_path / "w.pth")
    models.load(parse(NET.replace("none", str(tmp_path / "w.pth"))))
    assert len(probes) == 1


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("name", ["torch", "torchvision", "timm"])
def test_other_version_is_probed(name, probes, monkeypatch):
    monkeypatch.setattr(sys.modules[name], "__version__", "0.0.1")
    models.load(parse(NET))
    assert len(probes) == 1


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("what", ["_own_code", "processor", "environment", "threads"])
def test_other_code_processor_environment_or_threads_are_probed(what, probes, monkeypatch):
    if what == "environment":
        monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    elif what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    else:
        monkeypatch.setattr(probe_cache, what, lambda: "another")
    models.load(parse(NET))
    assert len(probes) == 1


def change(path, value):
    """Return a function that changes one value of a file."""

    def apply(text):
        contents = json.loads(text)
        inner = contents
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        return json.dumps(contents)

    return apply


FAULTS = {
    "empty": lambda _: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda _: "\0\1\2",
    "another value": lambda _: "[]",
    "another key": change(["key", "digest"], "0" * 64),
    "missing result": change(["probed"], None),
    "unknown task": change(["probed", "task"], "dance"),
    "text as a number": change(["probed", "classes"], "1000"),
    "unknown default layer": change(["probed", "default_layer"], "nowhere"),
    "default layer without a grid": change(["probed", "default_layer"], "fc"),
    "unknown embedding": change(["probed", "embedding"], "nowhere"),
    "layer of another type": change(["probed", "layers", "conv1.0", "type"], "Linear"),
    "layer of another name": change(["probed", "layers", "conv1.0", "name"], "conv1.1"),
    "layer with other parameters": change(["probed", "layers", "conv1.0", "parameters"], 3),
    "layer that never ran": change(["probed", "layers", "conv1.0", "calls"], 0),
    "grid of another size": change(["probed", "layers", "conv1.0", "layout", "height"], 31),
    "tokens instead of a map": change(["probed", "layers", "conv1.0", "layout", "axes"], "tokens"),
    "grid and a reason against it": change(["probed", "layers", "conv1.0", "reason"], "none"),
}


FAST = (
    "truncated", "another key", "text as a number", "unknown default layer", "layer of another type",
    "grid of another size",
)  # fmt: skip


@pytest.mark.parametrize("fault", marked_except(pytest.mark.slow, FAST, FAULTS))
@pytest.mark.usefixtures("cached")
def test_damaged_file_is_ignored_and_replaced(fault, loaded, folder, probes):
    whole = file_in(folder).read_text()
    file_in(folder).write_text(FAULTS[fault](whole))

    assert models.load(parse(NET)).info == loaded[0]
    assert len(probes) == 1
    assert json.loads(file_in(folder).read_text()) == json.loads(whole)


@pytest.mark.usefixtures("cached")
def test_file_of_another_user_is_ignored(folder, probes, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: file_in(folder).stat().st_uid + 1)
    models.load(parse(NET))
    assert len(probes) == 1


@pytest.mark.usefixtures("cached")
def test_pipe_in_place_of_a_file_is_ignored(folder, probes):
    path = file_in(folder)
    path.unlink()
    os.mkfifo(path)
    models.load(parse(NET))
    assert len(probes) == 1


@pytest.mark.parametrize("obstacle", ["file", "none", "full"])
def test_model_loads_without_a_cache_that_can_be_written(obstacle, loaded, tmp_path, monkeypatch):
    if obstacle == "file":  # as a read-only root: nothing can be made in it, whoever the user is
        (tmp_path / "file").touch()
        monkeypatch.setattr(probe_cache, "folder", lambda: tmp_path / "file" / "camserve")
    elif obstacle == "none":
        monkeypatch.setattr(probe_cache, "folder", lambda: None)
    else:
        monkeypatch.setattr(probe_cache, "folder", lambda: tmp_path)
        monkeypatch.setattr(type(tmp_path), "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))

    assert models.load(parse(NET)).info == loaded[0]
    assert [path.name for path in tmp_path.rglob("*")] == (["file"] if obstacle == "file" else [])


def test_models_of_user_code_are_always_probed(plant, folder, probes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Conv2d(3, 4, 3, 2), nn.Linear(4, 5)

        def forward(self, images):
            return self.head(self.layer(images).mean((2, 3)))

    plant(Net, weights="none")
    plant(Net, weights="none")

    assert len(probes) == 2
    assert not folder.exists()


def test_model_that_changes_its_buffers_is_always_probed(folder, monkeypatch):
    run = probe.probe

    def change_buffer(module, *arguments, **options):
        module.bn1.num_batches_tracked.add_(1)
        return run(module, *arguments, **options)

    monkeypatch.setattr(probe, "probe", change_buffer)
    model = models.load(parse(NET))

    assert model.info.digest == models.digest(model.module)
    assert not folder.exists()


def test_only_the_newest_files_are_kept(folder, monkeypatch):
    monkeypatch.setattr(probe_cache, "MAX_FILES", 2)
    probed = probe_cache.Probed("classify", 2, {}, "", "", ())
    for index in range(4):
        probe_cache.store({"index": index}, probed)
        for file in folder.glob("*.json"):  # each file is older than the next one
            os.utime(file, ns=(file.stat().st_mtime_ns - 10**9,) * 2)

    kept = [json.loads(file.read_text())["key"]["index"] for file in folder.glob("*.json")]
    assert sorted(kept) == [2, 3]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}, "/caches/camserve"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/camserve"),
        ({"XDG_CACHE_HOME": "caches", "HOME": "/home/me"}, None),  # the specification ignores relative paths
    ],
)
def test_folder_is_in_the_users_cache_folder(variables, expected, monkeypatch, real_cache_folder):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    where = real_cache_folder()
    assert (str(where) if where else None) == expected
