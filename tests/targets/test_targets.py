"""Targets: classes, ranks, contrasts and probabilities."""

from typing import get_args

import numpy as np
import pytest
import torch
from pytorch_grad_cam import FinerCAM
from pytorch_grad_cam.utils.model_targets import FinerWeightedTarget
from torch import nn

from camserve_server import targets
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging import scales
from camserve_server.imaging.values import Rendering
from camserve_server.models.outputs import Outputs
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    DetectionTarget,
    FinerTarget,
    ProbabilityTarget,
    RankTarget,
    SegmentTarget,
    SimilarityTarget,
    Target,
)
from methods.parity import unfrozen
from methods.tools import (
    CAMS,
    FACTOR,
    FLOOR,
    Toy,
    call,
    error_ratio,
    exact,
    explain,
    inputs,
    job,
    maps,
    noise,
    run,
)
from support import loaded

LOGITS = torch.tensor([[0.5, 3.0, -1.0, 2.0], [9.0, -9.0, 4.0, 1.0], [0.0, 1.0, 2.0, 3.0]])


@pytest.fixture(scope="module")
def resnet():
    """A smaller model than in other folders."""
    return loaded("timm:test_resnet?weights=none&size=64")


@pytest.fixture
def outputs(resnet):
    """Return random logits of a classifier."""
    return Outputs(resnet.info, LOGITS)


def test_rank_resolves_to_the_class_at_that_rank(outputs):
    asked = [RankTarget(0), RankTarget(1), RankTarget(3)]
    assert targets.resolve(outputs, asked) == [ClassTarget(1), ClassTarget(2), ClassTarget(0)]


def test_targets_that_do_not_depend_on_the_prediction_stay_as_they_are(outputs):
    fixed = [ClassTarget(2), ContrastTarget(3, 0)]
    assert targets.resolve(outputs[:2], fixed) == fixed
    assert targets.resolve(outputs, [*fixed, RankTarget(0)]) == [*fixed, ClassTarget(3)]


def test_every_kind_of_target_has_its_own_name():
    names = [targets.kind_of(kind.__new__(kind)).name for kind in get_args(Target)]
    assert len(set(names)) == len(names) == 10


def test_scores_of_mixed_kinds_are_those_of_each_target_alone(outputs):
    mixed = [ContrastTarget(1, 3), FinerTarget(0, (1, 2)), ProbabilityTarget(2)]
    alone = [targets.scores(outputs[slice(i, i + 1)], [each])[0] for i, each in enumerate(mixed)]
    assert targets.scores(outputs, mixed).tolist() == torch.stack(alone).tolist()


def test_scoring_a_rank_that_was_not_resolved_is_an_error(outputs):
    with pytest.raises(TypeError, match="rank 1 is not resolved"):
        targets.scores(outputs[:1], [RankTarget(1)])


@pytest.mark.parametrize(
    ("task", "oracle"),
    [("classify", lambda x: x.softmax(0)), ("multilabel", torch.sigmoid), ("regress", lambda x: 0 * x)],
)
def test_class_probabilities_are_those_of_float64_rounded_once(task, oracle):
    logits = torch.tensor([30.0, 0.5, -7.0, 12.25])
    np.testing.assert_array_equal(
        targets.class_probabilities(task, logits.numpy()), oracle(logits.double()).float().numpy()
    )


def test_infinite_logits_have_no_softmax():
    assert np.isnan(targets.class_probabilities("classify", np.array([np.inf, 0, np.inf], np.float32))).any()


@pytest.mark.parametrize("score", [-800.0, -3.0, 0.25, 800.0])
@pytest.mark.parametrize(
    "target", [ClassTarget(1), ContrastTarget(1, 0), FinerTarget(1, (0,)), SimilarityTarget(), SegmentTarget(1)]
)
def test_weight_of_any_score_is_between_zero_and_one(target, score):
    answer = RowResult(np.array([0.0, score], np.float32), target, score)
    weight = targets.weight_probability("classify", answer)
    assert weight == pytest.approx(1 / (1 + np.exp(-np.float64(np.clip(score, -700, 700)))), rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("target", [ProbabilityTarget(1), DetectionTarget(1)])
def test_score_that_is_a_probability_is_its_own_weight(target):
    assert targets.weight_probability("detect", RowResult(np.zeros(2, np.float32), target, 0.3)) == 0.3


def test_score_is_a_logit_or_the_difference_of_two(outputs):
    asked = [ClassTarget(3), ContrastTarget(0, 2), ClassTarget(0)]
    assert targets.scores(outputs, asked).tolist() == [2.0, 5.0, 0.0]
    assert targets.scores(outputs, [ClassTarget(0)] * 3).tolist() == [0.5, 9.0, 0.0]


def test_score_is_never_a_softmax(resnet):
    (result,) = run(resnet, [Row(noise(0, 64), RankTarget(0), (call("gradcam"),))], [resnet.info.default_layer])
    with torch.no_grad():
        plain, truth = (each.module(inputs(each, noise(0, 64)))[0] for each in (resnet, exact(resnet)))
    assert result.score == result.logits.max()
    assert error_ratio(result.logits, plain, truth) <= 1


def test_class_target_ignores_every_other_logit(resnet):
    image = inputs(resnet, noise(0, 64)).requires_grad_()
    logits = resnet.module(image)
    outputs = Outputs(resnet.info, logits)
    (ours,) = torch.autograd.grad(targets.scores(outputs, [ClassTarget(5)])[0], image, retain_graph=True)
    (theirs,) = torch.autograd.grad(logits[0, 5], image)
    assert torch.equal(ours, theirs)


def test_contrasts_map_is_the_difference_of_the_two_classes_maps(resnet):
    layer, image = resnet.info.default_layer, noise(1, 64)
    contrast, classes = ContrastTarget(285, 281), (ClassTarget(285), ClassTarget(281))
    result = maps(resnet, image, layer, contrast)
    (why, against), (truly, not_so) = (
        [maps(model, image, layer, each) for each in classes] for model in (resnet, exact(resnet))
    )
    for name in ("gradcam", "hirescam"):  # linear in the gradient
        assert error_ratio(result[name], why[name] - against[name], truly[name] - not_so[name]) <= 1


def test_contrasts_saliency_is_the_difference_of_the_two_gradients(resnet):
    def theirs(model):
        image = inputs(model, noise(1, 64)).requires_grad_()
        logits = model.module(image)[0]
        first, second = (torch.autograd.grad(logits[i], image, retain_graph=True)[0][0] for i in (4, 9))
        return (first - second).abs().amax(0), logits[[4, 9]].detach()

    result = explain(resnet, noise(1, 64), job(resnet, ["saliency"], [ContrastTarget(4, 9)])).explanations[0]
    (plain, logits), (truth, known) = theirs(resnet), theirs(exact(resnet))
    assert error_ratio(result.heatmap, plain, truth) <= 1
    assert abs(result.score - float(known[0] - known[1])) <= allowed(logits, known)


def allowed(logits, truth):
    """Return the largest allowed distance of a difference of two logits from the exact one."""
    return 2 * float(FACTOR * (logits - truth).abs().max() + FLOOR * truth.abs().max())


def test_reversed_contrast_has_the_negated_map(resnet):
    there, back = (maps(resnet, noise(2, 64), "layer4", ContrastTarget(*pair)) for pair in [(1, 2), (2, 1)])
    truth = maps(exact(resnet), noise(2, 64), "layer4", ContrastTarget(1, 2))
    assert error_ratio(there["gradcam"], -back["gradcam"], truth["gradcam"]) <= 1


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_ranks_map_is_that_of_the_class_it_resolves_to(lite0, photos, rank):
    calls = tuple(map(call, CAMS))
    layer, image = lite0.info.default_layer, photos["coffee"]
    (ranked,) = run(lite0, [Row(image, RankTarget(rank), calls)], [layer])
    assert ranked.target == ClassTarget(int(np.argsort(-ranked.logits)[rank]))
    (named,) = run(lite0, [Row(image, ranked.target, calls)], [layer])
    np.testing.assert_array_equal(ranked.maps, named.maps)


def test_smoothgrad_by_rank_explains_the_class_of_the_clean_image(lite0, photos):
    method, image = call("smoothgrad", samples=3, noise=1.0), photos["chelsea"]
    copies = run(lite0, [Row(image, RankTarget(0), (method,), index) for index in range(3)], kind="saliency")
    (ranked,) = explain(lite0, image, job(lite0, [method], [RankTarget(0)])).explanations
    (named,) = explain(lite0, image, job(lite0, [method], [ClassTarget(285)])).explanations
    assert all(copy.target != ClassTarget(285) for copy in copies)
    assert ranked.target == ClassTarget(285)
    np.testing.assert_array_equal(ranked.heatmap, named.heatmap)


@pytest.mark.parametrize(
    "logits",
    [
        [1.0, 2.0, 2.0, 2.0, 0.0, 2.0],
        [0.0] * 6,
        [0.0, -0.0, 5.0, -0.0, 0.0, 5.0],
        [1.0, np.nan, 3.0, np.inf, 3.0, -np.inf],
    ],
)
def test_ranks_and_predictions_order_equal_logits_the_same_way(resnet, logits):
    outputs = Outputs(resnet.info, torch.tensor([logits] * 6))
    fixed = targets.resolve(outputs, [RankTarget(rank) for rank in range(6)])
    assert [each.index for each in fixed] == np.argsort(-np.array(logits, np.float32), kind="stable").tolist()


@pytest.mark.parametrize("seed", range(20))
def test_rank_is_the_place_in_a_stable_sort_of_equal_infinite_or_nan_logits(resnet, seed):
    chosen = np.random.default_rng(seed).choice(np.array([1, 2, 2.5, np.inf, -np.inf, np.nan], np.float32), 12)
    outputs = Outputs(resnet.info, torch.from_numpy(chosen).expand(12, 12))
    fixed = targets.resolve(outputs, [RankTarget(rank) for rank in range(12)])

    assert [each.index for each in fixed] == np.argsort(-chosen, kind="stable").tolist()


@pytest.mark.parametrize("apart", [False, True])
def test_probability_and_gradient_are_those_of_softmax_or_sigmoid(resnet, apart):
    result, expected = [], []
    for model in (resnet, exact(resnet)):
        image = inputs(model, noise(3, 64)).requires_grad_()
        logits = model.module(image)
        score = targets.scores(Outputs(model.info, logits), [ProbabilityTarget(7, apart=apart)])[0]
        theirs = (logits.sigmoid() if apart else logits.softmax(1))[0, 7]
        for place, value in ((result, score), (expected, theirs)):
            place.append((value.detach(), torch.autograd.grad(value, image, retain_graph=True)[0]))
    for ours, plain, truth in zip(result[0], *expected, strict=True):
        assert error_ratio(ours, plain, truth) <= 1


def test_probabilitys_map_is_the_weighted_contrast_with_every_other_class(plant):
    """d p_c = p_c Σ_k p_k (d y_c − d y_k)."""
    model, image = plant(Toy), noise(4, 16)
    (row,) = run(model, [Row(image, ProbabilityTarget(2), (call("hirescam"),))], ["conv"])

    def weighted(model):
        result = {k: maps(model, image, "conv", ClassTarget(k), ["hirescam"])["hirescam"] for k in range(5)}
        (answer,) = run(model, [Row(image, ClassTarget(2))], kind="score")
        p = np.exp(answer.logits) / np.exp(answer.logits).sum()
        return p[2], p[2] * sum(p[k] * (result[2] - result[k]) for k in range(5))

    for ours, plain, truth in zip((row.score, row.maps[0][0]), weighted(model), weighted(exact(model)), strict=True):
        assert error_ratio(ours, plain, truth) <= 1


@pytest.mark.parametrize(("against", "weight"), [((), 1.0), ((), 0.6), ((5, 9), 1.0), ((3,), 0.0)])
def test_finer_target_equals_finercam_of_pytorch_grad_cam(resnet, against, weight):
    image = noise(5, 64)
    (row,) = run(resnet, [Row(image, FinerTarget(17, against, weight), (call("gradcam"),))], ["layer3"])
    order = np.argsort(np.abs(row.logits - row.logits[17]), kind="stable")
    others = list(against or order[1:4])
    asked = FinerWeightedTarget(17, others, weight)

    def finer(model):
        theirs, seen = unfrozen(model.module), inputs(model, image)
        with FinerCAM(theirs, [theirs.layer3]) as cam:
            cam(seen, targets=[asked])
            kept = cam.base_cam.activations_and_grads
            raw = cam.base_cam.get_cam_image(
                seen, theirs.layer3, [asked], kept.activations[0].detach().numpy(), kept.gradients[0].detach().numpy()
            )[0]
            logits = theirs(seen)[0].detach()
        return raw, logits

    (plain, logits), (truth, known) = finer(resnet), finer(exact(resnet))
    assert row.target == FinerTarget(17, tuple(others), weight)
    assert abs(row.score - float(asked(known))) <= allowed(logits, known)
    assert error_ratio(row.maps[0][0], plain, truth) <= 1


def test_finer_target_chooses_the_classes_of_pytorch_grad_cam(resnet):
    image = noise(6, 64)
    (row,) = run(resnet, [Row(image, FinerTarget(23), (call("gradcam"),))], ["layer4"])

    def finer(model):
        theirs = unfrozen(model.module)
        with FinerCAM(theirs, [theirs.layer4]) as cam:
            return cam(inputs(model, image), target_idx=23)[0]

    ours = scales.scale_map(row.maps[0][0], Rendering(profile="grad-cam"), (64, 64)).heat
    assert error_ratio(ours, finer(resnet), finer(exact(resnet))) <= 1


def test_finer_target_of_a_copy_uses_the_similar_classes_of_the_clean_image(lite0, photos):
    method = call("smoothgrad", samples=2, noise=1.0)
    (explanation,) = explain(lite0, photos["chelsea"], job(lite0, [method], [FinerTarget(285)])).explanations
    copies = run(
        lite0, [Row(photos["chelsea"], FinerTarget(285), (method,), index) for index in range(2)], kind="saliency"
    )
    (fixed,) = explain(lite0, photos["chelsea"], job(lite0, [method], [explanation.target])).explanations
    assert all(copy.target != explanation.target for copy in copies)
    np.testing.assert_array_equal(explanation.heatmap, fixed.heatmap)


def test_finer_accepts_models_with_fewer_classes(plant):
    model = plant(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    (row,) = run(model, [Row(noise(7, 16), FinerTarget(1), (call("gradcam"),))], ["0"])
    assert row.target == FinerTarget(1, (0,))
    assert row.score == row.logits[1] - row.logits[0]


def test_kinds_of_target_mix_in_a_batch(resnet):
    image = noise(8, 64)
    asked = [ClassTarget(4), FinerTarget(4), ProbabilityTarget(4), ContrastTarget(4, 5), RankTarget(1)]
    together, in_float64 = (
        run(resnet, [Row(image, each, (call("gradcam"),)) for each in asked], ["layer4"]),
        exact(resnet),
    )
    for target, row in zip(asked, together, strict=True):
        asked_alone = [Row(image, target, (call("gradcam"),))]
        (alone,), (truth,) = (run(model, asked_alone, ["layer4"]) for model in (resnet, in_float64))
        assert alone.target == row.target
        assert error_ratio(row.maps[0][0], alone.maps[0][0], truth.maps[0][0]) <= 1
