"""Targets: what is explained, a class, a place in the ranking, or one class against another."""

import numpy as np
import pytest
import torch

from camserve_server import targets
from camserve_server.types import ClassTarget, ContrastTarget, RankTarget, Row
from methods.tools import CAMS, call, explain, gap, inputs, job, maps, noise, run

EXACT = 1e-5
LOGITS = torch.tensor([[0.5, 3.0, -1.0, 2.0], [9.0, -9.0, 4.0, 1.0], [0.0, 1.0, 2.0, 3.0]])


def test_a_rank_becomes_the_class_that_the_model_puts_there():
    asked = [RankTarget(0), RankTarget(1), RankTarget(3)]
    assert targets.resolve(LOGITS, asked) == [ClassTarget(1), ClassTarget(2), ClassTarget(0)]


def test_targets_that_do_not_depend_on_the_prediction_stay_as_they_are():
    fixed = [ClassTarget(2), ContrastTarget(3, 0)]
    assert targets.resolve(LOGITS[:2], fixed) == fixed
    assert targets.resolve(LOGITS, [*fixed, RankTarget(0)]) == [*fixed, ClassTarget(3)]


def test_a_score_is_a_logit_or_the_difference_of_two():
    asked = [ClassTarget(3), ContrastTarget(0, 2), ClassTarget(0)]
    assert targets.scores(LOGITS, asked).tolist() == [2.0, 5.0, 0.0]
    assert targets.scores(LOGITS, [ClassTarget(0)] * 3).tolist() == [0.5, 9.0, 0.0]


def test_the_score_is_never_a_softmax(lite0, photos):
    (result,) = run(lite0, [Row(photos["chelsea"], RankTarget(0), (call("gradcam"),))], [lite0.info.default_layer])
    with torch.no_grad():
        logits = lite0.module(inputs(lite0, photos["chelsea"]))[0]
    assert result.score == pytest.approx(float(logits.max()), rel=EXACT)
    assert gap(result.logits, logits) <= EXACT


def test_a_class_target_ignores_every_other_logit(resnet):
    image = inputs(resnet, noise(0, 64)).requires_grad_()
    logits = resnet.module(image)
    (ours,) = torch.autograd.grad(targets.scores(logits, [ClassTarget(5)])[0], image, retain_graph=True)
    (theirs,) = torch.autograd.grad(logits[0, 5], image)
    assert torch.equal(ours, theirs)


def test_a_contrasts_map_is_the_difference_of_the_two_classes_maps(lite0, photos):
    layer, image = lite0.info.default_layer, photos["chelsea"]
    why, against, both = (
        maps(lite0, image, layer, target) for target in (ClassTarget(285), ClassTarget(281), ContrastTarget(285, 281))
    )
    for name in ("gradcam", "hirescam"):  # linear in the gradient
        assert gap(both[name], why[name] - against[name]) <= EXACT


def test_a_contrasts_saliency_is_the_difference_of_the_two_gradients(resnet):
    image = inputs(resnet, noise(1, 64)).requires_grad_()
    logits = resnet.module(image)[0]
    first, second = (torch.autograd.grad(logits[i], image, retain_graph=True)[0][0] for i in (4, 9))
    found = explain(resnet, noise(1, 64), job(resnet, ["saliency"], [ContrastTarget(4, 9)])).findings[0]
    assert gap(found.heatmap, (first - second).abs().amax(0)) <= EXACT
    assert found.score == pytest.approx(float((logits[4] - logits[9]).detach()), rel=1e-4)


def test_a_contrast_turned_round_has_the_opposite_map(resnet):
    there, back = (maps(resnet, noise(2, 64), "layer4", ContrastTarget(*pair)) for pair in [(1, 2), (2, 1)])
    assert gap(there["gradcam"], -back["gradcam"]) <= EXACT


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_a_ranks_map_is_that_of_the_class_it_resolves_to(lite0, photos, rank):
    calls = tuple(map(call, CAMS))
    layer, image = lite0.info.default_layer, photos["coffee"]
    (ranked,) = run(lite0, [Row(image, RankTarget(rank), calls)], [layer])
    assert ranked.target == ClassTarget(int(np.argsort(-ranked.logits)[rank]))
    (named,) = run(lite0, [Row(image, ranked.target, calls)], [layer])
    np.testing.assert_array_equal(ranked.maps, named.maps)


def test_smoothgrad_by_rank_explains_what_the_clean_image_is_taken_for(lite0, photos):
    method, image = call("smoothgrad", samples=3, noise=1.0), photos["chelsea"]
    copies = run(lite0, [Row(image, RankTarget(0), (method,), index) for index in range(3)], kind="saliency")
    (ranked,) = explain(lite0, image, job(lite0, [method], [RankTarget(0)])).findings
    (named,) = explain(lite0, image, job(lite0, [method], [ClassTarget(285)])).findings
    assert all(one.target != ClassTarget(285) for one in copies)
    assert ranked.target == ClassTarget(285)
    np.testing.assert_array_equal(ranked.heatmap, named.heatmap)
