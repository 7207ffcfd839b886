"""The command line: files, output and exit codes."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import click
import grpc
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

import camserve
from camserve import cli, terminal
from camserve._codec.explain import explain_request, with_image
from camserve._codec.regions import decode_regions
from camserve._files.naming import UniqueNames, stem_of
from camserve.commands import tables
from camserve.commands.parsing import parse_target
from camserve.v1 import explain_pb2
from client import hostile

if TYPE_CHECKING:
    import pathlib


@pytest.fixture
def photos(tmp_path: pathlib.Path) -> pathlib.Path:
    """Make a folder with two photos of the same name, a photo in a subfolder, and a file that is no photo."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    (folder / "cat.jpg").write_bytes(b"\xff\xd8\xff\x01")
    (folder / "cat.PNG").write_bytes(b"\xff\xd8\xff\x02")
    (folder / "more" / "dog.webp").write_bytes(b"\xff\xd8\xff\x03")
    (folder / "notes.txt").write_bytes(b"\xff\xd8\xff\x04")
    (folder / ".hidden.jpg").write_bytes(b"\xff\xd8\xff\x05")
    return folder


def names(folder: pathlib.Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_explain_writes_the_overlay_of_a_photo(run: Any, photos: Any, tmp_path: Any) -> None:
    out = tmp_path / "new" / "out"

    done = run("explain", photos / "cat.jpg", "-o", out)

    assert done.exit_code == 0, done.output
    assert names(out) == ["cat.gradcam.class_1.jpg"]
    with Image.open(out / "cat.gradcam.class_1.jpg") as overlay:
        assert overlay.size == (6, 4)
    words = done.stdout.split()
    assert {"75.0%", "gradcam", "OK", "cat.gradcam.class_1.jpg"} <= set(words)


def test_explain_writes_a_folder_under_unique_names(run: Any, photos: Any, tmp_path: Any) -> None:
    (photos / "cat.PNG").write_bytes(b"\xff\xd8\xff\x01")  # the same class too
    out = tmp_path / "out"

    done = run("explain", photos, "-o", out)

    assert done.exit_code == 0, done.output
    assert names(out) == [
        "cat.gradcam.class_1-2.jpg",
        "cat.gradcam.class_1.jpg",
        "dog.gradcam.class_3.jpg",
    ]


def test_second_run_overwrites_overlays_and_does_not_explain_them(run: Any, photos: Any) -> None:
    for _ in range(2):
        done = run("explain", photos, "-o", photos / "out")
        assert done.exit_code == 0, done.output

    assert len(names(photos / "out")) == 3


def test_overlays_may_be_written_to_the_folder_of_the_photos(run: Any, photos: Any) -> None:
    done = run("explain", photos, "-o", photos)

    assert done.exit_code == 0, done.output
    assert "cat.gradcam.class_1.jpg" in names(photos)


def test_options_reach_the_server(run: Any, server: Any, photos: Any, tmp_path: Any) -> None:
    requests: list[Any] = []

    def keep(stream: Any, _: Any) -> Any:
        for each in stream:
            requests.append(each.request)
            yield server.reply(each)

    server.streams = [keep]
    options = (
        *("--model", "tiny", "--top-k", 2, "--colormap", "viridis", "--alpha", 0.25),
        *(
            "--method",
            "gradcam:augmentation_smoothing,per_channel",
            "--method",
            "smoothgrad:samples=32,eigen_smoothing,per_channel=3+7,finish=mean",
        ),
        *("--target", "tabby", "--target", "282", "--target", "tabby vs 282"),
        *("--layer", "a", "--layer", "b", "--format", "png", "--heatmaps", "--max-side", 640),
        *("--profile", "grad-cam", "--intensities", "--sign", "absolute", "--scale", 2.5, "--threshold", 0.75),
        *("--contour-lines", 3, "--color-bar", "--fade"),
        *("--regions", "--region-mass", 0.5, "--max-regions", 2, "--draw-regions"),
    )

    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", *options)

    assert done.exit_code == 0, done.output
    assert names(tmp_path / "out") == [
        "cat.gradcam.features.class_1.npy",
        "cat.gradcam.features.class_1.png",
        "cat.gradcam.features.class_1.regions.json",
        "cat.smoothgrad.features.class_1.npy",
        "cat.smoothgrad.features.class_1.png",
        "cat.smoothgrad.features.class_1.regions.json",
    ]
    saved = np.load(tmp_path / "out" / "cat.gradcam.features.class_1.npy")
    np.testing.assert_array_equal(saved, [[0, 1], [2, 3]])
    question = explain_request(
        model="tiny",
        methods=[
            camserve.Method("gradcam", augmentation_smoothing=True, per_channel=True),
            camserve.Method("smoothgrad", {"samples": 32, "finish": "mean"}, eigen_smoothing=True, per_channel=(3, 7)),
        ],
        targets=["tabby", 282, camserve.contrast("tabby", 282)],
        layers=["a", "b"],
        top_k=2,
        colormap="viridis",
        alpha=0.25,
        overlay="png",
        max_side=640,
        profile="grad-cam",
        intensity=True,
        sign="absolute",
        scale=2.5,
        threshold=0.75,
        contour_lines=3,
        color_bar=True,
        fade=True,
        regions=camserve.RegionOptions(mass=0.5, max_regions=2, draw=True, masks=True),
    )
    expected = with_image(question, b"\xff\xd8\xff\x01")
    expected.progress = True
    assert requests == [expected]


@pytest.fixture
def rendering(run: Any, server: Any, photos: Any, tmp_path: Any) -> Any:
    """Run a command, and return the options of the pictures that it requests."""

    def requested(*options: Any) -> Any:
        requests: list[Any] = []

        def keep(stream: Any, _: Any) -> Any:
            for each in stream:
                requests.append(each.request)
                yield server.reply(each)

        server.streams = [keep]
        done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", *options)
        assert done.exit_code == 0, done.output
        (request,) = requests
        return request.rendering

    return requested


@pytest.mark.parametrize(
    ("options", "colormap"),
    [
        ((), "jet"),
        (("--profile", "signed"), "coolwarm"),
        (("--sign", "both"), "coolwarm"),
        (("--profile", "signed", "--sign", "positive"), "jet"),
        (("--profile", "signed", "--colormap", "jet"), "jet"),
    ],
)
def test_colour_map_depends_on_the_sign_unless_it_is_given(rendering: Any, options: Any, colormap: str) -> None:
    assert rendering(*options).colormap == colormap


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--regions",), {"max_regions": 8}),
        (("--region-quantile", 0), {"quantile": 0, "max_regions": 8}),
        (("--region-mass", 0.5), {"mass": 0.5, "max_regions": 8}),
        (("--max-regions", 3), {"max_regions": 3}),
        (("--draw-regions",), {"max_regions": 8, "draw": True}),
    ],
)
def test_each_option_of_regions_requests_them_with_masks(rendering: Any, options: Any, expected: Any) -> None:
    assert rendering(*options).regions == explain_pb2.RegionOptions(masks=True, **expected)


def test_scale_of_a_request_and_a_raw_threshold_reach_the_server(rendering: Any) -> None:
    sent = rendering("--scale", "request", "--threshold-value", 0.25)

    assert (sent.shared_scale, sent.threshold_value) == (True, 0.25)


def test_regions_are_printed_and_written_as_json(run: Any, photos: Any, tmp_path: Any) -> None:
    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", "--regions")

    assert done.exit_code == 0, done.output
    (line,) = (line.split() for line in done.stdout.splitlines() if "3,0,6,4" in line)
    assert line == ["cat.gradcam.class_1.jpg", "1", "3,0,6,4", "12", "75.0%", "4,2", "2"]
    content = json.loads((tmp_path / "out" / "cat.gradcam.class_1.regions.json").read_bytes())
    region = decode_regions([hostile.region()], camserve.Photo(6, 4, camserve.Box(0, 0, 6, 4)))[0]
    assert content == {"width": 6, "height": 4, "regions": [region.plain()]}


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_dry_run_prints_the_cost_and_sends_no_photo(
    run: Any, server: Any, photos: Any, tmp_path: Any, options: Any
) -> None:
    done = run("explain", photos, "-o", tmp_path / "out", "--method", "a", "--method", "b", "--dry-run", *options)

    assert done.exit_code == 0, done.output
    assert [call.rpc for call in server.calls] == ["EstimateCost"]
    assert done.stdout.splitlines()[-1].split() == ["3", "2", "2,000", "6,000", "4,096"]
    assert not (tmp_path / "out").exists()


def test_heatmaps_are_requested_only_if_they_are_written(run: Any, photos: Any, tmp_path: Any) -> None:
    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", "--format", "webp")

    assert done.exit_code == 0, done.output
    assert names(tmp_path / "out") == ["cat.gradcam.class_1.webp"]


def test_photo_that_fails_does_not_stop_the_others(run: Any, server: Any, photos: Any, tmp_path: Any) -> None:
    def second_is_bad(stream: Any, _: Any) -> Any:
        for each in stream:
            bad = each.request.image[-1] == 2
            no = grpc.StatusCode.INVALID_ARGUMENT
            yield server.error(each, no) if bad else server.reply(each)

    server.streams = [second_is_bad]

    done = run("explain", photos, "-o", tmp_path / "out")

    assert done.exit_code == 1
    assert names(tmp_path / "out") == ["cat.gradcam.class_1.jpg", "dog.gradcam.class_3.jpg"]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "cat.PNG: INVALID_ARGUMENT it is" in errors[0]
    assert "dog.gradcam.class_3.jpg" in done.stdout


def test_no_table_is_printed_if_every_photo_fails(run: Any, server: Any, photos: Any, tmp_path: Any) -> None:
    server.refusals = [server.refusal(grpc.StatusCode.PERMISSION_DENIED, "not for you")] * 9

    done = run("explain", photos, "-o", tmp_path / "out")

    assert done.exit_code == 1
    assert done.stdout == ""
    assert "error: not for you" in done.stderr


@pytest.mark.parametrize("command", ["models", "layers", "methods", "health"])
@pytest.mark.usefixtures("pauses")
def test_missing_server_is_a_one_line_error(command: str) -> None:
    done = CliRunner().invoke(cli.main, [command, "--server", "127.0.0.1:1"])

    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no server answers at 127.0.0.1:1")
    assert done.stderr.count("\n") == 1


def test_commands_wait_for_a_server_that_starts_and_say_so(
    run: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's; a command has none
    unavailable = {"code": grpc.StatusCode.UNAVAILABLE, "message": "the server is starting", "reason": "STARTING"}
    server.refusals = [server.refusal(**unavailable, trailers=(("grpc-retry-pushback-ms", "20"),))] * 9

    done = run("models")

    assert done.exit_code == 0
    assert "tiny" in done.stdout
    assert done.stderr == f"waiting for the server at {server.address}: it is starting\n"


def test_commands_give_up_at_their_timeout_if_the_server_still_starts(
    run: Any, server: Any, pauses: list[float]
) -> None:
    unavailable = {"code": grpc.StatusCode.UNAVAILABLE, "message": "the server is starting", "reason": "STARTING"}
    server.refusals = [server.refusal(**unavailable, trailers=(("grpc-retry-pushback-ms", "100000"),))] * 99

    done = run("models", "--timeout", "1000")

    assert done.exit_code == 1
    assert done.stderr.startswith("error: the server is starting [request ")
    assert pauses == [100] * 9
    assert len(server.calls) == 10


def test_models_are_listed(run: Any) -> None:
    done = run("models")

    assert done.exit_code == 0
    assert "tiny" in done.stdout
    assert "4.65M" in done.stdout
    assert "224×224" in done.stdout
    assert "float32 on cpu" in done.stdout
    assert "classify" in done.stdout


@pytest.mark.parametrize(
    ("source", "weights", "shown"),
    [
        ("torchvision:resnet50", "default", "default"),
        ("embedded:efficientnet_lite0", "default", "default"),
        ("my_network:build", "default", "as built"),
        ("my_network:build", "file", "file"),
        ("my_network:build", "none", "none"),
    ],
)
def test_weights_of_a_function_are_listed_as_built(source: Any, weights: Any, shown: Any) -> None:
    model = camserve.Model(
        name="m", source=source, weights=weights, digest="d", classes=3, input_height=64, input_width=64,
        default_layer="layer4", parameters=7, precision="float32", device="cpu",
    )  # fmt: skip
    ((_, _, cell, *_),) = tables.model_rows([model])

    assert cell == shown


def test_layers_are_listed(run: Any, server: Any) -> None:
    done = run("layers", "tiny")

    assert done.exit_code == 0
    assert "1×8×7×7" in done.stdout
    assert "no: no grid" in done.stdout
    assert server.calls[0].request.model == "tiny"


def test_methods_are_listed(run: Any) -> None:
    done = run("methods")

    assert done.exit_code == 0
    assert "samples=16 finish=max seed" in done.stdout
    assert "Weighs maps" in done.stdout


def test_one_method_is_described(run: Any) -> None:
    plain, rich = run("methods", "gradcam"), run("methods", "smoothgrad")

    assert plain.exit_code == 0
    assert plain.stdout == (
        "gradcam: Weighs maps\n\nL = ReLU(Σ_k α_k A_k)\n\nkind       cam\nexplains   a layer\npaper      P\n"
        "cost       1 row for each target\nsmoothing  augmentation, eigen\n"
    )
    assert "needs      ReLU" in rich.stdout
    assert ["samples", "16", "1", "to", "256,", "integer", "How", "many."] in [
        x.split() for x in rich.stdout.splitlines()
    ]
    assert ["finish", "max", "max,", "mean"] in [x.split() for x in rich.stdout.splitlines()]


def test_one_method_is_printed_as_json(run: Any) -> None:
    assert json.loads(run("methods", "gradcam", "--json").stdout)["formula"] == "L = ReLU(Σ_k α_k A_k)"


@pytest.mark.parametrize(("name", "hint"), [("gradcan", ' (did you mean "gradcam"?)'), ("x", "")])
def test_unknown_method_is_a_one_line_error(run: Any, name: str, hint: str) -> None:
    done = run("methods", name)

    assert done.exit_code == 1
    assert done.stderr == f'error: unknown method "{name}"{hint}: the methods are gradcam, smoothgrad\n'
    assert done.stdout == ""


def test_smoothed_and_plain_maps_have_different_names(run: Any, server: Any, photos: Any, tmp_path: Any) -> None:
    def reply_with_smoothing(stream: Any, _: Any) -> Any:
        for item in stream:
            reply = server.reply(item)
            for explanation, method in zip(reply.response.explanations, item.request.methods, strict=True):
                explanation.augmentation_smoothing = method.augmentation_smoothing
            yield reply

    server.streams = [reply_with_smoothing]

    done = run(
        *("explain", photos / "cat.jpg", "-o", tmp_path / "out"),
        *("--method", "gradcam", "--method", "gradcam:augmentation_smoothing"),
    )

    assert names(tmp_path / "out") == ["cat.gradcam-augmentation_smoothing.class_1.jpg", "cat.gradcam.class_1.jpg"]
    assert "gradcam, augmentation smoothing" in done.stdout


def test_fused_layers_are_not_in_the_file_name(run: Any, photos: Any, tmp_path: Any) -> None:
    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", "--layer", "a", "--layer", "b", "--fusion", "max")

    assert done.exit_code == 0, done.output
    assert names(tmp_path / "out") == ["cat.gradcam.class_1.jpg"]


def test_colored_heatmap_is_written_on_request(run: Any, server: Any, photos: Any, tmp_path: Any) -> None:
    def coloured(stream: Any, _: Any) -> Any:
        for each in stream:
            answer = server.reply(each)
            for explanation in answer.response.explanations:
                explanation.intensity.CopyFrom(server.heatmap())
            yield answer

    server.streams = [coloured]

    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", "--intensities")

    assert done.exit_code == 0, done.output
    assert names(tmp_path / "out") == ["cat.gradcam.class_1.intensity.npy", "cat.gradcam.class_1.jpg"]
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "cat.gradcam.class_1.intensity.npy"), [[0, 1], [2, 3]])


@pytest.fixture
def receipt(run: Any, photos: Any, tmp_path: Any) -> pathlib.Path:
    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", "--receipts")
    assert done.exit_code == 0, done.output
    assert names(tmp_path / "out") == ["cat.gradcam.class_1.jpg", "cat.gradcam.class_1.receipt.json"]
    return tmp_path / "out" / "cat.gradcam.class_1.receipt.json"


def test_receipt_is_replayed(run: Any, photos: Any, receipt: Any) -> None:
    same, other = run("replay", receipt, photos / "cat.jpg"), run("replay", receipt, photos / "cat.PNG")

    assert (same.exit_code, same.stderr) == (0, "")
    assert ["map", "2×2", "2×2", "byte", "for", "byte"] in [line.split() for line in same.stdout.splitlines()]
    assert other.exit_code == 1
    assert "the photo differs (SHA-256 " in other.stdout


def test_replay_with_equal_numbers_and_another_version_succeeds(run: Any, photos: Any, receipt: Any) -> None:
    changed = {**json.loads(receipt.read_text()), "versions": {"camserve": "0.9"}}
    receipt.write_text(json.dumps(changed))

    done = run("replay", receipt, photos / "cat.jpg")

    assert done.exit_code == 0
    assert "0.9" in done.stdout
    assert "differs, but the numbers agree" in done.stdout


def test_invalid_receipt_is_a_one_line_error(run: Any, photos: Any) -> None:
    done = run("replay", photos / "notes.txt", photos / "cat.jpg")

    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "notes.txt: not a camserve receipt: it is not JSON" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["models", "layers", "methods"])
def test_lists_are_printed_as_json(run: Any, command: str) -> None:
    done = run(command, "--json")

    result = json.loads(done.stdout)
    assert len(result) == 2
    assert result[0]["name"] in {"tiny", "features", "gradcam"}


def test_health_is_the_exit_code(run: Any) -> None:
    well, asleep, nobody = run("health"), run("health", "asleep", "--json"), run("health", "who")

    assert (well.exit_code, asleep.exit_code, nobody.exit_code) == (0, 1, 1)
    assert "SERVING" in well.stdout
    assert json.loads(asleep.stdout) == {"service": "asleep", "status": "NOT_SERVING"}
    assert nobody.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("explain",), "Missing"),
        (("explain", "no-such-file.jpg", "-o", "out"), "does not exist"),
        (("explain", "{photos}"), "'-o'"),
        (("explain", "{photos}", "-o", "out", "--format", "gif"), "gif"),
        (("explain", "{photos}", "-o", "out", "--alpha", "7"), "alpha: 7.0 is not between 0 and 1"),
        (("explain", "{photos}", "-o", "out", "--method", "a:b"), "'b' is neither KEY=VALUE nor one of aug"),
        (("explain", "{photos}", "-o", "out", "--method", "a:per_channel=3;7"), "several, such as 3+7, not '3;7'"),
        (("explain", "{photos}", "-o", "out", "--server", "http://a"), "HOST:PORT"),
        (("explain", "{empty}", "-o", "out"), "no images in"),
        (("models", "--timeout", "0"), "timeout"),
        (("models", "--wrong"), "--wrong"),
        (("models", "--timeout", "60", "--timeout", "61"), "--timeout was given 2 times, but accepts one value"),
        (("explain", "{photos}", "-o", "out", "--model", "a", "--model", "b"), "--model was given 2 times"),
        (("explain", "{photos}", "-o", "out", "--output", "b"), "--output was given 2 times"),
        (("nothing",), "nothing"),
    ],
)
def test_usage_error_is_one_line(run: Any, photos: Any, tmp_path: Any, args: Any, words: str) -> None:
    (tmp_path / "empty").mkdir()
    places = {"photos": photos, "empty": tmp_path / "empty"}

    done = run(*(each.format(**places) for each in args))

    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_help_is_printed_without_a_command() -> None:
    done = CliRunner().invoke(cli.main, [])

    assert done.exit_code == 2
    assert "Commands:" in done.output


def test_help_and_version_succeed() -> None:
    for option in ("--help", "--version"):
        assert CliRunner().invoke(cli.main, [option]).exit_code == 0


def test_exit_code_after_control_c_is_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(camserve.Client, "models", interrupted)

    done = run("models")

    assert done.exit_code == 130
    assert done.stderr.strip() == "error: interrupted"


def test_full_disk_is_a_one_line_error(run: Any, photos: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(camserve.Explanation, "save", full)

    done = run("explain", photos, "-o", tmp_path / "out")

    assert done.exit_code == 1
    assert "error: [Errno 28] No space left on device" in done.stderr


def test_brackets_in_a_label_are_not_markup(run: Any, server: Any, photos: Any, tmp_path: Any) -> None:
    def labelled(stream: Any, _: Any) -> Any:
        for each in stream:
            answer = server.reply(each)
            answer.response.explanations[0].target.label = "[red]../cat[/red]"
            answer.response.explanations[0].verdict = 2
            answer.response.explanations[0].verdict_message = "nothing for it"
            yield answer

    server.streams = [labelled]

    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out")

    assert "[red]../cat[/red]" in done.stdout
    assert "ALL_NEGATIVE: nothing for it" in done.stdout
    assert names(tmp_path / "out") == ["cat.gradcam.red_cat_red.jpg"]


@pytest.mark.parametrize(
    ("label", "part"),
    [
        ("tabby, tabby cat", "tabby_tabby_cat"),
        ("../../etc/passwd", "etc_passwd"),
        ("кошка", "кошка"),
        ("///", "_"),
        ("x" * 300, "x" * 50),
        ("猫" * 300, "猫" * 16),
        ("", "class_7"),
    ],
)
def test_labels_are_parts_of_file_names(tmp_path: Any, label: str, part: str) -> None:
    explanation = answered(label)

    assert stem_of(tmp_path / "cat.jpg", explanation, with_layer=False) == f"cat.m.{part}"


def test_longest_photo_name_and_parts_give_a_valid_file_name(tmp_path: Any) -> None:
    photo = tmp_path / f"{'猫' * 83}.jpg"
    photo.touch()

    stem = stem_of(photo, answered("猫" * 300, against="犬" * 300), with_layer=True)

    (tmp_path / f".{stem}-99.intensity.npy").touch()
    assert stem.startswith("猫" * 40)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("tabby", "tabby"),
        ("282", 282),
        ("tabby vs 282", camserve.contrast("tabby", 282)),
        ("dog: a breed", "dog: a breed"),
        ("probability:tabby", camserve.probability("tabby")),
        ("finer:tabby", camserve.finer("tabby")),
        ("finer: 281 vs 282, tiger cat", camserve.finer(281, 282, "tiger cat")),
        ("segment:cat", camserve.segment("cat")),
        ("segment:8@1,2,30.5,4", camserve.segment(8, (1, 2, 30.5, 4))),
        ("detection:dog", camserve.detection("dog")),
        ("detection:dog @ 1,2,3,4", camserve.detection("dog", (1, 2, 3, 4))),
    ],
)
def test_target_option_is_parsed_by_its_kind(text: str, target: Any) -> None:
    assert parse_target(text) == target


def test_similarity_target_is_the_path_of_the_other_photo() -> None:
    asked = parse_target("similarity:other.jpg")

    assert isinstance(asked, camserve.Similarity)
    assert asked.image == "other.jpg"


def test_mask_target_is_a_class_and_the_path_of_the_mask() -> None:
    asked = parse_target("mask:tiger cat@masks/a@b.png")

    assert isinstance(asked, camserve.Mask)
    assert (asked.why, asked.image) == ("tiger cat", "masks/a@b.png")
    with pytest.raises(click.BadParameter, match=r"'cat' is not CLASS@MASK\.png"):
        parse_target("mask:cat")


@pytest.mark.parametrize("text", ["segment:cat@1,2,3", "detection:dog@a,b,c,d"])
def test_invalid_box_is_reported(text: str) -> None:
    with pytest.raises(click.BadParameter, match="LEFT,TOP,RIGHT,BOTTOM"):
        parse_target(text)


def test_contrast_is_in_the_file_name(tmp_path: Any) -> None:
    explanation = answered("tabby", against="tiger cat")

    stem = stem_of(tmp_path / "a.b.jpg", explanation, with_layer=True)

    assert stem == "a.b.m.layer_1.tabby-not-tiger_cat"


def answered(label: str, against: str = "") -> camserve.Explanation:
    return camserve.Explanation(
        method="m",
        layer="layer.1",
        target=camserve.Prediction(label, 0.5, 7, 1.0),
        contrast=camserve.Prediction(against, 0.5, 8, 1.0) if against else None,
        score=1.0,
        verdict=camserve.Verdict.OK,
        verdict_message="",
        parameters={},
        photo=camserve.Photo(1, 1, camserve.Box(0, 0, 1, 1)),
        heatmap=None,
        overlay_picture=None,
        colored_picture=None,
    )


def test_file_names_that_differ_only_in_case_are_the_same(tmp_path: Any) -> None:
    given = UniqueNames(tmp_path)

    results = [given.unique(stem, ".jpg").name for stem in ("Cat", "cat", "CAT", "cat-2")]

    assert results == ["Cat.jpg", "cat-2.jpg", "CAT-3.jpg", "cat-2-2.jpg"]


def test_as_json_accepts_only_values() -> None:
    with pytest.raises(TypeError):
        tables.as_json(object())


def test_small_and_large_counts_are_short() -> None:
    assert [tables._shorten_count(each) for each in (7, 1200, 4_650_000, 2 * 10**9)] == [
        "7",
        "1.2k",
        "4.65M",
        "2G",
    ]


def test_installed_command_interrupts_cleanly(server: Any) -> None:
    server.hold.clear()
    # A shell lets what it starts in the background ignore the signal, these tests and all that they start too.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeding}; from camserve.cli import main; main()"
    command = [sys.executable, "-c", code, "models", "--server", server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        server.called.wait()
        running.send_signal(2)
        _, errors = running.communicate()

    assert running.returncode == 130
    assert errors.decode().strip() == "error: interrupted"


def test_table_has_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")

    terminal.print_table(("a", "b"), [("x " * 30, "y")])

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert max(len(line) for line in lines if line.startswith("x")) <= 40


def test_terminal_shows_a_limited_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(terminal, "MAX_ROWS", 20)

    terminal.print_table(("number",), [(str(number),) for number in range(1020)])

    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines[1:21]] == list(map(str, range(20)))
    assert lines[21:] == ["and 1,000 more rows, which are left out; a pipe or a file gets all of them"]


def test_pipe_gets_all_rows_without_padding(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("x" * 5000, "y" * 5000), *[("a", "b"), ("猫", "b")] * 5000]

    terminal.print_table(("long", "last"), rows)

    heading, first, *others = capsys.readouterr().out.splitlines()
    assert heading == f"{'long':200}  last"
    assert first == f"{'x' * 4000}…  {'y' * 4000}…"
    assert others == [f"{'a':200}  b", f"{'猫':199}  b"] * 5000  # 猫 is two columns wide


class Ready:
    """A client without a server. It predicts one class for a photo: the number of its last byte."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.closed = True

    def explain_many(self, images: Any, **options: Any) -> Any:
        self.options = options
        for each in images:
            data = each if isinstance(each, bytes) else each.read_bytes()
            yield ready(data[-1]) if data[-1] else camserve.InvalidArgument("image: no", fields={"image": "no"})

    def model(self, name: str) -> camserve.Model:
        return camserve.Model(name or "tiny", "own", "none", "ab" * 32, 2, 4, 6, "layer.1", 1, "float32", "cpu")

    def replay(self, receipt: camserve.Receipt, image: pathlib.Path) -> camserve.Replay:
        same = image.read_bytes()[-1] == receipt.target["class_index"]
        check = camserve.Check("photo", "then", "now", same, words="" if same else "another photo")
        return camserve.Replay((check,), None, answered("cat"))


def ready(index: int) -> camserve.Result:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), "red").save(file, "jpeg")
    overlay = camserve.Picture("jpeg", file.getvalue(), 6, 4)
    why = replace(answered(f"class {index}"), overlay_picture=overlay)
    return camserve.Result((why.target,), (why,), "tiny", "id", why.photo, camserve.Timing(0, 0, 0, 0, 1))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command from another program, with that program's client."""
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(command: click.Command, client: Any, **given: Any) -> Any:
        @click.command
        @click.pass_context
        def program(context: click.Context) -> Any:
            return context.invoke(command, connect=lambda: client, **given)

        group = cli.Commands(commands={"program": program})
        return CliRunner().invoke(group, ["program"])

    return invoke


def test_explain_runs_with_a_client_of_another_program(ask: Any, photos: Any, tmp_path: Any) -> None:
    (photos / "more" / "dog.webp").write_bytes(b"\xff\xd8\xff\x00")
    client = Ready()

    methods = (camserve.Method("m"),)
    done = ask(cli.explain, client, paths=(str(photos),), output=tmp_path / "out", methods=methods, colormap="hot")

    assert done.exit_code == 1
    assert names(tmp_path / "out") == ["cat.m.class_1.jpg", "cat.m.class_2.jpg"]
    assert (tmp_path / "out" / "cat.m.class_1.jpg").read_bytes() == ready(1).explanations[0].overlay
    assert {"50.0%", "cat.m.class_1.jpg", "cat.m.class_2.jpg"} <= set(done.stdout.split())
    assert f"error: {photos}/more/dog.webp: image: no" in done.stderr
    assert client.options["methods"] == methods
    assert (client.options["colormap"], client.options["top_k"]) == ("hot", 1)
    assert client.closed


def test_job_runs_with_a_client_of_another_program(ask: Any, photos: Any, tmp_path: Any) -> None:
    client = Ready()
    done = ask(cli.explain, client, paths=(str(photos),), output=tmp_path / "out", resume=True)

    assert done.exit_code == 0, done.output
    assert "3 photos are done" in done.stdout
    rows = pq.read_table(tmp_path / "out" / "results").to_pylist()
    assert {row["image"]: row["target"] for row in rows} == {
        str(photos / "cat.jpg"): "class 1",
        str(photos / "cat.PNG"): "class 2",
        str(photos / "more" / "dog.webp"): "class 3",
    }
    assert client.closed


@pytest.mark.parametrize(("index", "code"), [(1, 0), (2, 1)])
def test_replay_runs_with_a_client_of_another_program(
    ask: Any, run: Any, photos: Any, tmp_path: Any, index: int, code: int
) -> None:
    assert run("explain", photos / "cat.jpg", "-o", tmp_path / "out", "--receipts").exit_code == 0
    (path,) = (tmp_path / "out").glob("*.receipt.json")
    photo = photos / ("cat.jpg" if index == 1 else "cat.PNG")

    done = ask(cli.replay, Ready(), receipt=path, photo=photo)

    assert done.exit_code == code
    assert ("another photo" in done.stdout) == bool(code)


class Used(Exception):
    """Raised when a command requests its client."""


@pytest.mark.parametrize("name", cli.main.commands)
def test_every_command_takes_a_client_of_another_program(name: str, photos: Any, tmp_path: Any) -> None:
    def connect() -> Any:
        raise Used

    command = cli.main.commands[name]
    photo = photos / "cat.jpg"
    given = {"paths": (str(photo),), "photo": photo, "receipt": photo, "name": "x", "output": tmp_path / "a.png"}
    given |= {"baseline": "tiny", "candidate": "large"}
    known = {each.name for each in command.params}
    with click.Context(cli.main) as context, pytest.raises(Used):
        context.invoke(command, connect=connect, **{key: value for key, value in given.items() if key in known})


def test_invalid_client_options_are_a_usage_error(photos: Any, tmp_path: Any) -> None:
    def connect() -> Any:
        raise camserve.InvalidArgument("no such model")

    with click.Context(cli.main) as context, pytest.raises(click.UsageError, match="no such model"):
        context.invoke(cli.explain, connect=connect, paths=(str(photos),), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
