"""Image classifiers of transformers with one and with twelve channels, from folders."""

import io
import json

import numpy as np
import pytest
import torch

import needs
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError
from camserve_server.models import parse, sources
from methods.tools import error_ratio

hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

SIZE = {"size": {"height": 64, "width": 64}}
CLASS = 3
TOP = {"uint16": 65535, "float32": 1}


def vit(channels):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.ViTConfig(**sizes, image_size=64, patch_size=8, num_channels=channels, num_labels=5)
    return hf.ViTForImageClassification(config)


def resnet(channels):
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_channels=channels, num_labels=5))


KINDS = {"vit": vit, "resnet": resnet}


def saved(folder, kind, channels, **options):
    """Save a network with random weights and its processor; return the folder, the means and the deviations."""
    torch.manual_seed(channels)
    network = KINDS[kind](channels)
    mean, std = np.linspace(0.3, 0.6, channels).tolist(), np.linspace(0.2, 0.4, channels).tolist()
    options = {"image_mean": mean, "image_std": std, **SIZE, **options}
    for part in (network, hf.ViTImageProcessor(**options)):
        part.save_pretrained(folder / "net")
    return folder / "net", np.array(mean), np.array(std)


def plain(folder, values, precision):
    """Return logits and Grad-CAM of the model of transformers for a normalised array [h,w,C], in this precision."""
    network = hf.AutoModelForImageClassification.from_pretrained(folder).eval().to(precision)
    layer = network.get_submodule("vit.layers.1.layernorm_before" if hasattr(network, "vit") else "resnet.encoder")
    outputs = []

    def keep(_module, _arguments, output):
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])
        outputs[-1].retain_grad()

    images = torch.from_numpy(values).permute(2, 0, 1)[None].to(precision).requires_grad_()
    with layer.register_forward_hook(keep):
        logits = network(images).logits[0]
    logits[CLASS].backward()
    activations, gradients = outputs[-1].detach(), outputs[-1].grad
    if activations.dim() == 3:
        activations, gradients = (each[:, 1:].transpose(1, 2).reshape(1, -1, 8, 8) for each in (activations, gradients))
    return logits.detach().numpy(), (gradients.mean((2, 3), keepdim=True) * activations).sum(1)[0].numpy()


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "dtype", "channels"),
    [
        ("vit", "uint16", 12),
        ("resnet", "float32", 1),
        pytest.param("vit", "uint16", 1, marks=pytest.mark.slow),
        pytest.param("resnet", "float32", 12, marks=pytest.mark.slow),
    ],
)
def test_predictions_and_maps_are_as_exact_as_the_plain_models(kind, channels, dtype, tmp_path):
    folder, mean, std = saved(tmp_path, kind, channels)
    values = (np.random.default_rng(channels).random((64, 64, channels)) * TOP[dtype]).astype(dtype)
    layer = "vit.layers.1.layernorm_before" if kind == "vit" else "resnet.encoder"
    with Explainer(f"hf:{folder}") as explainer:
        result = explainer.explain(npy(values), targets=[CLASS], layers=[layer], max_predictions=5)

    normalised = (values.astype(np.float64) / TOP[dtype] - mean) / std
    exact, single = (plain(folder, normalised, precision) for precision in (torch.float64, torch.float32))
    logits = np.zeros(5)
    for prediction in result.predictions:
        logits[prediction.class_index] = prediction.score
    assert error_ratio(logits, single[0], exact[0]) <= 1
    assert error_ratio(result.explanations[0].heatmap, single[1], exact[1]) <= 1


def loaded(folder):
    return sources.build(parse(f"hf:{folder}")).preprocess


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"do_rescale": False}, (0, 1)),
        ({"rescale_factor": 1 / 65535}, (0, 65535)),
        ({}, None),
    ],
)
def test_values_are_rescaled_as_by_the_processor(options, expected, tmp_path):
    folder, mean, std = saved(tmp_path, "resnet", 12, **options)
    preprocess = loaded(folder)

    assert (preprocess.mean, preprocess.std) == (tuple(mean), tuple(std))
    assert preprocess.value_range == (None if expected is None else pytest.approx(expected))


def test_processor_without_normalisation_leaves_values_of_0_to_1(tmp_path):
    preprocess = loaded(saved(tmp_path, "resnet", 12, do_normalize=False)[0])

    assert (preprocess.mean, preprocess.std) == ((0,) * 12, (1,) * 12)


@pytest.mark.parametrize(
    ("channels", "options", "words"),
    [
        (
            12,
            {"image_mean": [0.5] * 3},
            "has num_channels=12, and image_mean in its {} has 3 numbers: set one for each",
        ),
        (1, {"image_std": [0.5] * 3}, "has num_channels=1, and image_std in its {} has 3 numbers: set one for each"),
        (12, {"image_std": [0.0] * 12}, "image_std in its {} must be finite numbers above 0"),
        (1, {"rescale_factor": 0}, "rescale_factor in its {} must be finite numbers above 0"),
        (12, {"image_mean": ["a"] * 12}, "image_mean in its {} must be finite numbers"),
    ],
)
def test_processor_without_a_number_for_each_channel_is_refused(channels, options, words, tmp_path):
    folder, *_ = saved(tmp_path, "resnet", channels)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))

    with pytest.raises(ConfigError, match=words.format("preprocessor_config.json")):
        loaded(folder)


def test_network_of_too_many_channels_is_refused(tmp_path):
    folder, *_ = saved(tmp_path, "resnet", 12)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_channels": 1000}))

    with pytest.raises(ConfigError, match=r"num_channels in its config.json is 1,000: 1 to 512 are accepted"):
        loaded(folder)


def test_processor_that_shifts_the_values_otherwise_is_refused(tmp_path):
    folder, *_ = saved(tmp_path, "resnet", 12)
    options = {"image_mean": [0.5] * 12, "image_std": [0.5] * 12, "rescale_factor": 1 / 127.5, "rescale_offset": True}
    hf.EfficientNetImageProcessor(**SIZE, **options).save_pretrained(folder)

    with pytest.raises(ConfigError, match="EfficientNetImageProcessor does more than rescale, subtract and divide"):
        loaded(folder)
