"""Models that compare images with texts, on a whole server: over gRPC, HTTP, the command line and in process."""

import base64
import io
import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import camserve
import coloured
from camserve import cli
from camserve_server import Explainer
from coloured import painted
from http_calls import EXPLAIN, post
from methods.tools import gap
from support import serving

PLACES = {"red": (6, 34, 22), "green": (32, 8, 22)}
TEXTS = ("a red square", "a green square", "a blue square")
SPECS = ("named=coloured:named?size=64", "entry=coloured:named?size=64&labels={labels}")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    labels = tmp_path_factory.mktemp("labels") / "texts.txt"
    labels.write_text("something green\nsomething red\n")
    specs = tuple(spec.format(labels=labels) for spec in SPECS)
    with serving(models=specs, threads=1, http_address="0") as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, retries=0, timeout=60) as opened:
        yield opened


def png(**squares):
    out = io.BytesIO()
    Image.fromarray(painted(64, **squares)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def photo():
    return png(**PLACES)


def share_inside(explanation, place):
    """Return the share of the hottest tenth of a map that is inside a square of the photo."""
    top, left, side = place
    heat = np.nan_to_num(explanation.heatmap_on_image, nan=-np.inf)
    hot = heat >= np.quantile(heat[np.isfinite(heat)], 0.9)
    return hot[top : top + side, left : left + side].sum() / hot.sum()


@pytest.mark.parametrize("colour", PLACES)
@pytest.mark.parametrize("method", ["gradcam", "layercam", "occlusion", "saliency"])
def test_map_of_a_text_is_hot_where_the_image_shows_it(client, photo, colour, method):
    target = camserve.text(f"a {colour} square")
    (explanation,) = client.explain(photo, model="named", targets=[target], methods=[method]).explanations

    assert explanation.target.label == f"a {colour} square"
    assert share_inside(explanation, PLACES[colour]) >= 0.8


def test_texts_are_the_predictions_and_classes_of_a_request(client, photo):
    targets = ["a red square", 1, camserve.contrast(TEXTS[0], TEXTS[1]), camserve.probability(TEXTS[0])]
    result = client.explain(photo, model="named", texts=TEXTS, targets=targets)
    red, green, contrast, probability = result.explanations

    assert {prediction.label for prediction in result.predictions} == set(TEXTS)
    assert sum(prediction.probability for prediction in result.predictions) == pytest.approx(1)
    assert (red.target.label, green.target.label, contrast.contrast.label) == (TEXTS[0], TEXTS[1], TEXTS[1])
    assert contrast.score == pytest.approx(red.score - green.score, abs=1e-5)
    assert 0 < probability.score < 1
    assert share_inside(contrast, PLACES["red"]) >= 0.8


def test_labels_of_a_models_entry_are_its_texts(client, photo):
    model = client.model("entry")
    default = client.explain(photo, model="entry", top_k=2)
    other = client.explain(photo, model="entry", texts=["red", "blue"])

    assert (model.task, model.labels, model.accepts_texts) == ("classify", ("something green", "something red"), True)
    assert client.model("named").task == "embed"
    assert {prediction.label for prediction in default.predictions} == {"something green", "something red"}
    assert len(default.explanations) == 2
    assert other.predictions[0].label == "red"


def test_texts_of_several_requests_do_not_disturb_each_other(client):
    items = [{"image": png(**PLACES), "texts": TEXTS[:count], "model": "named"} for count in (1, 2, 3)] * 4
    results = list(client.explain_many(items, targets=[camserve.text("red")], methods=["gradcam"]))
    scores = [{p.label: p.score for p in result.predictions} for result in results]

    assert [len(result.predictions) for result in results] == [1, 2, 3] * 4
    assert all(score[TEXTS[0]] == pytest.approx(scores[0][TEXTS[0]]) for score in scores)
    assert all(gap(result.explanations[0].heatmap, results[0].explanations[0].heatmap) < 1e-5 for result in results)


@pytest.mark.parametrize(
    "target", [camserve.text("red"), TEXTS[1], camserve.contrast(TEXTS[0], TEXTS[2]), camserve.finer(TEXTS[0])]
)
def test_receipt_of_a_text_is_replayed(client, photo, tmp_path, target):
    (explanation,) = client.explain(photo, model="named", texts=TEXTS, targets=[target]).explanations
    path = explanation.receipt.save(tmp_path / "receipt.json")
    receipt = camserve.Receipt.load(path)

    assert receipt.texts == TEXTS
    assert client.replay(receipt, photo).same


def test_metrics_and_smoothing_work_on_texts(client, photo):
    method = camserve.Method("gradcam", augmentation_smoothing=True)
    evaluation = client.evaluate(
        photo, model="named", texts=TEXTS, targets=[TEXTS[0], camserve.text("red")], methods=[method]
    )
    curves = [reading.curves[0].y for reading in evaluation.readings]

    assert len(evaluation.readings) == 4
    assert all(np.isfinite(reading.value) for reading in evaluation.readings)
    assert all(0 <= value <= 1 for value in curves[0])


def test_layers_and_channels_are_measured_for_a_text(client, photo):
    by_text = client.inspect(photo, model="named", target=camserve.text(TEXTS[0]))
    by_class = client.inspect(photo, model="named", target=TEXTS[0], texts=TEXTS)
    features = client.features(photo, model="named", target=camserve.text("red"), rank="gradient")

    assert by_text.score == pytest.approx(by_class.score)
    assert by_text.target.label == by_class.target.label == TEXTS[0]
    assert features.channels[0].gradient_weight > 0


def test_http_takes_texts_as_json(served, photo):
    body = {
        "model": "named", "image": base64.b64encode(photo).decode(), "texts": TEXTS, "targets": [{"text": "red"}]
    }  # fmt: skip
    reply = post(served.http_port, EXPLAIN, body).json

    assert reply["explanations"][0]["resolvedTarget"] == {"text": "red"}
    assert {prediction["label"] for prediction in reply["predictions"]} == set(TEXTS)


def test_command_line_takes_texts(served, photo, tmp_path):
    (tmp_path / "squares.png").write_bytes(photo)
    arguments = ["explain", str(tmp_path / "squares.png"), "-o", str(tmp_path / "out"), "--model", "named"]
    texts = [part for text in TEXTS for part in ("--text", text)]
    targets = ["--target", "text: a red thing", "--target", f"{TEXTS[0]} vs {TEXTS[1]}"]
    done = CliRunner().invoke(cli.main, [*arguments, *texts, *targets, "--server", served.address])
    scores = CliRunner().invoke(
        cli.main,
        ["evaluate", str(tmp_path / "squares.png"), "--model", "named", *texts, "--json", "--server", served.address],
    )

    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "squares.gradcam.a_red_square-not-a_green_square.jpg", "squares.gradcam.a_red_thing.jpg"
    ]  # fmt: skip
    assert json.loads(scores.stdout)


def test_network_of_this_process_takes_texts(photo):
    source = coloured.named()
    with Explainer(source.module, size=64, crop="whole", text=source.text) as explainer:
        result = explainer.explain(photo, texts=TEXTS, targets=[camserve.text("red"), TEXTS[1]])

    assert result.predictions[0].label in TEXTS[:2]
    assert share_inside(result.explanations[0], PLACES["red"]) >= 0.8


def test_wrong_texts_are_refused_with_the_field(client, photo):
    for options, field in (
        ({"texts": ["a"] * 2}, "texts[1]"),
        ({"texts": ["a" * 1001]}, "texts[0]"),
        ({"texts": [str(number) for number in range(1001)]}, "texts"),
        ({"targets": [camserve.text("a" * 1001)]}, "targets[0].text"),
        ({"texts": "red"}, "texts"),
        ({"texts": [1]}, "texts[0]"),
        ({"targets": [camserve.text(7)]}, "targets[0].text"),
        ({"texts": TEXTS, "targets": ["a yellow square"]}, "targets[0].label"),
        ({}, "targets"),
    ):
        with pytest.raises(camserve.CamserveError) as caught:
            client.explain(photo, model="named", **options)
        assert field in caught.value.fields, options
