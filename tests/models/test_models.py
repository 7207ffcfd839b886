"""Models: specs, weights from untrusted files, labels, sizes, factories and the layer probe."""

import hashlib
import logging
import os

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn
from torchvision.models import VisionTransformer

from camserve_server import models
from camserve_server.core.errors import ConfigError
from camserve_server.engine.values import Row
from camserve_server.models import ModelSpec, parse, sources, zoo
from camserve_server.models.values import Layout
from camserve_server.models.weights import digest
from camserve_server.targets.values import ClassTarget, RankTarget
from methods.tools import CAMS, Toy, call, error_ratio, exact, explain, inputs, job, maps, noise, photo, run

TINY = "torchvision:squeezenet1_1?weights={}&size=64&classes=7&accelerate=false"

# --- names ---


def test_default_name_of_a_model_is_its_architecture():
    assert parse("torchvision:resnet50") == ModelSpec("resnet50", "torchvision", "resnet50")
    assert parse("my.nets:make_net") == ModelSpec("make_net", "my.nets", "make_net")
    assert parse("timm:vit_base_patch16_224.augreg_in21k").arch == "vit_base_patch16_224.augreg_in21k"


def test_model_without_a_source_is_the_embedded_one():
    assert parse("efficientnet_lite0") == ModelSpec(models.EMBEDDED, "embedded", models.EMBEDDED)
    assert parse("cats=efficientnet_lite0").name == "cats"


def test_every_option_is_parsed():
    text = "net=timm:resnet18?weights=/w.pth&precision=bfloat16&labels=/l.txt&classes=7&size=96&sha256=ABC"
    assert parse(text) == ModelSpec(
        "net", "timm", "resnet18", "/w.pth", "bfloat16", "/l.txt", classes=7, size=96, sha256="abc"
    )


@pytest.mark.parametrize("path", ["/a/run+1/w.pth", "/a/100%/w.pth", "/a/two words/w.pth", "/a/Grüße=1/w.pth"])
def test_paths_in_options_are_not_decoded(path):
    assert parse(f"timm:resnet18?weights={path}").weights == path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot parse the model"),
        ("a:b:c", "cannot parse the model"),
        ("timm:", "cannot parse the model"),
        ("resnet50", r"needs a source: write torchvision:resnet50, timm:resnet50 or"),
        ("timm:resnet18?wieghts=none", r'no option "wieghts" \(did you mean "weights"\?\): weights, precision, '),
        ("timm:resnet18?precision=int8", "precision must be one of float32, bfloat16, float16"),
        ("timm:resnet18?size=0", 'size must be a whole number from 1, not "0"'),
        ("timm:resnet18?classes=-1", 'classes must be a whole number from 0, not "-1"'),
        ("timm:resnet18?size=2.5", 'size must be a whole number from 1, not "2.5"'),
        ("timm:resnet18?size=", 'size must be a whole number from 1, not ""'),
    ],
)
def test_invalid_spec_is_refused_with_a_reason(text, words):
    with pytest.raises(ConfigError, match=words):
        parse(text)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_unknown_architecture_is_refused_with_a_hint(library):
    with pytest.raises(ConfigError, match=rf'{library} has no model "resnet81" \(did you mean "resnet\d+"\?\)'):
        models.load(parse(f"{library}:resnet81"))


# --- weights ---


@pytest.fixture(scope="module")
def tiny():
    return models.load(parse(TINY.format("none")))


@pytest.fixture(scope="module")
def trained():
    """Return weights that differ from all seeded ones."""
    torch.manual_seed(99)
    return torchvision.models.squeezenet1_1(weights=None, num_classes=7).eval()


@pytest.mark.parametrize("kind", ["safetensors", "pth", "state_dict", "model"])
def test_local_weights_are_loaded(tmp_path, trained, kind):
    path, state = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth"), trained.state_dict()
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state if kind == "pth" else {kind: state, "epoch": 3}, path)
    model = models.load(parse(TINY.format(path)))
    assert model.info.weights == "file"
    assert model.info.digest == digest(trained)
    with torch.no_grad():
        assert torch.equal(model.module(inputs(model, noise(0, 64))), trained(inputs(model, noise(0, 64))))


def test_local_weights_are_loaded_into_the_embedded_architecture(tmp_path):
    net = timm.create_model("tf_efficientnet_lite0", num_classes=3)
    torch.save(net.state_dict(), tmp_path / "w.pth")
    model = models.load(parse(f"efficientnet_lite0?weights={tmp_path / 'w.pth'}&classes=3&size=64&accelerate=false"))
    assert (model.info.classes, model.info.labels, model.info.digest) == (3, (), digest(net))


def wrong_shapes(path):
    torch.save(torchvision.models.squeezenet1_1(weights=None, num_classes=9).state_dict(), path)


def other_net(path):
    torch.save({"state_dict": nn.Linear(2, 2).state_dict()}, path)


def whole_module(path):
    torch.save(nn.Linear(2, 2), path)


def a_list(path):
    torch.save([1, 2], path)


def words(path):
    path.write_text("no weights at all")


def nothing(path):
    path.touch()


@pytest.mark.parametrize("write", [wrong_shapes, other_net, whole_module, a_list, words, nothing])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_file_without_the_models_weights_is_refused_with_a_reason(tmp_path, write, suffix):
    path = tmp_path / f"w.{suffix}"
    write(path)
    with pytest.raises(ConfigError, match=r"the weights in .* do not fit torchvision:squeezenet1_1: "):
        models.load(parse(TINY.format(path)))


@pytest.mark.parametrize("options", ["", "&sha256=" + "0" * 64])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_git_lfs_pointer_is_refused_with_the_command_that_helps(tmp_path, suffix, options):
    path = tmp_path / f"lfs.{suffix}"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'1' * 64}\nsize 12345\n")
    with pytest.raises(
        ConfigError, match=rf": lfs\.{suffix} is a Git LFS pointer, not the weights: run `git lfs pull`$"
    ):
        models.load(parse(TINY.format(path) + options))


def test_truncated_file_is_refused_with_a_reason(tmp_path, trained):
    for suffix, save in (("pth", torch.save), ("safetensors", safetensors.torch.save_file)):
        path = tmp_path / f"w.{suffix}"
        save(trained.state_dict(), path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ConfigError, match="do not fit"):
            models.load(parse(TINY.format(path)))


class Runs:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("legacy", [False, True])
def test_pickle_with_a_command_is_refused_and_not_run(tmp_path, legacy):
    canary, path = tmp_path / "canary", tmp_path / "w.pth"
    torch.save({"state_dict": Runs(f"touch {canary}")}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ConfigError, match="do not fit"):
        models.load(parse(TINY.format(path)))
    assert not canary.exists()
    torch.load(path, weights_only=False)  # the payload works
    assert canary.exists()


def test_missing_weights_file_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no weights file .*gone\.pth"):
        models.load(parse(TINY.format(tmp_path / "gone.pth")))


def test_file_with_another_sha256_is_refused(tmp_path, trained):
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(trained.state_dict(), path)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert models.load(parse(f"{TINY.format(path)}&sha256={right.upper()}")).info.weights == "file"
    with pytest.raises(ConfigError, match="does not have the given SHA-256"):
        models.load(parse(f"{TINY.format(path)}&sha256={right[:-1]}{'0' if right[-1] != '0' else '1'}"))


def test_random_weights_are_reproducible_and_logged_as_a_warning(tiny, caplog):
    torch.manual_seed(12345)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        again = models.load(parse(TINY.format("none")))
    assert again.info.digest == tiny.info.digest
    assert again.info.weights == "none"
    assert "random weights: its explanations mean nothing" in caplog.text
    assert torch.equal(torch.get_rng_state(), before)


def test_random_weights_make_the_score_depend_on_every_layer(plant):
    def blank():
        net = Toy()
        nn.init.zeros_(net.head.weight)
        return net

    model = plant(blank, weights="none")
    assert model.info.layers["layer"].layout
    assert plant(blank, weights="none").info.digest == model.info.digest


def test_digest_of_the_embedded_model_is_that_of_its_packaged_weights(lite0):
    assert lite0.info.digest == DIGEST
    assert digest(lite0.module) == DIGEST


DIGEST = "153bf98ba91b079cc608abb4abe024d429991d5c8bd59ff1bdc6cfc077363a4f"


def test_one_changed_weight_changes_the_digest(tiny):
    before = digest(tiny.module)
    weight = next(tiny.module.parameters())
    was = weight[0, 0, 0, 0].clone()
    weight[0, 0, 0, 0] += 1e-3
    changed = digest(tiny.module)
    weight[0, 0, 0, 0] = was
    assert changed != before
    assert digest(tiny.module) == before


# --- classes, labels, size ---


def test_option_classes_sets_the_number_of_classes(tiny):
    assert tiny.info.classes == 7
    assert tiny.info.labels == ()


def test_option_classes_without_matching_weights_is_refused():
    with pytest.raises(ConfigError, match="classes"):
        models.load(parse("efficientnet_lite0?classes=10"))


def test_labels_are_read_one_per_line(tmp_path):
    (tmp_path / "l.txt").write_text("eins\n zwei \ndrei\nvier\nfünf\nsechs\nsieben\n", encoding="utf-8")
    model = models.load(parse(f"{TINY.format('none')}&labels={tmp_path / 'l.txt'}"))
    assert model.info.labels == ("eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben")
    assert (model.info.label(4), model.info.label(7)) == ("fünf", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"one\ntwo\n", "2 labels for 7 classes"), (b"gr\xfc\xdfe\n" * 7, "cannot read the labels")],
    ids=["too few", "not UTF-8"],
)
def test_labels_that_do_not_fit_are_refused_with_a_reason(tmp_path, content, message):
    (tmp_path / "l.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        models.load(parse(f"{TINY.format('none')}&labels={tmp_path / 'l.txt'}"))


def test_missing_labels_file_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the labels in .*: No such file"):
        models.load(parse(f"{TINY.format('none')}&labels={tmp_path / 'l.txt'}"))


def test_option_size_scales_the_crop(tiny):
    assert tiny.info.preprocess.size == (64, 64)
    assert tiny.info.preprocess.resize == round(256 * 64 / 224)


def test_option_size_reaches_timms_transformers():
    model = models.load(parse("timm:test_vit?weights=none&size=96&accelerate=false"))
    assert model.info.preprocess.size == (96, 96)
    assert model.info.layers[model.info.default_layer].layout == Layout("tokens", 6, 6, 1)


@pytest.mark.slow
def test_option_size_reaches_torchvisions_transformers():
    source = sources.build(parse("torchvision:vit_b_16?weights=none&size=96&accelerate=false"))
    assert (source.preprocess.size, source.module.image_size) == ((96, 96), 96)
    assert source.module.encoder.pos_embedding.shape[1] == 6 * 6 + 1


@pytest.mark.parametrize(
    ("arch", "size", "message"),
    [
        ("squeezenet1_1", 8, "does not run on an image of 8x8 pixels: .*too small"),
        ("vit_b_16", 100, "cannot be made: Input shape indivisible by patch size"),
        ("maxvit_t", 100, "cannot be made: Input size .* not divisible by"),
    ],
)
def test_unsupported_size_is_refused_with_a_reason(arch, size, message):
    with pytest.raises(ConfigError, match=message):
        models.load(parse(f"torchvision:{arch}?weights=none&size={size}"))


@pytest.mark.parametrize(
    ("input_size", "crop_mode", "resize"),
    [
        ((3, 64, 64), "center", 73),
        ((3, 64, 64), "squash", (73, 73)),
        ((3, 64, 96), "squash", (73, 109)),
        ((3, 64, 96), "center", (73, 109)),
    ],
)
def test_timms_crop_modes_are_followed(monkeypatch, input_size, crop_mode, resize):
    config = {"input_size": input_size, "crop_mode": crop_mode, "crop_pct": 0.875}
    monkeypatch.setattr(timm.data, "resolve_model_data_config", lambda _model: USUAL_OF_TIMM | config)
    preprocess = sources.build(parse("timm:test_vit?weights=none")).preprocess
    assert (preprocess.size, preprocess.resize) == (input_size[1:], resize)


def test_timm_model_that_needs_borders_is_refused_with_a_reason(monkeypatch):
    monkeypatch.setattr(timm.data, "resolve_model_data_config", lambda _model: USUAL_OF_TIMM | {"crop_mode": "border"})
    with pytest.raises(ConfigError, match=r"test_vit needs photos with a border around them, .* your\.module:factory"):
        models.load(parse("timm:test_vit?weights=none"))


USUAL_OF_TIMM = {
    "input_size": (3, 224, 224),
    "crop_pct": 0.875,
    "crop_mode": "center",
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
}


def test_transformer_without_weights_has_the_size_it_is_built_for():
    """torchvision's weights for vit_h_14 are for 518 pixels; without weights it is built for 224."""
    transform = torchvision.models.ViT_H_14_Weights.DEFAULT.transforms()
    actual = zoo._torchvision_preprocess(transform, built_for=224)
    assert (actual.size, actual.resize) == ((224, 224), 224)
    assert zoo._torchvision_preprocess(transform, built_for=518).size == (518, 518)


# --- a user's own module ---

FACTORY = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 28 * 28, 3))

def words():
    return "no module"

def breaks():
    raise OSError("no disk")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_own_nets.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("module")
def test_factory_in_a_users_module_is_called():
    model = models.load(parse("mine=my_own_nets:make"))
    assert (model.info.name, model.info.source, model.info.classes) == ("mine", "my_own_nets:make", 3)
    assert model.info.default_layer == "1"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_own_nets:words", "made a str, not a torch.nn.Module"),
        ("my_own_nets:breaks", "cannot be made: OSError: no disk"),
        ("my_own_nets:nothing", "cannot be made: AttributeError"),
        ("no_such_module:make", "cannot be made: ModuleNotFoundError"),
        ("my_own_nets:make?weights=none&classes=7", "classes= is for torchvision and timm"),
    ],
)
def test_factory_that_returns_no_model_is_refused_with_a_reason(text, message):
    with pytest.raises(ConfigError, match=message):
        models.load(parse(text))


# --- frozen and probed ---


def test_loaded_model_is_frozen_and_in_evaluation_mode(tiny):
    assert not tiny.module.training
    assert not any(parameter.requires_grad for parameter in tiny.module.parameters())


def test_in_place_module_does_not_change_predictions_or_is_refused(plant):
    """Here `y` is the ReLU's output. Out of place it would be the ReLU's input."""
    net = Toy(lambda net, y: net.relu(y) * 2 + y).eval()
    image = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        before = net(image)
    try:
        model = plant(lambda: net)
    except ConfigError:
        return
    torch.testing.assert_close(model.module(image), before)


def test_model_that_changes_its_input_in_place_can_be_explained(plant):
    def subtract(net, image):
        image -= 0.1
        return Toy.forward(net, image)

    model = plant(type("Subtracts", (Toy,), {"forward": subtract}))
    plain = plant(type("Plain", (Toy,), {"forward": lambda net, image: Toy.forward(net, image - 0.1)}))
    for method in ("gradcam", "saliency"):
        answers = (
            explain(variant, noise(0, 16), job(variant, [method], [ClassTarget(1)])).explanations[0].heatmap
            for variant in (model, plain, exact(plain))
        )
        assert error_ratio(*answers) <= 1


@pytest.mark.parametrize(
    ("text", "layer", "layout"),
    [
        ("timm:test_resnet?weights=none&size=64", "layer4", Layout("nchw", 2, 2)),
        ("timm:test_vit?weights=none&size=64", "blocks.5.norm1", Layout("tokens", 4, 4, 1)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("torchvision:densenet121?weights=none&size=64", "features", Layout("nchw", 2, 2)),
                ("torchvision:swin_t?weights=none&size=64", "norm", Layout("nhwc", 2, 2)),
                ("timm:vit_tiny_patch16_dinov3_qkvb?weights=none&classes=5", None, Layout("tokens", 16, 16, 5)),
            )
        ),
    ],
)
def test_default_layer_is_the_last_with_a_grid_and_a_gradient(text, layer, layout):
    info = models.load(parse(f"{text}&accelerate=false")).info
    assert layer is None or info.default_layer == layer
    assert info.layers[info.default_layer].layout == layout
    assert info.layers[info.default_layer].reason == ""
    if layout.prefix == 1:  # a class token: after the norm nothing else reaches the score
        assert "gradient there is zero" in info.layers[next(reversed(last_block(info)))].reason


def last_block(info):
    """Return the layers of a transformer's last block, in the order in which they finish."""
    block = info.default_layer.rsplit(".", 1)[0]
    return {name: layer for name, layer in info.layers.items() if name.startswith(block)}


def test_every_unexplainable_layer_has_a_reason(lite0):
    reasons = {name: layer.reason for name, layer in lite0.info.layers.items()}
    assert reasons["bn2"] == reasons["blocks.4.2"] == ""
    assert reasons["global_pool"] == reasons["classifier"] == "its output has no grid over the image"
    assert all(bool(layer.layout) != bool(layer.reason) for layer in lite0.info.layers.values())


def test_layer_that_the_score_does_not_depend_on_has_that_reason(plant):
    model = plant(lambda: Toy(lambda net, seen: (net.layer(seen), seen)[1], nn.Tanh()))
    assert model.info.layers["layer"].reason == "the score does not depend on its grid: every gradient there is zero"
    assert model.info.default_layer == "conv"


def test_model_without_any_grid_has_no_default_layer(plant):
    assert plant(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5))).info.default_layer == ""


def test_untrained_vision_transformer_has_layers_although_every_gradient_is_zero(plant):
    info = plant(lambda: VisionTransformer(16, 4, 1, 2, 8, 16, num_classes=3)).info
    assert info.differentiable
    assert info.layers[info.default_layer].layout


def test_model_that_detaches_its_scores_has_no_gradient(plant):
    info = plant(lambda: Toy(lambda _net, seen: seen.detach())).info
    assert (info.differentiable, info.layers[info.default_layer].differentiable) == (False, False)


@pytest.mark.parametrize(
    "arch", ["lraspp_mobilenet_v3_large", pytest.param("ssdlite320_mobilenet_v3_large", marks=pytest.mark.slow)]
)
def test_random_weights_fetch_nothing_for_a_backbone(arch, monkeypatch):
    fetch_arrays = []

    def fetch(url, *_args, **_options):
        fetch_arrays.append(url)
        raise OSError

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fetch)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    assert isinstance(sources.build(parse(f"torchvision:{arch}?weights=none&size=64")).module, nn.Module)
    assert not fetch_arrays


ANSWERS = {
    "a backbone's tensor": lambda t: nn.functional.avg_pool2d(t, 5),
    "a dict with it": lambda t: {"logits": nn.functional.avg_pool2d(t, 5)},
    "a dict of several": lambda t: {"first": t.mean((2, 3)), "second": t.mean((2, 3))},
    "a detector's boxes": lambda t: [{"boxes": t.flatten()[:12].reshape(3, 4)}],
    "words": lambda _t: "words",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_output_other_than_batch_by_classes_is_refused_with_a_reason(plant, answer):
    class Answers(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, image):
            return answer(self.conv(image))

    with pytest.raises(ConfigError, match=r"not a classifier: it returns .*, not \[batch, classes\]"):
        plant(Answers)


def test_failed_download_is_refused_with_a_reason(monkeypatch, tmp_path):
    def fail(*_args, **_options):
        raise OSError("no way out")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    with pytest.raises(ConfigError, match=r"cannot be fetched \(OSError\): give weights=PATH of a .* or weights=none"):
        models.load(parse("torchvision:squeezenet1_1"))


# --- precision ---


@pytest.mark.slow
def test_float16_predicts_what_float32_predicts():
    """test_acceleration.py compares maps of bfloat16."""
    pair = [models.load(parse(f"efficientnet_lite0?size=112{more}")) for more in ("&precision=float16", "")]
    rows = [Row(photo("chelsea", 112), RankTarget(0), tuple(map(call, CAMS)))]
    ((half,), (full,)) = (run(model, rows, [model.info.default_layer]) for model in pair)
    assert half.target == full.target == ClassTarget(285)
    for actual, expected in zip(half.maps[0], full.maps[0], strict=True):
        assert actual.dtype == np.float32
        assert (actual * expected).sum() / np.linalg.norm(actual) / np.linalg.norm(expected) >= 0.99


def test_embedded_model_recognises_an_egyptian_cat(lite0, photos):
    (result,) = run(lite0, [Row(photos["chelsea"], RankTarget(0))], kind="score")
    probability = np.exp(result.logits - result.logits.max())
    assert lite0.info.label(result.target.index) == "Egyptian cat"
    assert probability.max() / probability.sum() >= 0.3
    heatmap = maps(lite0, photos["chelsea"], lite0.info.default_layer, result.target)["gradcam"]
    assert heatmap[2:, 1:6].max() == heatmap.max()


@pytest.mark.parametrize(("seed", "gain"), [(1, 2.0), (4, 4.0), (7, 2.0), (11, 1.0)])
def test_layers_of_a_transformer_have_one_grid_with_any_random_weights(seed, gain, plant):
    """Four models whose 4×4 patches after a class token fit nearly as well as three rows after five tokens."""

    def make():
        torch.manual_seed(seed)
        model = VisionTransformer(64, 16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15 * gain)
        return model

    layers = plant(make, size=64, accelerate=False).info.layers.values()
    layouts = {layer_info.layout for layer_info in layers if layer_info.layout and layer_info.layout.axes == "tokens"}

    assert layouts == {Layout("tokens", 4, 4, 1)}
