"""Metrics in the client: requests, responses, tables and plots."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import camserve
from camserve import cli
from camserve._codec.evaluation import decode_evaluation, evaluation_request
from camserve._show.plots import canvas, comparison
from camserve.v1 import evaluate_pb2, explain_pb2

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

THREE = ["gradcam", "layercam", "random"]
BOX = (10, 20.5, 30, 40)


async def test_every_argument_of_evaluate_is_sent(client: Any, server: Any) -> None:
    metrics = ["deletion", ("road", {"steps": 3}), camserve.Metric("max_sensitivity", {"noise": 0.5, "how": "x"})]

    await client.evaluate(b"\x01", metrics=metrics, box=BOX, methods=THREE, targets=["cat"], layers="features")

    (call,) = server.calls
    asked = call.request
    assert call.rpc == "Evaluate"
    assert asked.explain.image == b"\x01"
    assert [each.name for each in asked.explain.methods] == THREE
    assert [each.label for each in asked.explain.targets] == ["cat"]
    assert [each.name for each in asked.metrics] == ["deletion", "road", "max_sensitivity"]
    assert asked.metrics[1].parameters["steps"].number == 3
    assert asked.metrics[2].parameters["how"].text == "x"
    assert (asked.box.left, asked.box.top, asked.box.right, asked.box.bottom) == BOX


@pytest.mark.parametrize("metric", ["deletion", ("deletion", {"steps": 2}), camserve.Metric("deletion")])
def test_one_metric_needs_no_list(metric: Any) -> None:
    asked = evaluation_request(explain_pb2.ExplainRequest(), metric, camserve.Box(1, 2, 3, 4))

    assert [each.name for each in asked.metrics] == ["deletion"]
    assert asked.box.bottom == 4
    assert not evaluation_request(explain_pb2.ExplainRequest(), (), None).HasField("box")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": [7]}, "wrong kind"),
        ({"metrics": [("deletion", {"steps": [1]})]}, "metrics.steps: it must be a number or a string, not list"),
        ({"metrics": "deletion", "box": (1, 2, 3)}, r"a box must be \(left, top, right, bottom\), not \(1, 2, 3\)"),
        ({"metrics": "deletion", "box": ("a", 2, 3, 4)}, "a box must be"),
        ({"metrics": "deletion", "top_k": 99}, "top_k"),
    ],
)
async def test_invalid_evaluation_is_not_sent(client: Any, server: Any, options: Any, words: str) -> None:
    with pytest.raises(camserve.InvalidArgument, match=words):
        await client.evaluate(b"\x01", **options)

    assert not server.calls


async def test_evaluation_response_is_decoded(client: Any) -> None:
    result = await client.evaluate(b"\x01", metrics=["deletion", ("increase", {"a": 1, "b": "c"})], methods=THREE)

    assert [each.method for each in result.explained.explanations] == THREE
    assert [[each.metric for each in row] for row in result.rows] == [["deletion", "increase"]] * 3
    assert [each.explanation.method for each in result.readings[::2]] == THREE
    assert [row[0].value for row in result.rows[:2]] == [0.25, 0.5]
    assert result.readings[0].curves == (camserve.Curve("p", (0.0, 1.0), (0.75, 0.25)),)
    assert result.readings[1].parameters == {"a": 1.0, "b": "c"}
    assert math.isnan(result.readings[4].value)
    assert result.remarks() == (("random, deletion", "flat"), ("random, increase", "flat"))


async def test_error_of_evaluate_is_raised(client: Any, server: Any, refusal: Any) -> None:
    server.refusals = [refusal(grpc.StatusCode.NOT_FOUND, "no such metric", {"metrics[0].name": "none"})]

    with pytest.raises(camserve.NotFound) as caught:
        await client.evaluate(b"\x01", metrics="delation")

    assert caught.value.fields == {"metrics[0].name": "none"}


async def test_metrics_are_listed(client: Any) -> None:
    deletion, sensitivity = await client.metrics()

    assert (deletion.name, deletion.summary, deletion.rows, deletion.repeats) == ("deletion", "Deletes.", 20, False)
    assert deletion.parameters[0].default == 20.0
    assert (sensitivity.repeats, sensitivity.higher_is_better) == (True, True)


async def test_table_marks_the_best_of_each_metric(client: Any) -> None:
    result = await client.evaluate(b"\x01", metrics=["deletion", "increase"], methods=THREE)

    assert [line.split() for line in result.table().splitlines()] == [
        ["deletion", "↓", "increase", "↓"],
        ["gradcam", "0.250", "*", "0.250", "*"],
        ["layercam", "0.500", "0.500"],
        ["random", "-", "-"],
    ]
    assert result.best == {(0, 0), (0, 1)}


async def test_single_map_is_not_marked_as_best(client: Any) -> None:
    result = await client.evaluate(b"\x01", metrics="deletion", methods="gradcam")

    assert result.best == frozenset()
    assert "*" not in result.table()


def evaluated(*explanations: explain_pb2.Explanation, higher: bool = True) -> camserve.Evaluation:
    readings = [
        evaluate_pb2.Reading(explanation=place, metric="increase", value=place, higher_is_better=higher)
        for place in range(len(explanations))
    ]
    explained = explain_pb2.ExplainResponse(explanations=explanations)
    return decode_evaluation(evaluate_pb2.EvaluateResponse(explained=explained, readings=readings))


def test_layers_and_targets_are_named_where_they_differ() -> None:
    cat, dog = (explain_pb2.Prediction(label=label) for label in ("cat", "dog"))
    result = evaluated(
        explain_pb2.Explanation(method="a", layer="1", target=cat),
        explain_pb2.Explanation(method="a", layer="2", target=cat),
        explain_pb2.Explanation(method="b", target=dog),
    )

    assert result.labels == ("a · 1 · cat", "a · 2 · cat", "b · dog")
    assert result.best == {(1, 0)}  # the dog's has no rival
    assert "↑" in result.table()


def test_evaluation_of_nothing_is_an_empty_table() -> None:
    result = evaluated()

    assert (result.rows, result.best, result.table()) == ((), frozenset(), "")
    assert result.plot().width > 0


ORDERS: dict[str, tuple[int, list[tuple[int, str, bool]]]] = {
    "another explanation": (1, [(3, "a", True)]),
    "no explanation": (0, [(0, "a", True)]),
    "fewer readings": (2, [(0, "a", True)]),
    "more readings": (2, [(0, "a", True), (0, "b", True), (1, "a", True)]),
    "the second explanation first": (2, [(1, "a", True), (0, "a", True)]),
    "metrics in turn": (2, [(0, "a", True), (1, "a", True), (0, "b", True), (1, "b", True)]),
    "another metric": (2, [(0, "a", True), (1, "b", True)]),
    "another direction": (2, [(0, "a", True), (1, "a", False)]),
    "17 metrics": (1, [(0, "a", True)] * 17),
}


@pytest.mark.parametrize(("explanations", "readings"), ORDERS.values(), ids=ORDERS)
def test_readings_in_another_order_raise_internal(explanations: int, readings: list[tuple[int, str, bool]]) -> None:
    response = evaluate_pb2.EvaluateResponse()
    response.explained.explanations.extend([explain_pb2.Explanation()] * explanations)
    for place, metric, higher in readings:
        response.readings.add(explanation=place, metric=metric, higher_is_better=higher)

    with pytest.raises(camserve.Internal, match=r"evaluate every explanation|more readings than"):
        decode_evaluation(response)


def test_evaluation_without_readings_has_a_row_for_each_explanation() -> None:
    explained = explain_pb2.ExplainResponse(explanations=[explain_pb2.Explanation(method=name) for name in "ab"])

    result = decode_evaluation(evaluate_pb2.EvaluateResponse(explained=explained))

    assert (result.rows, result.best) == (((), ()), frozenset())
    assert result.table() == "\na\nb"


def test_rows_are_computed_once_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    result = evaluated(*[explain_pb2.Explanation(method=str(number)) for number in range(100)])
    rows, calls = result.rows, []
    monkeypatch.setattr(camserve.Evaluation, "rows", property(lambda _: calls.append(1) or rows))

    assert result.best == {(99, 0)}
    assert len(calls) == 1
    result._repr_html_()
    assert len(calls) < 10


def test_label_of_a_megabyte_does_not_widen_every_line() -> None:
    explanations = [explain_pb2.Explanation(method="x" * 1_000_000), *[explain_pb2.Explanation(method="y")] * 99]

    assert len(evaluated(*explanations).table()) < 30_000


def test_high_and_narrow_picture_has_the_height_of_its_tile() -> None:
    picture = overlay(Image.new("1", (1, 4000)))

    plot = evaluated(explain_pb2.Explanation(overlay=picture)).plot()

    empty = evaluated(explain_pb2.Explanation()).plot()
    assert plot.height == empty.height + comparison.MAX_TILE_HEIGHT - comparison.TILE_WIDTH


def test_plot_has_a_limited_number_of_explanations() -> None:
    sizes = [evaluated(*[explain_pb2.Explanation()] * count).plot().height for count in (100, 101, 400)]

    assert sizes[1] == sizes[2] == sizes[0] + comparison.LINE_HEIGHT


def test_pictures_of_a_plot_are_reduced_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for owner, name in ((camserve.Picture, "open"), (comparison, "resized")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, recorded(original, steps))
    explanation = explain_pb2.Explanation(overlay=overlay(Image.new("RGB", (900, 600))))

    result = evaluated(*[explanation] * 3).plot()

    assert steps == ["open", "resized"] * 3
    assert result.getpixel((30, 60)) == (0, 0, 0)


def recorded(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        names.append(function.__name__)
        return function(*arguments)

    return call


def overlay(image: Image.Image) -> explain_pb2.Picture:
    file = io.BytesIO()
    image.save(file, "PNG")
    kind = explain_pb2.IMAGE_FORMAT_PNG
    return explain_pb2.Picture(format=kind, data=file.getvalue(), width=image.width, height=image.height)


def test_pictures_of_too_many_pixels_in_all_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("camserve._values.picture.MAX_PIXELS_IN_ALL", 1000)
    decoded: list[Any] = []
    monkeypatch.setattr(camserve.Picture, "open", decoded.append)
    result = evaluated(*[explain_pb2.Explanation(overlay=overlay(Image.new("1", (20, 20))))] * 3)

    with pytest.raises(camserve.Internal, match="pictures of 1,200 pixels in all; the limit is 1,000"):
        result.plot()
    assert decoded == []


async def test_plot_is_saved_and_shown(client: Any, tmp_path: pathlib.Path) -> None:
    result = await client.evaluate(b"\x01", metrics=["deletion", "increase"], methods=THREE)
    path = result.save(tmp_path / "plot.png")

    with Image.open(path) as saved, Image.open(io.BytesIO(result._repr_png_())) as shown:
        assert saved.size == shown.size
        assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= set(saved.convert("RGB").get_flattened_data())
    with pytest.raises(camserve.InvalidArgument, match=r"cannot save as '\.gif'"):
        result.save(tmp_path / "plot.gif")


def test_notebook_shows_the_table_with_the_best_and_the_plot() -> None:
    label = "<b>cat"
    target = explain_pb2.Prediction(label=label)
    result = evaluated(
        explain_pb2.Explanation(method="a", layer="1", target=target),
        explain_pb2.Explanation(method="a", layer="2", target=target),
    )
    html = result._repr_html_()

    assert [f"{cell} *" in html for cell in ("0.000", "1.000")] == [False, True]
    assert label not in html
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    with Image.open(io.BytesIO(base64.b64decode(picture))) as shown:
        assert shown.size == result.plot().size


def drawn(*lines: comparison.Line, bars: int = 1, names: tuple[str, ...] = ("p",)) -> np.ndarray:
    bar = [comparison.Bar(0.5, "0.500")] * bars
    panel = comparison.Panel("deletion", "lower is better", bar, [lines] if lines else [[]] * bars, names)
    return np.asarray(comparison.draw([comparison.Tile(f"method {n}", None) for n in range(bars)], [panel]))


def test_curve_is_drawn_at_its_values() -> None:
    flat = drawn(comparison.Line((0, 1), (1.0, 1.0)))
    steep = drawn(comparison.Line((0, 1), (1.0, 0.0)))
    chart = slice(290, 520)  # below the tile
    blue = [np.argwhere((image[chart, 40:-25] == (0, 114, 178)).all(2)) for image in (flat, steep)]

    assert np.ptp(blue[0][:, 0]) < 4
    assert np.ptp(blue[1][:, 0]) > 100


def test_dashes_are_shorter_than_the_line() -> None:
    solid, both = (drawn(*lines, names=("a", "b")) for lines in ([comparison.Line((0, 1), (1, 1))], dashed()))
    ink = [int((image != 255).any(2).sum()) for image in (solid, both)]

    assert ink[1] > ink[0]
    assert canvas.dashes([(0, 0), (12, 0)]) == [((0, 0), (5, 0)), ((10, 0), (12, 0))]


def dashed() -> list[comparison.Line]:
    return [comparison.Line((0, 1), (1, 1)), comparison.Line((0, 0.5, 1), (0.5, math.nan, 0.4))]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (-0.5, 1), (0, 0.003), (0, 87), (0.0, 0.31)])
def test_ticks_are_round_and_enclose_the_curve(low: float, high: float) -> None:
    ticks = canvas.axis_ticks(low, high)

    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low <= high <= ticks[-1] + 1e-9
    assert len({round(b - a, 9) for a, b in pairwise(ticks)}) == 1


@pytest.fixture
def run(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., Any]:
    monkeypatch.setenv("CAMSERVE_SERVER", server.address)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8\xff\x01")
    methods = [part for name in THREE for part in ("--method", name)]
    command = ["evaluate", tmp_path / "cat.jpg", *methods]
    return lambda *args: CliRunner().invoke(cli.main, [str(each) for each in (*command, *args)])


def test_evaluate_command_prints_a_table_and_draws_plots(run: Any, server: Any, tmp_path: pathlib.Path) -> None:
    done = run("--metric", "deletion:steps=5", "--box", "1,2,3,4", "--plot", tmp_path / "plot.png")

    assert done.exit_code == 0, done.output
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["deletion", "↓"],
        ["gradcam", "0.250"],
        ["layercam", "0.500"],
        ["random", "-"],
    ]
    assert "random, deletion: flat" in done.stderr
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.width > 700
    asked = server.calls[0].request
    assert asked.metrics[0].parameters["steps"].number == 5
    assert asked.box.right == 3
    assert asked.explain.rendering.overlay


def test_evaluate_command_prints_json_and_requests_no_unused_curves(run: Any, server: Any) -> None:
    done = run("--json")
    result = json.loads(done.stdout)

    assert server.calls[0].request.explain.rendering.overlay == 0
    assert [each["metric"] for each in result] == ["deletion", "insertion"] * 3
    assert (result[0]["value"], result[-1]["value"], result[-1]["message"]) == (0.25, None, "flat")


@pytest.mark.parametrize(
    ("args", "words"),
    [(("--box", "1,2,3"), "is not LEFT,TOP,RIGHT,BOTTOM"), (("--plot", "plot.gif"), "cannot save as '.gif'")],
)
def test_evaluate_command_reports_errors(run: Any, args: tuple[str, ...], words: str) -> None:
    done = run(*args)

    assert done.exit_code == 2
    assert words in done.stderr


def test_metrics_command_lists_metrics(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(cli.main, ["metrics", "--server", server.address])

    assert ["deletion", "lower", "20", "steps=20", "Deletes."] in [line.split() for line in done.stdout.splitlines()]
    assert "8 × the method's" in done.stdout
