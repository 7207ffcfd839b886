"""Replay of receipts: the explanation is reproduced, or the differences are reported."""

import json

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import camserve
import camserve_server
from camserve import cli
from support import PHOTOS

NET = "net=timm:test_resnet?size=64&weights={}"


@pytest.fixture(scope="module")
def address():
    with camserve_server.running(NET.format("none")) as address:
        yield address


@pytest.fixture
def client(address):
    with camserve.Client(address) as client:
        yield client


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """Server with other weights for a model of the same name and architecture."""
    path = tmp_path_factory.mktemp("weights") / "other.safetensors"
    torch.manual_seed(7)
    save_file(timm.create_model("test_resnet").state_dict(), path)
    with camserve_server.running(NET.format(path)) as address:
        yield address


def receipt_of(client, methods="gradcam", **options):
    (explanation,) = client.explain(PHOTOS["chelsea"], methods=methods, overlay=None, **options).explanations
    return camserve.Receipt.from_json(explanation.receipt.to_json())


def edit(receipt, **changes):
    return camserve.Receipt.from_json(json.dumps({**json.loads(receipt.to_json()), **changes}))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"targets": camserve.contrast(3, 4), "layers": "layer3"},
        {"targets": camserve.probability(3)},
        {"targets": camserve.finer(3)},
        {"methods": camserve.Method("layercam", augmentation_smoothing=True)},
        {"methods": camserve.Method("hirescam", eigen_smoothing=True)},
        {"methods": camserve.Method("smoothgrad", {"samples": 5, "seed": 11})},
        {"methods": camserve.Method("refinecam", augmentation_smoothing=True)},
        {"layers": ["layer3", "layer4"], "fusion": "max"},
        {"targets": camserve.similarity(PHOTOS["coffee"]), "layers": ["layer4"]},
        {"interventions": [camserve.silence("layer3", [1, 2]), camserve.clip_gradient("layer4", 0.01)]},
    ],
)
def test_receipt_is_replayed_byte_for_byte(client, options):
    receipt = receipt_of(client, **options)

    replay = client.replay(receipt, PHOTOS["chelsea"])

    assert replay.same, replay.differences
    assert replay.gap == 0
    assert [check.words for check in replay.checks if check.name == "map"] == ["byte for byte"]
    assert replay.explanation.receipt.to_json() == receipt.to_json()


def test_receipt_has_the_fused_layers(client):
    default = receipt_of(client, camserve.Method("refinecam", augmentation_smoothing=True))
    fused = receipt_of(client, layers=["layer3", "layer4"], fusion="max")
    plain = receipt_of(client, layers=["layer3"], fusion="max")

    assert (default.layers, default.fusion) == (("layer1", "layer3.0.act1", "layer3", "layer4"), "product")
    assert (fused.layers, fused.fusion) == (("layer3", "layer4"), "max")
    assert (plain.layers, plain.fusion) == (("layer3",), None)


def test_one_of_many_explanations_is_replayed_alone(client):
    many = client.explain(
        PHOTOS["chelsea"], methods=["gradcam", ("smoothgrad", {"samples": 3})], top_k=3, layers=["layer3", "layer4"]
    )

    replays = [client.replay(explanation.receipt, PHOTOS["chelsea"]) for explanation in many.explanations]

    assert len(replays) == 9
    assert [replay.differences for replay in replays] == [()] * 9
    assert all(replay.gap <= 1e-5 for replay in replays)


def test_other_photo_is_reported(client):
    replay = client.replay(receipt_of(client), PHOTOS["coffee"])

    assert not replay.same
    photo, pixels, score, heatmap = replay.differences
    assert photo.startswith("the photo differs (SHA-256 ")
    assert pixels.startswith("the pixels that the model saw differ")
    assert score.startswith("the score is ")
    assert heatmap.startswith("the map differs by ")
    assert replay.gap > 0.1


def test_other_weights_are_reported(client, other_weights):
    with camserve.Client(other_weights) as other:
        replay = other.replay(receipt_of(client), PHOTOS["chelsea"])

    weights, score, heatmap = replay.differences
    assert weights.startswith("the weights differ (SHA-256 ")
    assert (score[:10], heatmap[:15]) == ("the score ", "the map differs")


def test_other_parameter_is_reported_by_its_map(client):
    receipt = receipt_of(client, ("smoothgrad", {"samples": 5, "seed": 11}))
    changed = edit(receipt, parameters={**receipt.parameters, "seed": 12})

    replay = client.replay(changed, PHOTOS["chelsea"])

    assert [difference[:15] for difference in replay.differences] == ["the map differs"]
    assert 0.01 < replay.gap < 10


def test_other_version_is_reported_only_if_numbers_differ(client):
    receipt = edit(receipt_of(client), versions={"torch": "1.0", "camserve": "0.0"})

    replay = client.replay(receipt, PHOTOS["chelsea"])
    assert replay.same
    assert {check.name for check in replay.checks if not check.same} >= {"torch", "camserve"}

    replay = client.replay(edit(receipt, score=1e6), PHOTOS["chelsea"])
    assert replay.differences[0].endswith(", was 1e+06")
    assert f"torch is {torch.__version__.split('+')[0]}" in " ".join(replay.differences)


def test_receipt_without_a_map_is_compared_by_the_rest(client):
    receipt = receipt_of(client, heatmap=False)

    replay = client.replay(receipt, PHOTOS["chelsea"])

    assert receipt.heatmap_sha256 is None
    assert replay.same
    assert replay.gap is None
    assert "map" not in [check.name for check in replay.checks]


def test_invalid_receipt_raises_the_clients_errors(client):
    receipt = receipt_of(client, ("smoothgrad", {"samples": 5}))

    with pytest.raises(camserve.NotFound, match='unknown model "other": the server has net'):
        client.replay(edit(receipt, model="other"), PHOTOS["chelsea"])
    with pytest.raises(camserve.InvalidArgument, match="1 to 512, not 0"):
        client.replay(edit(receipt, parameters={"samples": 0}), PHOTOS["chelsea"])


def test_long_method_reports_progress(client):
    updates = []

    result = client.explain(
        PHOTOS["chelsea"],
        methods=("smoothgrad", {"samples": 66}),
        on_progress=lambda done, total: updates.append((done, total)),
    )

    assert result.explanations[0].heatmap.shape == (64, 64)
    assert updates[-1] == (67, 67)
    assert updates == sorted(set(updates))
    assert len(updates) >= 2


def test_intensity_map_has_the_size_of_the_picture(client):
    explanation = client.explain(PHOTOS["chelsea"], layers="layer2", intensity=True, profile="grad-cam").explanations[0]

    assert explanation.intensity.shape == (64, 64)
    assert (explanation.intensity.min(), explanation.intensity.max()) == (0, pytest.approx(1, abs=0.2))
    np.testing.assert_array_equal(explanation.heatmap.shape, (8, 8))


@pytest.fixture
def run(address, monkeypatch):
    monkeypatch.setenv("CAMSERVE_SERVER", address)
    return lambda *args: CliRunner().invoke(cli.main, [str(argument) for argument in args])


def test_commands_write_and_replay_a_receipt(run, tmp_path):
    result = run("explain", PHOTOS["chelsea"], "-o", tmp_path, "--method", "smoothgrad:samples=4,seed=3", "--receipts")
    assert result.exit_code == 0, result.output
    overlay, receipt = sorted(tmp_path.iterdir())
    assert receipt.name == f"{overlay.stem}.receipt.json"

    same = run("replay", receipt, PHOTOS["chelsea"])
    assert (same.exit_code, same.stderr) == (0, "")
    assert "byte for byte" in same.stdout

    other = run("replay", receipt, PHOTOS["coffee"])
    assert other.exit_code == 1
    assert "the photo differs" in other.stdout
    assert "the map differs" in other.stdout


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 3}', '{"format": "camserve receipt 1"}', "\0\xff"])
def test_invalid_receipt_file_is_reported_in_one_line(run, tmp_path, text):
    (tmp_path / "why.json").write_text(text)

    result = run("replay", tmp_path / "why.json", PHOTOS["chelsea"])

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "why.json: " in result.stderr
    assert result.stderr.count("\n") == 1
