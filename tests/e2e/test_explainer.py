"""`Explainer`: explanations in the caller's process, without a socket and without changes of the network."""

import copy
import gc
import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2

import camserve
import camserve_server
import fork_server
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError
from camserve_server.models import Preprocess, Source
from camserve_server.models.source import IMAGENET_MEAN, IMAGENET_STD
from methods.tools import error_ratio, noise
from networks import changes, gradcam, state_of, trained
from support import PHOTOS

LABELS = tuple("abcde")
WHOLE = {"size": 64, "crop": "whole", "labels": LABELS}


@pytest.fixture
def network():
    return trained()


@pytest.fixture
def photo():
    return noise(1, 64)


def normalised(photo):
    """Return the input [3,H,W] of a photo that has the network's input size."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (torch.from_numpy(photo.copy()).permute(2, 0, 1) / 255 - mean) / std


def heatmap(explainer, image, **options):
    (explanation,) = explainer.explain(image, targets=3, overlay=None, **options).explanations
    return explanation.heatmap


# --- results ---


def test_map_equals_the_servers_bit_for_bit_and_autograds(network, photo):
    pixels = torch.from_numpy(photo.copy()).permute(2, 0, 1)
    with Explainer(network, **WHOLE) as explainer:
        result_map = heatmap(explainer, photo)
    source = Source(network, Preprocess((64, 64), (64, 64), "bilinear", IMAGENET_MEAN, IMAGENET_STD), LABELS)
    with (
        camserve_server.running(models={"custom": source}, threads=torch.get_num_threads()) as address,
        camserve.Client(address) as client,
    ):
        served = heatmap(client, photo)

    assert np.array_equal(result_map, served)
    assert error_ratio(result_map, gradcam(network, pixels.float()), gradcam(network.double(), pixels.double())) <= 1


def test_network_is_unchanged_and_can_be_trained_on(network, photo):
    calls = []
    network.fc.register_forward_hook(lambda *_: calls.append(1))
    before, random = state_of(network), torch.get_rng_state()
    with Explainer(network, **WHOLE) as explainer:
        explainer.explain(photo, methods=["gradcam", "saliency", "layercam"])
        during = changes(before, state_of(network))
        explainer.evaluate(photo, methods="gradcam", metrics="randomisation")
    after = changes(before, state_of(network))
    same_chance = torch.equal(random, torch.get_rng_state())
    optimizer = torch.optim.SGD([parameter for parameter in network.parameters() if parameter.requires_grad], lr=0.1)
    network(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()

    assert (during, after, same_chance) == ([], [], True)
    assert "values" not in changes(before, state_of(network))
    assert changes(before, state_of(network))  # the training step changed it


def test_refresh_explains_the_weights_of_the_next_training_step(network, photo):
    with Explainer(network, **WHOLE) as explainer:
        first = heatmap(explainer, photo)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        explainer.refresh()
        second, (model,) = heatmap(explainer, photo), explainer.models()
    with Explainer(copy.deepcopy(network), **WHOLE) as explainer:
        expected = heatmap(explainer, photo)

    assert np.array_equal(second, expected)
    assert not np.array_equal(first, second)
    assert model.version == 2


def test_unfolded_parameters_are_shared(network):
    with Explainer(network, **WHOLE) as explainer:
        (engine,) = explainer._service._pipeline.repository._pool._workers
        (model,) = engine._models.values()
        addresses = {name: parameter.data_ptr() for name, parameter in model.module.named_parameters()}

    assert addresses == {name: parameter.data_ptr() for name, parameter in network.named_parameters()}


class Uncopyable(nn.Module):
    """Network that cannot be copied because it has a lock."""

    def __init__(self, network):
        super().__init__()
        self.network, self.lock, self.modes = network, threading.Lock(), []

    def forward(self, images):
        self.modes.append((self.training, self.network.training, self.network.fc.weight.requires_grad))
        return self.network(images)


def test_network_that_cannot_be_copied_is_run_itself_and_restored(network, photo):
    single = Uncopyable(network)
    before = state_of(single)
    pixels = torch.from_numpy(photo.copy()).permute(2, 0, 1)
    with Explainer(single, **WHOLE) as explainer:
        loaded = changes(before, state_of(single))
        result_map = heatmap(explainer, photo, layers="network.layer4")

    assert (loaded, changes(before, state_of(single))) == ([], [])
    assert set(single.modes) == {(False, False, False)}
    assert error_ratio(result_map, gradcam(network, pixels.float()), gradcam(network.double(), pixels.double())) <= 1


@pytest.mark.slow
def test_network_in_half_precision_is_explained_in_float32(network, photo):
    half = copy.deepcopy(network).bfloat16()
    pixels = torch.from_numpy(photo.copy()).permute(2, 0, 1)
    rounded = copy.deepcopy(half).float()
    with Explainer(half, **WHOLE) as explainer:
        result_map = heatmap(explainer, photo)

    assert next(half.parameters()).dtype == torch.bfloat16
    assert error_ratio(result_map, gradcam(rounded, pixels.float()), gradcam(rounded.double(), pixels.double())) <= 1


def test_garbage_collected_explainer_frees_its_network(network):
    explainer = Explainer(network, **WHOLE)
    thread = explainer._service._thread
    del explainer
    gc.collect()
    thread.join()

    assert not thread.is_alive()


# --- inputs ---


def test_preprocessed_tensor_gives_the_map_of_its_photo(network, photo):
    with Explainer(network, **WHOLE) as explainer:
        of_photo, of_tensor = heatmap(explainer, photo), heatmap(explainer, normalised(photo))
        of_batch, of_array = heatmap(explainer, normalised(photo)[None]), heatmap(explainer, normalised(photo).numpy())
        result = explainer.explain(normalised(photo), overlay="png")
        shown = np.asarray(Image.open(io.BytesIO(explainer.file_of(normalised(photo)))))
        tiles = explainer.features(normalised(photo)).picture

    for other in (of_tensor, of_batch, of_array):
        assert np.abs(other - of_photo).max() <= 1e-5 * np.abs(of_photo).max()
    assert (result.photo.width, result.photo.height, result.photo.seen) == (64, 64, camserve.Box(0, 0, 64, 64))
    assert np.array_equal(shown, photo)
    assert tiles.width > 64


def test_photos_and_tensors_share_batches(network, photo):
    images = [photo, normalised(photo)] * 4
    with Explainer(network, **WHOLE) as explainer:
        alone = [heatmap(explainer, image) for image in images[:2]] * 4
        many = [result.explanations[0].heatmap for result in explainer.explain_many(images, targets=3, overlay=None)]

    for result_map, expected in zip(many, alone, strict=True):
        assert np.abs(result_map - expected).max() <= 1e-5 * np.abs(expected).max()


def test_transform_makes_the_input_of_a_pil_image(network):
    preset = ResNet18_Weights.IMAGENET1K_V1.transforms(crop_size=64, resize_size=73)
    inputs = []

    def transform(image):
        inputs.append(image)
        return preset(image)

    with Explainer(network, transform=transform, crop=64 / 73) as explainer, Image.open(PHOTOS["chelsea"]) as cat:
        result_map, result = heatmap(explainer, cat), explainer.explain(cat)
        expected = heatmap(explainer, preset(cat))
    with Explainer(network, size=64, crop=64 / 73) as explainer:
        usual = explainer.explain(PHOTOS["chelsea"])

    assert all(isinstance(image, Image.Image) for image in inputs)
    assert np.array_equal(result_map, expected)
    assert result.photo == usual.photo  # the part of the photo on which the map is drawn
    assert len(inputs) == 4  # the first two are trials of the constructor


@pytest.mark.slow
def test_transform_makes_the_input_of_an_array_if_it_takes_no_pil_image(network, photo):
    def transform(array):
        return normalised(np.ascontiguousarray(array[:64, :64]))  # a PIL image has no such slices

    with Explainer(network, transform=transform) as explainer:
        result_map, expected = heatmap(explainer, photo), heatmap(explainer, normalised(photo))
        assert explainer.explain(photo).photo.seen == camserve.Box(0, 0, 64, 64)

    assert np.array_equal(result_map, expected)


def test_transform_that_fails_later_fails_that_call_only(network, photo):
    def transform(image):
        if image.size == (64, 64):
            raise ValueError("too square")
        return v2.functional.resize(torch.zeros(3, 64, 64), [32 if image.size == (5, 5) else 64])

    with Explainer(network, transform=transform) as explainer:
        with pytest.raises(camserve.FailedPrecondition, match="the transform failed: ValueError: too square"):
            explainer.explain(photo)
        with pytest.raises(camserve.FailedPrecondition, match="made an input of 32 by 32 pixels, and the size is 64"):
            explainer.explain(photo[:5, :5])
        assert explainer.explain(photo[:, :50]).explanations


def test_output_picks_the_logits_of_what_the_network_returns(network, photo):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, images):
            return {"features": images.mean(), "prediction": {"scores": self.network(images)}}

    nested = Nested()
    with Explainer(nested, output=lambda outputs: outputs["prediction"]["scores"], **WHOLE) as explainer:
        result_map = heatmap(explainer, photo, layers="network.layer4")
    with Explainer(network, **WHOLE) as explainer:
        expected = heatmap(explainer, photo)

    assert np.array_equal(result_map, expected)
    assert type(nested) is Nested


# --- methods of a client ---


def test_explainer_does_what_a_client_does(network, photo):
    progress = []
    with Explainer(network, **WHOLE) as explainer:
        result = explainer.explain(
            photo, methods=("rise", {"samples": 20}), on_progress=lambda *rows: progress.append(rows)
        )
        errors = list(explainer.explain_many([photo, b"rubbish"], on_error="return"))
        receipt = explainer.explain(normalised(photo)).explanations[0].receipt
        replayed = explainer.replay(receipt, normalised(photo))
        names = [method.name for method in explainer.methods()], [layer.name for layer in explainer.layers()]
        inspected = explainer.inspect(photo)

    assert progress[-1] == (21, 21)
    assert result.predictions[0].label in LABELS
    assert isinstance(errors[1], camserve.InvalidArgument)
    assert replayed.same
    assert "gradcam" in names[0]
    assert "layer4" in names[1]
    assert len(inspected.layers) == len(names[1])


def test_explainer_raises_the_clients_errors(network, photo):
    with Explainer(network, **WHOLE) as explainer:
        with pytest.raises(camserve.NotFound, match=r'unknown layer "layer5".*did you mean "layer') as missing:
            explainer.explain(photo, layers="layer5")
        too_short = {"timeout": 0.01}  # real timeout: it has to expire, as 8000 rows take longer
        with pytest.raises(camserve.DeadlineExceeded):
            explainer.explain(photo, methods=("rise", {"samples": 8000}), **too_short)
        with pytest.raises(camserve.InvalidArgument, match="32 by 32 pixels, and the network takes 64 by 64"):
            explainer.explain(torch.zeros(3, 32, 32))
        with pytest.raises(camserve.InvalidArgument, match="the input has 1 channel, and the network takes 3"):
            explainer.explain(torch.zeros(1, 64, 64))
        with pytest.raises(camserve.FailedPrecondition, match="admin"):
            explainer.unload_model("ResNet")
    with pytest.raises(camserve.FailedPrecondition, match="the client is closed"):
        explainer.explain(photo)

    assert missing.value.fields.keys() == {"layers[0]"}


def test_model_spec_is_explained_without_a_network(photo):
    with Explainer("timm:test_resnet?weights=none&size=64") as explainer:
        result = explainer.explain(photo)
        with pytest.raises(camserve.InvalidArgument, match="takes photos, not tensors"):
            explainer.explain(normalised(photo))

    assert result.model == "test_resnet"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["a", "b"]}, "2 labels for 5 classes"),
        ({"sise": 64}, 'unknown option "sise" \\(did you mean "size"\\?\\)'),
        ({"size": 0}, "at least one pixel"),
        ({"crop": 2}, "crop=2: it is above 0 and up to 1"),
        ({"crop": "center"}, "crop='center': it is above 0"),
        ({"mean": (0.5,), "std": (0.5,) * 3}, "mean is for 1 channel, and std for 3 channels"),
        ({"transform": lambda _: 3}, "the transform fails with a PIL image \\(ValueError: .* is not an input"),
        ({"transform": lambda _: torch.zeros(3, 8, 8), "size": 64}, "makes inputs of 8 by 8 pixels, and size=64"),
        ({"output": lambda outputs: outputs.nothing}, "nothing"),
        ({"settings": {"isolation": "process"}}, "can only be served in this process"),
    ],
)
def test_network_with_an_invalid_description_is_refused(network, options, message):
    with pytest.raises(ConfigError, match=message):
        Explainer(network, **options)


def test_spec_with_network_options_and_non_networks_are_refused():
    with pytest.raises(ConfigError, match="size: only for a network"):
        Explainer("timm:resnet18?weights=none", size=64)
    with pytest.raises(ConfigError, match=r"is of type int: give a torch\.nn\.Module"):
        Explainer(3)


# --- the process ---

ALONE = """
import os, signal, sys

events = []
RECORDED = ("socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec")
import numpy as np, torch, torchvision, timm, grpc, camserve  # with the processes of their imports
{gone}
sys.addaudithook(lambda event, _args: events.append(event) if event in RECORDED else None)
from camserve_server import Explainer

network = timm.create_model("test_resnet", num_classes=5)
with Explainer(network, size=64) as explainer:
    result = explainer.explain(np.zeros((64, 64, 3), np.uint8), methods=["gradcam"])
    list(explainer.explain_many([torch.zeros(3, 64, 64)] * 3))
print(result.explanations[0].heatmap.shape, events)
"""
WINDOWS = """
for name in [name for name in sys.modules if name.partition(".")[0] in ("camserve", "camserve_server")]:
    del sys.modules[name]
for module in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog"):
    sys.modules[module] = None
for owner, names in (
    (os, "fork forkpty register_at_fork sched_getaffinity getloadavg sysconf O_NOFOLLOW getuid"),
    (signal, "SIGKILL SIGHUP SIGQUIT SIGSTOP pthread_sigmask"),
):
    for name in names.split():
        delattr(owner, name)
os.process_cpu_count = os.cpu_count  # of Python 3.13, which has other ways without sched_getaffinity
"""


def test_explainer_opens_no_port_and_starts_no_process():
    result = fork_server.run(ALONE.format(gone=""))

    assert result.stderr == ""
    assert result.stdout == "(2, 2) []\n"


@pytest.mark.slow
def test_explainer_does_the_same_without_what_windows_lacks():
    """In a process that imports the package again, after these modules and functions are gone."""
    result = fork_server.run(ALONE.format(gone=WINDOWS))

    assert result.stderr == ""
    assert result.stdout == "(2, 2) []\n"


LEFT_OPEN = """
import numpy as np, timm
from camserve_server import Explainer

explainer = Explainer(timm.create_model("test_resnet", num_classes=5), size=64)
print(explainer.explain(np.zeros((64, 64, 3), np.uint8)).explanations[0].heatmap.shape)
"""


@pytest.mark.slow
def test_program_ends_silently_with_an_explainer_left_open():
    result = fork_server.run(LEFT_OPEN)

    assert (result.returncode, result.stdout, result.stderr) == (0, "(2, 2)\n", "")
