"""Principal components and factors of features, compared with scikit-learn and pytorch-grad-cam."""

import numpy as np
import pytest
from pytorch_grad_cam.feature_factorization.deep_feature_factorization import dff
from sklearn.decomposition import PCA

from camserve_server.core.errors import FailedPrecondition
from camserve_server.methods import components, factors
from methods.tools import FACTOR, FLOOR, gap


def features(seed, channels=24, grid=(6, 5)):
    """Features after a ReLU, float32 [channels,*grid]."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal(grid)
    return np.maximum(random.standard_normal((channels, *grid)) + shared, 0).astype(np.float32)


def factorise(maps, count):
    """Return the factors, and check that the work pauses so often that others have their turn."""
    pauses, steps = 0, factors.factorise(maps, count)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            assert pauses >= 2  # at least one step, which updates both factors
            return stop.value
        pauses += 1


def cells(maps):
    return maps.reshape(len(maps), -1).T


@pytest.mark.parametrize("channels", [8, 90])
def test_components_of_several_images_equal_those_of_scikit_learn(channels):
    images = [features(0, channels), features(1, channels, (4, 7))]
    stacked = np.concatenate([cells(each) for each in images])
    truth, plain = (PCA(4, svd_solver="full").fit(stacked.astype(dtype)) for dtype in (np.float64, np.float32))
    basis = components.fit(images, 4)

    assert gap(basis.shares, truth.explained_variance_ratio_) <= FLOOR
    for image in images:
        exact, rough = truth.transform(cells(image).astype(np.float64)), plain.transform(cells(image))
        signs = np.sign((basis.vectors * truth.components_).sum(1))
        signs_of_plain = np.sign((plain.components_ * truth.components_).sum(1))
        allowed = FACTOR * gap(rough * signs_of_plain, exact) + FLOOR
        assert gap(cells(components.project(image, basis)) * signs, exact) <= allowed


def test_largest_value_of_a_component_is_positive():
    vectors = components.fit([features(2)], 5).vectors

    assert (vectors[np.arange(5), np.abs(vectors).argmax(1)] > 0).all()


def test_foreground_is_the_planted_region_inside():
    maps = features(3) / 10
    maps[:, 2:4, 1:4] += np.linspace(1, 2, len(maps), dtype=np.float32)[:, None, None]
    basis = components.fit([maps], 2, foreground=True)
    scores = components.project(maps, basis)
    inside = np.zeros((6, 5), bool)
    inside[2:4, 1:4] = True
    own = PCA(2, svd_solver="full").fit(maps[:, inside].T.astype(np.float64))

    assert (np.isfinite(scores) == inside).all()
    assert gap(basis.shares, own.explained_variance_ratio_) <= FLOOR


@pytest.mark.parametrize("function", [lambda maps: components.fit([maps], 3), lambda maps: factorise(maps, 3)])
@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (np.full((4, 3, 3), 0.1, np.float32), "equal features"),
        (np.ones((4, 1, 1), np.float32), "equal features"),
        (np.full((4, 3, 3), np.nan, np.float32), "not finite"),
    ],
)
def test_features_that_cannot_be_decomposed_are_refused(function, maps, words):
    with pytest.raises(FailedPrecondition, match=words):
        function(maps)


def test_features_of_few_channels_have_fewer_components_and_factors():
    maps = features(4, channels=2)

    assert components.fit([maps], 9).vectors.shape == (2, 2)
    assert factorise(maps, 9).maps.shape == (2, 6, 5)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_factors_equal_those_of_pytorch_grad_cam():
    maps = features(5)
    (concepts, truth), (_, plain) = (dff(maps[None].astype(dtype), 4) for dtype in (np.float64, np.float32))
    vectors = concepts - maps.reshape(len(maps), -1).min(1)[:, None]
    sums = vectors.sum(0) * truth[0].sum((1, 2))
    order = np.argsort(-sums)
    found = factorise(maps, 4)

    assert gap(found.maps, truth[0][order]) <= FACTOR * gap(plain[0], truth[0]) + FLOOR
    assert gap(found.vectors, vectors.T[order]) <= FACTOR * gap(plain[0], truth[0]) + FLOOR
    assert gap(found.shares, sums[order] / sums.sum()) <= FACTOR * gap(plain[0], truth[0]) + FLOOR
