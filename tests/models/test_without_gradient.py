"""Networks with no gradient, one in their last part alone, or no layer with a grid: they have what needs none."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import camserve
import camserve_server
from as_written import PREPROCESS, SIZE, Plain, changed, plain
from camserve_server import Explainer
from camserve_server.methods import METHODS
from camserve_server.models import Source
from methods.tools import doubled, error_ratio
from models.test_as_written import IMAGE, OPTIONS, as_input, check_equal, gradcam, maps, offered, saliency


class Runtime(Plain):
    """A network behind another runtime, which takes and returns arrays."""

    def forward(self, image):
        return torch.from_numpy(super().forward(image).detach().numpy())


class Arrays(Plain):
    """The same; an array cannot be made of a tensor on a graph."""

    def forward(self, image):
        return torch.from_numpy(super().forward(image).numpy())


class NoGrad(Plain):
    @torch.no_grad()
    def forward(self, image):
        return super().forward(image)


class InferenceMode(Plain):
    @torch.inference_mode()
    def forward(self, image):
        return super().forward(image)


class FrozenStem(Plain):
    """A backbone without gradients, as for the training of a head."""

    def features(self, image):
        with torch.no_grad():
            features = self.stem(image)
        return self.body(features)


def gradient_free(methods):
    return [name for name in methods if not METHODS[name].gradients]


SIGN_OF_GRADIENT = {"eigencam", "kpcacam"}
"""Methods whose maps have no sign of their own. It comes from the gradient, or else from the activations."""


@pytest.fixture(scope="module")
def expected():
    """The methods of the plain network that need no gradient, and what it says of the image."""
    with Explainer(plain(), accelerate=False, **OPTIONS) as explainer:
        methods = gradient_free(offered(explainer))
        return methods, maps(explainer, methods)


@pytest.mark.parametrize(
    "kind", [Runtime, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Arrays, NoGrad, InferenceMode))]
)
def test_network_without_gradient_has_the_maps_that_need_none(kind, expected):
    methods, (maps_expected, predictions) = expected
    assert {"occlusion", "rise", "lime", "scorecam", "ablationcam", "fem", *SIGN_OF_GRADIENT} <= {*methods}
    with Explainer(changed(kind), accelerate=False, **OPTIONS) as explainer:
        assert gradient_free(offered(explainer)) == offered(explainer) == methods
        found, predictions_found = maps(explainer, methods)
        assert all("CAM" in layer.kinds for layer in explainer.layers() if layer.explainable)
    for key in [key for key in found if key[0] in SIGN_OF_GRADIENT]:
        assert np.array_equal(np.abs(found.pop(key)), np.abs(maps_expected[key]))
    rest = {key: value for key, value in maps_expected.items() if key[0] not in SIGN_OF_GRADIENT}
    check_equal((found, predictions_found), (rest, predictions))


def test_methods_that_need_a_gradient_say_which_need_none():
    words = (
        r'gradcam needs the gradient at layer "body", and none flows back to it in Runtime; '
        r"methods that need none: fem, eigencam, kpcacam, occlusion"
    )
    with Explainer(changed(Runtime), **OPTIONS) as explainer:
        with pytest.raises(camserve.FailedPrecondition, match=words) as caught:
            explainer.explain(IMAGE)
        with pytest.raises(camserve.FailedPrecondition, match="saliency needs the gradient at the image, and none"):
            explainer.explain(IMAGE, methods="saliency")
        readings = explainer.inspect(IMAGE).layers
    assert list(caught.value.fields) == ["methods[0].name"]
    assert {reading.gradient.zeros for reading in readings} == {1.0}


def test_gradients_inside_the_head_are_those_of_the_whole_network():
    with Explainer(changed(FrozenStem), accelerate=False, **OPTIONS) as explainer:
        (found,) = explainer.explain(IMAGE, targets=3, overlay=None).explanations
        explainer.explain(IMAGE, methods="scorecam", layers="stem")
        with pytest.raises(camserve.FailedPrecondition, match='layer "stem", and none flows back'):
            explainer.explain(IMAGE, layers="stem")
        with pytest.raises(camserve.FailedPrecondition, match="gradient at the image"):
            explainer.explain(IMAGE, methods="guided_gradcam")
    reference, truth = (gradcam(network, network.body) for network in (plain(), doubled(plain())))

    assert found.layer == "body"
    assert error_ratio(found.heatmap, reference, truth) <= 1


class Spots(nn.Module):
    """A detector behind another runtime."""

    def __init__(self):
        super().__init__()
        self.grid = nn.Conv2d(3, 1, 8, 8)

    @torch.no_grad()
    def forward(self, images):
        scores, cells = self.grid(images).sigmoid().flatten(1).topk(2)
        corners = 8.0 * torch.stack([cells % 4, cells // 4], -1)
        boxes, labels = torch.cat([corners, corners + 8], -1), torch.ones_like(cells)
        return [
            dict(zip(("boxes", "labels", "scores"), parts, strict=True))
            for parts in zip(boxes, labels, scores, strict=True)
        ]


def test_detector_without_gradient_is_explained_by_drise():
    torch.manual_seed(2)
    network = Spots().eval()
    with Explainer(network, labels=("background", "spot"), **OPTIONS) as explainer:
        result = explainer.explain(IMAGE, methods=[("drise", {"samples": 200})], overlay=None)
    (_, scores), (explanation,) = _first_object(network), result.explanations
    row, column = np.unravel_index(explanation.heatmap.argmax(), explanation.heatmap.shape)
    box = explanation.target.box

    assert explanation.score == pytest.approx(scores)
    assert explanation.verdict == camserve.Verdict.OK
    assert explanation.heatmap[row, column] > 0
    assert box is not None


def _first_object(network):
    (found,) = network(as_input(network).detach())
    return found["boxes"][0], found["scores"][0].item()


class Classes(nn.Sequential):
    """The MNIST MLP: no layer has a grid."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 16), nn.ReLU(), nn.Linear(16, 5))


def mlp():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return Classes().eval()


def test_network_without_a_grid_has_the_methods_of_the_image():
    reference, truth = (saliency(network) for network in (mlp(), doubled(mlp())))
    source = Source(mlp(), PREPROCESS)
    with camserve_server.running({"mlp": source}) as address, camserve.Client(address) as client:
        assert client.model("mlp").default_layer == ""
        methods = ["saliency", "integrated_gradients", "occlusion", "rise", "lime"]
        result = client.explain(IMAGE, methods=methods, targets=3, overlay=None, heatmap=True)
        with pytest.raises(
            camserve.FailedPrecondition, match=r"gradcam needs a layer with a grid .*; methods that need"
        ):
            client.explain(IMAGE)
        with pytest.raises(camserve.FailedPrecondition, match=r'layer "1" cannot be explained: .*; mlp has none'):
            client.explain(IMAGE, layers="1")
        with pytest.raises(camserve.FailedPrecondition, match="mlp has no layer with a grid over the image"):
            client.features(IMAGE)

    assert error_ratio(result.explanations[0].heatmap, reference, truth) <= 1
    assert [each.method for each in result.explanations] == methods


def counter():
    """Return a network that counts bright things: its last ReLU is zero for dark images and noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        body = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
        network = nn.Sequential(*body, nn.ReLU()).eval()
        with torch.no_grad():
            noise, bright = (torch.rand(8, 3, SIZE, SIZE) * 2 - 1, torch.full((1, 3, SIZE, SIZE), 2.0))
            low, high = network[:5](noise).max(), network[:5](bright).mean()
            network[4].weight.mul_(4 / (high - low))
            network[4].bias.sub_(low).mul_(4 / (high - low)).sub_(1)
    return network


def test_image_decides_whether_a_last_relu_is_zero():
    bright = torch.full((3, SIZE, SIZE), 2.0)
    dark = torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(8)) * 2 - 1
    with Explainer(counter(), task="regress", accelerate=False, **OPTIONS) as explainer:
        results = [explainer.explain(image, methods=["gradcam", "saliency"]) for image in (bright, dark)]
    network, exact = counter(), doubled(counter())
    maps_of_truth = [_saliency_of(each, bright) for each in (network, exact)]

    assert error_ratio(results[0].explanations[1].heatmap, *maps_of_truth) <= 1
    assert results[0].explanations[0].layer == "1"
    assert {each.verdict for each in results[1].explanations} == {camserve.Verdict.ZERO_GRADIENT}


def _saliency_of(network, image):
    image = image.to(network[0].weight.dtype)[None].requires_grad_()
    return torch.autograd.grad(network(image).sum(), image)[0][0].abs().amax(0).numpy()


def test_network_whose_head_is_still_zero_is_explained_with_a_verdict():
    network = plain()
    nn.init.zeros_(network.head.weight)
    with Explainer(network, **OPTIONS) as explainer:
        result = explainer.explain(IMAGE, methods=["gradcam", "saliency", "fem"], targets=1)

    zero = camserve.Verdict.ZERO_GRADIENT
    assert [each.verdict for each in result.explanations] == [zero, zero, camserve.Verdict.OK]


@pytest.mark.filterwarnings("ignore")  # torch calls this way of quantising deprecated, in several places
def test_quantised_network_is_explained():
    network = torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}, torch.qint8)
    image = as_input(network.stem[0]).detach()
    with Explainer(network, **OPTIONS) as explainer:
        result = explainer.explain(IMAGE, methods=["scorecam", "occlusion"], targets=1)

    assert result.explanations[0].score == pytest.approx(network(image)[0, 1].item(), rel=1e-5)
    assert result.explanations[0].layer == "body"


def scripted(*names):
    network = plain()
    for name in names:
        setattr(network, name, torch.jit.script(getattr(network, name)))
    return network


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated
@pytest.mark.parametrize("names", [["stem"], ["body"], ["stem", "body", "head"]], ids="+".join)
def test_part_that_is_torchscript_is_a_layer_without_layers(names):
    network = scripted(*names)
    with Explainer(network, **OPTIONS) as explainer:
        layers = [layer.name for layer in explainer.layers()]
        result = explainer.explain(IMAGE, methods=["gradcam", "saliency", "occlusion"], targets=3, overlay=None)
        with pytest.raises(
            camserve.FailedPrecondition, match="guided_backprop needs to see every operation, and a part"
        ):
            explainer.explain(IMAGE, methods="guided_backprop")
    found = {each.method: each for each in result.explanations}
    reference, truth = plain(), doubled(plain())

    assert not {f"{name}.0" for name in names} & {*layers}
    assert {*names} <= {*layers}
    assert (found["gradcam"].layer, found["occlusion"].verdict) == ("body", camserve.Verdict.OK)
    maps_of_cam = (gradcam(each, each.body) for each in (reference, truth))
    assert error_ratio(found["gradcam"].heatmap, *maps_of_cam) <= 1
    assert error_ratio(found["saliency"].heatmap, saliency(reference), saliency(truth)) <= 1
    assert network.stem.training is False


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated
def test_copy_of_a_part_that_is_torchscript_is_explained():
    network = copy.deepcopy(scripted("stem"))
    assert not next(network.stem.parameters()).is_leaf  # torch changes no flags of these
    with Explainer(network, **OPTIONS) as explainer:
        (found,) = explainer.explain(IMAGE, targets=3, overlay=None).explanations
    reference, truth = plain(), doubled(plain())

    assert error_ratio(found.heatmap, *(gradcam(each, each.body) for each in (reference, truth))) <= 1


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated
def test_network_that_is_torchscript_has_the_methods_of_the_image():
    program = torch.jit.script(plain())
    reference, truth = plain(), doubled(plain())
    with Explainer(program, **OPTIONS) as explainer:
        assert (explainer.model().default_layer, explainer.layers()) == ("", ())
        (found,) = explainer.explain(IMAGE, methods="saliency", targets=3, overlay=None).explanations

    assert error_ratio(found.heatmap, saliency(reference), saliency(truth)) <= 1
