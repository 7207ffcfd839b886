"""Networks as people write them are explained as the plain network that computes the same, to the bit."""

import re
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint

import as_written
import camserve
import camserve_server
from as_written import MAKERS, SIZE, lenet, plain
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError
from camserve_server.models import recomputation
from camserve_server.models.source import names_of
from methods.tools import doubled, error_ratio
from models.lazy_folders import marked_except
from networks import changes, state_of

OPTIONS = {"size": SIZE, "crop": "whole", "mean": (0.5,) * 3, "std": (0.25,) * 3}
IMAGE = np.random.default_rng(5).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def offered(explainer):
    """Return the names of the methods that a model offers."""
    names = []
    for method in explainer.methods():
        with suppress(camserve.FailedPrecondition):
            explainer.explain(IMAGE, methods=method.name, overlay=None)
            names.append(method.name)
    return names


def maps(client, methods, **options):
    """Return what a model says of the image: the layers and maps of methods, and the predictions."""
    found = {}
    for some in batched(methods):
        result = client.explain(IMAGE, methods=some, targets=[1, 3], overlay=None, heatmap=True, **options)
        found |= {(each.method, each.target.class_index, each.layer): each.heatmap for each in result.explanations}
    return found, [(each.class_index, each.probability) for each in result.predictions]


def batched(methods, most=16):
    """Divide methods among requests."""
    return [methods[start : start + most] for start in range(0, len(methods), most)]


def check_equal(found, expected):
    (maps_found, predictions_found), (maps_expected, predictions_expected) = found, expected
    assert maps_found.keys() == maps_expected.keys()
    assert predictions_found == predictions_expected
    differing = [key for key, value in maps_expected.items() if not np.array_equal(maps_found[key], value)]
    assert differing == []


@pytest.fixture(scope="module")
def expected():
    """The methods of the plain network, and what it says of the image."""
    with Explainer(plain(), accelerate=False, **OPTIONS) as explainer:
        methods = offered(explainer)
        return methods, maps(explainer, methods)


ALIKE = {"checkpointing_of_everything", "dictionary_of_one", "logits_in_a_dataclass", "replaced_forward_of_a_layer"}
"""Networks much like others."""
SOME = ["gradcam", "saliency", "guided_backprop", "occlusion"]
"""Methods of four kinds."""


def check_network(name, methods, expected):
    """Check that methods explain a network as the plain one, and that the network stays as it is."""
    network, (maps_expected, predictions) = MAKERS[name](), expected[1]
    before = state_of(network)
    with Explainer(network, accelerate=False, **OPTIONS) as explainer:
        among = {key: value for key, value in maps_expected.items() if key[0] in methods}
        check_equal(maps(explainer, methods), (among, predictions))

    assert changes(before, state_of(network)) == []


@pytest.mark.parametrize("name", marked_except(pytest.mark.slow, ["checkpointing"], MAKERS))
def test_network_is_explained_as_the_plain_one_by_every_method(name, expected):
    check_network(name, expected[0], expected)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - ALIKE - {"checkpointing"}))
def test_network_is_explained_as_the_plain_one(name, expected):
    check_network(name, SOME, expected)


@pytest.mark.parametrize("name", MAKERS)
def test_accelerated_network_is_explained_rightly(name):
    with Explainer(MAKERS[name](), **OPTIONS) as explainer:
        (found,) = explainer.explain(IMAGE, targets=3, overlay=None).explanations
    reference, truth = (gradcam(network, network.body) for network in (plain(), doubled(plain())))

    assert found.layer == "body"
    assert error_ratio(found.heatmap, reference, truth) <= 1


def test_networks_are_served_as_the_plain_one(expected):
    specs = [f"{name}=as_written:{name}?accelerate=false" for name in MAKERS]
    methods = ["gradcam", "guided_backprop", "saliency"]
    maps_of_methods = {key: value for key, value in expected[1][0].items() if key[0] in methods}
    with camserve_server.running(specs) as address, camserve.Client(address) as client:
        for name in MAKERS:
            check_equal(maps(client, methods, model=name), (maps_of_methods, expected[1][1]))


def as_input(network):
    """Return the image as a network's input that requires a gradient."""
    dtype = next(network.parameters()).dtype
    return ((torch.from_numpy(IMAGE).to(dtype) / 255 - 0.5) / 0.25).permute(2, 0, 1)[None].requires_grad_()


def gradcam(network, layer):
    """Return Grad-CAM of class 3 by autograd, as the expected value."""
    outputs = []
    with layer.register_forward_hook(lambda _module, _args, output: outputs.append(output)):
        score = network(as_input(network))[0, 3]
    (gradient,) = torch.autograd.grad(score, outputs)
    return (gradient.mean((2, 3), keepdim=True) * outputs[0]).sum(1)[0].detach().numpy()


def saliency(network):
    """Return the gradient of class 3 at the image, as the expected value."""
    image = as_input(network)
    return torch.autograd.grad(network(image)[0, 3], image)[0][0].abs().amax(0).numpy()


@pytest.mark.parametrize("method", ["gradcam", "saliency"])
def test_network_that_needs_contiguous_images_is_explained_rightly(method):
    with Explainer(lenet(), **OPTIONS) as explainer:
        (found,) = explainer.explain(IMAGE, methods=method, targets=3, layers="conv2", overlay=None).explanations
    networks = lenet(), doubled(lenet())
    reference, truth = (gradcam(each, each.conv2) if method == "gradcam" else saliency(each) for each in networks)

    assert error_ratio(found.heatmap, reference, truth) <= 1


@pytest.mark.slow
def test_every_method_explains_a_network_that_needs_contiguous_images():
    with Explainer(lenet(as_written.ReshapingLeNet), accelerate=False, **OPTIONS) as explainer:
        methods = offered(explainer)
        expected = maps(explainer, methods)
    with Explainer(lenet(), accelerate=False, **OPTIONS) as explainer:
        check_equal(maps(explainer, methods), expected)
    with Explainer(lenet(), **OPTIONS) as explainer:
        assert maps(explainer, methods)[0].keys() == expected[0].keys()


@pytest.mark.parametrize("task", ["binary", "regress"])
def test_one_number_for_each_image_may_lack_an_axis(task):
    found = []
    for shape in ((-1,), (-1, 1)):
        network = nn.Sequential(plain(1), as_written.Reshape(shape))
        with Explainer(network, task=task, **OPTIONS) as explainer:
            results = explainer.explain_many([IMAGE, IMAGE[::-1]], methods=["gradcam", "rise"], overlay=None)
            found.append([(each.score, each.heatmap) for result in results for each in result.explanations])

    for squeezed, whole in zip(*found, strict=True):
        assert squeezed[0] == whole[0]
        assert np.array_equal(squeezed[1], whole[1])


def segmenter(*after):
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1), *after)


def test_logits_of_every_pixel_are_segmentation():
    with Explainer(segmenter(), **OPTIONS) as explainer:
        assert explainer.model().task == "segment"


def test_features_of_a_backbone_are_not_segmentation():
    with pytest.raises(ConfigError, match=r"a tensor \[1, 4, 4, 4\], .*; task=segment explains classes of places"):
        Explainer(segmenter(nn.AvgPool2d(8)), **OPTIONS)


LABELS = ("cat", "dog", "cow", "owl", "ant")


@pytest.mark.parametrize(
    "labels",
    [
        list(LABELS),
        dict(enumerate(LABELS)),
        {str(index): label for index, label in reversed([*enumerate(LABELS)])},
        {label: index for index, label in enumerate(LABELS)},
        np.array(LABELS),
        iter(LABELS),
    ],
    ids=["list", "id2label", "id2label of a JSON file", "class_to_idx", "array", "iterator"],
)
def test_labels_are_given_as_libraries_have_them(labels):
    with Explainer(plain(), labels=labels, **OPTIONS) as explainer:
        assert explainer.model().labels == LABELS


@pytest.mark.parametrize("labels", [[3, 1, 4], np.array([3, 1, 4]), torch.tensor([3, 1, 4]), {0: 3, 1: 1, 2: 4}])
def test_numbers_are_labels(labels):
    assert names_of(labels) == ("3", "1", "4")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("cat", "labels='cat' is a single text: give one label for each class"),
        (5, "labels=5 is a int: give one label for each class"),
        ({1: "cat", 2: "dog"}, "labels is a mapping of 2: its keys must be the indices 0 to 1"),
    ],
)
def test_what_are_no_labels_is_refused(labels, words):
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        Explainer(plain(), labels=labels, **OPTIONS)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, values):
        self.calls += 1
        return values.exp()


def calls_in_training(**options):
    """Return how often a checkpointed module runs in a forward and a backward pass."""
    module = Counting()
    checkpoint.checkpoint(module, torch.ones(2, requires_grad=True), **options).sum().backward()
    return module.calls


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_goes_on_in_other_threads(reentrant):
    calls = {}

    def train(key):
        calls[key] = calls_in_training(use_reentrant=reentrant)

    with recomputation.disabled(), recomputation.disabled():
        train("here")
        thread = threading.Thread(target=train, args=["in another thread"])
        thread.start()
        thread.join()
    train("afterwards")

    assert calls == {"here": 1, "in another thread": 2, "afterwards": 2}


def test_error_of_a_checkpointed_module_is_its_own():
    def fail(_values):
        raise KeyError("mine")

    with recomputation.disabled(), pytest.raises(KeyError, match="mine"):
        checkpoint.checkpoint(fail, torch.ones(2), use_reentrant=False)


class Staged(nn.Module):
    """A network with timm's switch: with checkpointing, the stage is not called, but its parts."""

    def __init__(self):
        super().__init__()
        self.stage = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 3)
        self.is_on = True

    def set_grad_checkpointing(self, enable=True):
        self.is_on = enable

    def forward(self, image):
        if self.is_on:
            for part in self.stage:
                image = checkpoint.checkpoint(part, image, use_reentrant=False)
            return self.head(image.mean((2, 3)))
        return self.head(self.stage(image).mean((2, 3)))


def test_checkpointing_is_switched_off_in_the_copy_alone():
    network = nn.Sequential(Staged()).eval()
    with Explainer(network, **OPTIONS) as explainer:
        assert explainer.model().default_layer == "0.stage"

    assert network[0].is_on


def test_running_refuses_a_network_whose_copy_runs_the_network():
    with (
        pytest.raises(ConfigError, match="cannot be copied: the copy of its module stem"),
        camserve_server.running({"net": as_written.with_replaced_forward()}),
    ):
        pass


@pytest.mark.parametrize(
    ("targets", "classes"),
    [
        (torch.tensor(3), [3]),
        (np.int64(3), [3]),
        (np.array(3), [3]),
        ([torch.tensor(3), np.uint8(1)], [3, 1]),
        (torch.tensor([3, 1]), [3, 1]),
        (np.array([3, 1]), [3, 1]),
    ],
)
def test_classes_are_numbers_of_torch_and_numpy(targets, classes):
    with Explainer(plain(), **OPTIONS) as explainer:
        found = explainer.explain(IMAGE, targets=targets, overlay=None).explanations

    assert [each.target.class_index for each in found] == classes


def test_layers_are_modules_of_the_network():
    network = plain()
    network.body = nn.DataParallel(network.body)
    first, second = network.stem[0], network.body.module[0]
    with Explainer(network, **OPTIONS) as explainer:
        layers = [explanation.layer for explanation in explainer.explain(IMAGE, layers=[first, second]).explanations]
        (streamed,) = explainer.explain_many([{"image": IMAGE, "layers": network.stem}])
        assert explainer.features(IMAGE, layer=first).layer == "stem.0"
        assert [layer.name for layer in explainer.inspect(IMAGE, layers=[second, "stem"]).layers] == ["body.0", "stem"]
        assert explainer.estimate_cost(layers=[first, second]).explanations == 2
        for stranger in (nn.ReLU(), network):
            with pytest.raises(camserve.InvalidArgument, match=f"this {type(stranger).__name__} is no module inside"):
                explainer.explain(IMAGE, layers=[stranger])

    assert layers == ["stem.0", "body.0"]
    assert streamed.explanations[0].layer == "stem"


def test_photo_of_a_phone_is_explained():
    photo = np.broadcast_to(IMAGE[:1, :1], (4000, 6000, 3))
    with Explainer(plain(), **OPTIONS) as explainer:
        assert explainer.explain(photo, overlay=None).photo.width == 6000


def test_modules_in_a_plain_list_are_layers_in_evaluation_mode(caplog):
    network = as_written.in_a_list()
    before = state_of(network.parts[0])
    with Explainer(network, **OPTIONS) as explainer:
        (found,) = explainer.explain(IMAGE, targets=3, overlay=None).explanations
    reference, truth = (gradcam(each, each.body) for each in (plain(), doubled(plain())))

    assert found.layer == "parts.1"
    assert error_ratio(found.heatmap, reference, truth) <= 1
    assert changes(before, state_of(network.parts[0])) == []
    assert isinstance(network.parts, list)
    assert "keeps modules where eval() does not reach them, such as in a plain list: parts" in caplog.text


class Transposed(as_written.Plain):
    def forward(self, image):
        return super().forward(image).t()


def test_output_without_a_row_for_each_image_is_refused():
    words = r"its output for one image is \[5, 1\]: the axis of the batch comes first, as in \[batch, classes\]"
    with pytest.raises(ConfigError, match=words):
        Explainer(as_written.changed(Transposed), **OPTIONS)


class Part(torch.Tensor):
    """A part of a tensor, as those of torch.distributed."""

    def full_tensor(self):
        raise AssertionError("communicates with other processes")


def test_network_distributed_among_processes_is_refused_with_the_way_out():
    network = plain()
    network.head.weight = nn.Parameter(network.head.weight.detach().as_subclass(Part))
    words = "its parameter head.weight is a Part, which is distributed among processes: load its full state dict"
    with pytest.raises(ConfigError, match=words):
        Explainer(network, **OPTIONS)


def test_average_of_a_training_is_explained(expected):
    with Explainer(AveragedModel(plain()), accelerate=False, **OPTIONS) as explainer:
        assert explainer.model().default_layer == "module.body"
        (found,) = explainer.explain(IMAGE, targets=3, overlay=None).explanations

    assert np.array_equal(found.heatmap, expected[1][0]["gradcam", 3, "body"])


def test_image_of_a_similarity_may_be_an_input():
    other = as_input(plain()).detach()[0].flip(2)
    with Explainer(plain(), task="embed", **OPTIONS) as explainer:
        files = other, other.numpy(), explainer.file_of(other)
        similar = [camserve.similarity(file) for file in files]
        scores = [found.score for found in explainer.explain(IMAGE, targets=similar, overlay=None).explanations]
        (streamed,) = explainer.explain_many([{"image": IMAGE, "targets": similar[0]}])
    with torch.no_grad():
        expected = torch.cosine_similarity(plain()(as_input(plain())), plain()(other[None]))

    assert scores == [pytest.approx(expected.item(), abs=1e-5)] * 3
    assert streamed.explanations[0].score == scores[0]
