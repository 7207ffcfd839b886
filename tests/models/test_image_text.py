"""CLIP, SigLIP and SigLIP 2 from folders: scores, predictions and maps of texts equal those of transformers."""

import io
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

import camserve
import coloured
import needs
from camserve_server import models
from camserve_server.core.errors import ConfigError, FailedPrecondition
from camserve_server.engine.values import Row
from camserve_server.methods import METHODS
from camserve_server.models import parse
from camserve_server.models.huggingface.tokenizer import FolderTokenizer
from camserve_server.models.text import TextTower
from camserve_server.targets.values import ClassTarget, ContrastTarget, RankTarget, SimilarityTarget, TextTarget
from methods.tools import call, error_ratio, explain, gap, inputs, job, noise, run
from models.image_text_folders import KINDS, SIDE, TEXTS, save, tokens_of
from models.lazy_folders import Servers, marked_except

hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

CLASSES = ("a photo of a cat", "a photo of a dog", "крокодил", "")
FAST = ("clip", "siglip")
"""The network of SigLIP 2 is that of SigLIP; its tokenizer is another, so that tests of texts have it too."""
PRECISIONS = (torch.float32, torch.float64)
LAYERS = {
    "clip": "vision_model.encoder.layers.2.layer_norm1",
    "siglip": "vision_model.post_layernorm",
}
FEW = {"samples": 2, "steps": 2, "scales": 1, "top_channels": 2, "cells": 2, "k": 0.5}
SURROGATES = {"lime", "kernel_shap"}
"""They run the model as other perturbations do, and import captum, which takes 2 s: in the slow part only."""
NO_RELU = {"guided_backprop", "deconvnet", "guided_gradcam"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Return a folder per family, from save_pretrained."""
    root = tmp_path_factory.mktemp("zoo")
    return {kind: save(hf, kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def servers():
    with Servers() as running:
        yield running


@pytest.fixture(scope="module")
def loaded(zoo, servers):
    """Return a function that returns the model of a family's server."""
    return lambda kind: servers.model(f"hf:{zoo[kind]}")


@pytest.fixture
def served(zoo, servers):
    """Return a function that returns a client of a family's server."""
    with ExitStack() as clients:
        yield lambda kind: clients.enter_context(camserve.Client(servers.address(f"hf:{zoo[kind]}")))


def png(seed):
    """A photo of exactly the size of the models' input, so that no processor resizes it."""
    data = io.BytesIO()
    Image.fromarray(noise(seed, SIDE)).save(data, "png")
    return data.getvalue()


@cache
def transformers_model(folder, precision):
    """Return transformers' own model of a folder; tests share it."""
    return hf.AutoModel.from_pretrained(folder, dtype=precision).eval()


@cache
def transformers_processor(folder):
    return hf.AutoProcessor.from_pretrained(folder)


def logits(folder, seed, texts, precision):
    """Return transformers' own logits [texts] for a photo."""
    net, processor = transformers_model(folder, precision), transformers_processor(folder)
    pixels = processor.image_processor(images=Image.open(io.BytesIO(png(seed))), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return net(pixel_values=pixels.to(precision), **tokens_of(processor, texts)).logits_per_image[0]


def by_hand(folder, layer, pixels, texts, score, precision):
    """Return the score, the largest logit and Grad-CAM's map, by autograd through transformers' model and processor."""
    net, kept = transformers_model(folder, precision), []

    def keep(_module, _args, output):
        kept.append(output)
        output.retain_grad()

    with net.get_submodule(layer).register_forward_hook(keep):
        tokens = tokens_of(transformers_processor(folder), texts)
        logits = net(pixel_values=pixels.to(precision).requires_grad_(), **tokens).logits_per_image[0]
    found = score(logits)
    found.backward()
    activations, gradients = (tensor.detach()[0, -36:] for tensor in (kept[0], kept[0].grad))
    return (
        float(found.detach()),
        float(logits.detach().abs().max()),
        (activations @ gradients.mean(0)).reshape(6, 6).numpy(),
    )


def check(found, model, folder, image, texts, score):
    """Compare a finding's score and Grad-CAM map with those of transformers in float32 and float64."""
    (plain, _, plain_map), (truth, largest, true_map) = (
        by_hand(folder, model.info.default_layer, inputs(model, image), texts, score, precision)
        for precision in PRECISIONS
    )
    heatmap = found.maps[0][0] if hasattr(found, "maps") else found.heatmap
    # A score near zero is a difference of large numbers, so its error is a share of the largest of all logits.
    assert error_ratio(*([score, largest] for score in (found.score, plain, truth))) <= 1
    assert error_ratio(heatmap, plain_map, true_map) <= 1


def asked(model, targets, texts=(), methods=("gradcam",)):
    """A request with texts as its classes."""
    return replace(job(model, methods, targets), model=model.info.with_texts(tuple(texts)))


# --- tokens, scores and maps ---


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_transformers_processor(kind, zoo):
    config = hf.AutoConfig.from_pretrained(zoo[kind]).text_config
    tokenizer = FolderTokenizer(zoo[kind], kind, config.max_position_embeddings, config.vocab_size)
    expected = tokens_of(transformers_processor(zoo[kind]), TEXTS)
    ids, mask = tokenizer(TEXTS)

    assert torch.equal(ids[:, : expected["input_ids"].shape[1]], expected["input_ids"])
    assert (mask is not None) == ("attention_mask" in expected)
    if mask is not None:
        assert torch.equal(mask, expected["attention_mask"])


@pytest.mark.parametrize("kind", FAST)
def test_default_layer_is_the_last_one_whose_patches_reach_the_score(kind, loaded):
    info = loaded(kind).info
    layout = info.layers[info.default_layer].layout

    assert info.default_layer == LAYERS[kind]
    assert (layout.height, layout.width, layout.prefix) == (6, 6, 1 if kind == "clip" else 0)
    assert (info.task, info.labels) == ("embed", ())
    assert all(not name.startswith("text") for name in info.layers)


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST, KINDS))
def test_scores_of_all_texts_equal_transformers_logits(kind, zoo, served):
    result = served(kind).explain(png(3), model=kind, targets=[camserve.text(text) for text in TEXTS])
    plain, truth = (logits(zoo[kind], 3, TEXTS, precision).numpy() for precision in PRECISIONS)

    assert [explanation.target.label for explanation in result.explanations] == [text or "class 0" for text in TEXTS]
    assert error_ratio([explanation.score for explanation in result.explanations], plain, truth) <= 1


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST, KINDS))
def test_predictions_equal_transformers_zero_shot_classification(kind, zoo, served):
    result = served(kind).explain(png(4), model=kind, texts=CLASSES, top_k=2)
    plain, truth = (logits(zoo[kind], 4, CLASSES, precision) for precision in PRECISIONS)
    chances = (values.softmax(0) if kind == "clip" else values.sigmoid() for values in (plain, truth))
    found = sorted(result.predictions, key=lambda prediction: prediction.class_index)

    assert [prediction.label for prediction in found] == [*CLASSES[:3], "class 3"]
    assert error_ratio([prediction.probability for prediction in found], *(each.numpy() for each in chances)) <= 1
    assert error_ratio([prediction.score for prediction in found], plain.numpy(), truth.numpy()) <= 1
    order = truth.argsort(descending=True).tolist()
    assert [prediction.class_index for prediction in result.predictions] == order
    assert [explanation.target.class_index for explanation in result.explanations] == order[:2]


@pytest.mark.parametrize("kind", marked_except(pytest.mark.slow, FAST, KINDS))
def test_maps_of_texts_equal_those_from_autograd(kind, zoo, loaded):
    model, image = loaded(kind), noise(1, SIDE)
    targets = [TextTarget("a red photo"), ClassTarget(2), ContrastTarget(0, 1)]
    found = explain(model, image, asked(model, targets, CLASSES)).explanations
    texts = (*CLASSES, "a red photo")
    scores = (lambda values: values[4], lambda values: values[2], lambda values: values[0] - values[1])

    for explanation, score in zip(found, scores, strict=True):
        check(explanation, model, zoo[kind], image, texts, score)


@pytest.mark.parametrize("kind", FAST)
def test_neighbours_with_other_texts_change_nothing(kind, zoo, loaded):
    model, pictures = loaded(kind), [noise(seed, SIDE) for seed in (5, 6, 7)]
    texts = ("cat", "dog", "photo", "no", "cats")
    (embeddings,) = [embedded(model, texts)]
    rows = [
        Row(pictures[0], TextTarget("cat", embeddings["cat"]), (call("gradcam"),)),
        Row(pictures[1], ClassTarget(1), (call("gradcam"),), texts=stacked(embeddings, texts[:3])),
        Row(pictures[0], ContrastTarget(1, 0), (call("gradcam"),), texts=stacked(embeddings, texts[2:])),
        Row(pictures[2], SimilarityTarget(), (call("gradcam"),)),
    ]
    first, second, third, similarity = run(model, rows, [model.info.default_layer])

    check(first, model, zoo[kind], pictures[0], texts, lambda values: values[0])
    check(second, model, zoo[kind], pictures[1], texts, lambda values: values[1])
    check(third, model, zoo[kind], pictures[0], texts, lambda values: values[3] - values[2])
    assert similarity.score == pytest.approx(1)
    assert [len(result.logits) for result in (first, second, third)] == [model.info.classes, 3, 3]


def embedded(model, texts):
    """Return the embedding of each text."""
    rows = [Row(np.empty((0, 0, 3), np.uint8), TextTarget(text)) for text in texts]
    return {row.target.text: result.logits for row, result in zip(rows, run(model, rows, (), "text"), strict=True)}


def stacked(embeddings, texts):
    return np.stack([embeddings[text] for text in texts])


@pytest.mark.parametrize(
    ("kind", "left_out"), [("clip", SURROGATES), pytest.param("siglip", (), marks=pytest.mark.slow)]
)
def test_every_method_explains_a_text_or_says_what_is_missing(kind, left_out, loaded):
    model, refused = loaded(kind), {}
    for name, method in METHODS.items():
        if name in left_out or method.tasks:  # of detectors only
            continue
        few = {parameter.name: FEW[parameter.name] for parameter in method.parameters if parameter.name in FEW}
        wanted = asked(model, [TextTarget("a cat"), RankTarget(0)], CLASSES, [call(name, **few)])
        try:
            found = explain(model, noise(2, SIDE), wanted).explanations
        except FailedPrecondition as error:
            refused[name] = str(error)
        else:
            assert all(np.isfinite(explanation.heatmap).all() for explanation in found)
            assert all(np.ptp(explanation.heatmap) > 0 for explanation in found) or name == "lime"

    assert refused.keys() == NO_RELU


def grad_eclip_by_hand(folder, pixels, texts, precision):
    """Return Grad-ECLIP's map for the first text, by hooks on transformers' own modules."""
    net, kept = transformers_model(folder, precision), {}

    def keep(name):
        def hook(_module, args, output):
            kept[name] = output if name != "out_proj" else args[0]
            if kept[name].requires_grad:
                kept[name].retain_grad()

        return hook

    attention = net.vision_model.encoder.layers[-1].self_attn
    tokens = tokens_of(transformers_processor(folder), texts)
    with ExitStack() as hooks:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            hooks.enter_context(attention.get_submodule(name).register_forward_hook(keep(name)))
        net(pixel_values=pixels.to(precision).requires_grad_(), **tokens).logits_per_image[0, 0].backward()
    query, key, value = (kept[name][0].detach().numpy() for name in ("q_proj", "k_proj", "v_proj"))
    weights = kept["out_proj"].grad[0, 0].numpy()
    norms = np.linalg.norm(key[1:], axis=1) * np.linalg.norm(query[0])
    cosines = key[1:] @ query[0] / norms
    loosened = (cosines - cosines.min()) / (cosines.max() - cosines.min())
    return np.maximum(loosened * (value[1:] @ weights), 0).reshape(6, 6)


def test_grad_eclip_equals_the_formula_on_transformers_own_modules(zoo, loaded):
    model, image = loaded("clip"), noise(8, SIDE)
    (found,) = explain(model, image, asked(model, [TextTarget("a red photo")], (), ["gradeclip"])).explanations
    plain, truth = (grad_eclip_by_hand(zoo["clip"], inputs(model, image), ["a red photo"], each) for each in PRECISIONS)

    assert (found.heatmap > 0).any()
    assert error_ratio(found.heatmap, plain, truth) <= 1


@pytest.mark.parametrize("kind", FAST)
def test_grad_eclip_of_a_batch_equals_that_of_each_row(kind, loaded):
    model, pictures = loaded(kind), [noise(seed, SIDE) for seed in (1, 2)]
    embeddings = embedded(model, ["cat", "dog"])
    rows = [
        Row(picture, TextTarget(text, embeddings[text]), (call("gradeclip"),))
        for picture in pictures
        for text in embeddings
    ]
    together = run(model, rows, (), "last")
    alone = [run(model, [row], (), "last")[0] for row in rows]

    assert all(gap(a.maps[0][0], b.maps[0][0]) < 1e-4 for a, b in zip(together, alone, strict=True))
    assert len({float(result.maps[0][0].sum()) for result in together}) == 4
    assert not any(result.zero_gradient[0] for result in together)


# --- the pass over texts, and the cache ---


@pytest.fixture
def counted(monkeypatch):
    """Record the texts of every forward pass of a text side."""
    passes, embed = [], TextTower.embed

    def record(tower, texts):
        passes.append(list(texts))
        return embed(tower, texts)

    monkeypatch.setattr(TextTower, "embed", record)
    return passes


def test_texts_of_one_batch_take_one_forward_pass_without_repetition(loaded, counted):
    model = loaded("clip")
    counted.clear()  # of the trial when the model was loaded
    first = embedded(model, ["a", "b", "c"])
    rows = [Row(np.empty((0, 0, 3), np.uint8), TextTarget(text)) for text in ("b", "a", "b", "d")]
    results = run(model, rows, (), "text")

    assert counted == [["a", "b", "c"], ["b", "a", "d"]]
    assert [result.target.text for result in results] == ["b", "a", "b", "d"]
    assert np.array_equal(results[0].logits, results[2].logits)
    assert gap(results[1].logits, first["a"]) < 1e-5


def test_repeated_text_takes_no_further_pass(served, counted):
    client, new, newer = served("siglip"), "a text of this test", "another text of this test"
    counted.clear()  # of the trial when the model was loaded
    first = client.explain(png(1), targets=[camserve.text(new)])
    client.explain(png(2), targets=[camserve.text(new)], texts=[newer, new], methods=["gradcam", "occlusion"])
    again = client.explain(png(1), targets=[camserve.text(new)])
    client.inspect(png(1), target=camserve.text(new))

    assert counted == [[new], [newer]]
    assert first.explanations[0].score == again.explanations[0].score


# --- text sides of users ---


def built(plant, **changes):
    source = coloured.named()
    return plant(lambda: replace(source, text=replace(source.text, **changes)), size=64)


class Faulty(torch.nn.Module):
    """A text side that returns what it was given, or raises it."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, _texts):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder": len}, "not a torch.nn.Module"),
        ({"encoder": Faulty(torch.ones(1, 4))}, "an image has 3 numbers, and that of a text has 4"),
        ({"encoder": Faulty(torch.ones(3))}, "must return a tensor of 1 embeddings"),
        ({"encoder": Faulty(None)}, "must return a tensor of 1 embeddings"),
        ({"encoder": Faulty(ValueError("no such word"))}, "does not run: ValueError: no such word"),
        ({"encoder": Faulty(torch.full((1, 3), torch.inf))}, "not finite"),
        ({"scale": float("nan")}, "must be finite numbers"),
    ],
)
def test_faulty_text_side_is_refused_with_a_reason(plant, changes, words):
    with pytest.raises(ConfigError, match=words):
        built(plant, **changes)


def test_text_side_needs_a_model_of_embeddings(plant):
    with pytest.raises(ConfigError, match='its task is "embed", not "classify"'):
        plant(lambda: replace(coloured.named(), task="classify"), size=64)


def test_digest_covers_the_text_side(plant):
    words = coloured.Words()
    with torch.no_grad():
        words.vectors.mul_(2)
    digests = {built(plant, **changes).info.digest for changes in ({}, {}, {"bias": 1.0}, {"encoder": words})}

    assert len(digests) == 3


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a"] * 2, "same as that at index 0"),
        (["a" * 1001], "1,000 is the limit"),
        (map(str, range(1001)), "1,001 texts"),
    ],
)
def test_unusable_labels_are_refused(tmp_path, texts, words):
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    with pytest.raises(ConfigError, match=words):
        models.load(parse(f"coloured:named?size=64&labels={tmp_path / 'texts.txt'}"))


def test_model_without_a_text_side_refuses_a_pass_over_texts(loaded):
    model = loaded("clip")
    with pytest.raises(FailedPrecondition, match="takes no texts"):
        run(replace(model, text=None), [Row(np.empty((0, 0, 3), np.uint8), TextTarget("a"))], (), "text")
