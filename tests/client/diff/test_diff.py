"""The command `diff` compares, resumes, refuses in one line, and replaces a baseline only by a whole one."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from junitparser import JUnitXml
from PIL import Image

import camserve
import fork_server
from camserve import dataset
from camserve.diff import calibration, compare, recording, rule
from camserve.diff import run as diff_run
from camserve.diff.recording import Recording
from camserve.diff.values import DiffSettings
from client.diff.looks import GRID, HEADER, HEIGHT, WIDTH, Looks, calibration_of, result_of, write_photo, write_photos

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    Change = Callable[[Path, Path], object]

COUNT = 12
OUTPUTS = ("index.html", "report.json", "junit.xml")
MODELS = ("--baseline", "tiny", "--candidate", "large")
SAMPLE = 4  # photos of the calibration


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_rule.py` tests the intervals, for which so few resamples would be too few."""
    monkeypatch.setattr(rule, "_RESAMPLES", 20)


@pytest.fixture
def looks(server: Any) -> Looks:
    looks = Looks()
    looks.install(server)
    return looks


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the photos, and with the recorded baseline once a test has needed it. Tests copy both."""
    folder = tmp_path_factory.mktemp("originals")
    write_photos(folder / "photos", COUNT)
    return folder


@pytest.fixture
def photos(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "photos", tmp_path / "photos"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def diff(run: Callable[..., Result], looks: Looks, photos: Path, out: Path) -> Callable[..., Result]:  # noqa: ARG001 -- it answers
    """Run the command with the photos; without sides, it compares both models of the fake server."""

    def run_diff(*args: object, folder: Path = photos) -> Result:
        sample = () if "--sample" in args else ("--sample", SAMPLE)
        return run("diff", folder, *([] if "--baseline" in args else MODELS), "-o", out, *sample, *args)

    return run_diff


@pytest.fixture
def baseline(diff: Callable[..., Result], looks: Looks, originals: Path, tmp_path: Path) -> Path:
    """A recorded baseline."""
    made = originals / "base"
    if not made.exists():
        done = diff("--baseline", made, "--candidate", "tiny", "--accept")
        assert done.exit_code == 0, done.output
        looks.explained.clear()
        looks.requests.clear()
    return Path(shutil.copytree(made, tmp_path / "base"))


@pytest.fixture
def compared(diff: Callable[..., Result], looks: Looks, originals: Path, out: Path) -> None:
    """The folder of a comparison of both models, which found no difference."""
    made = originals / "compared"
    if made.exists():
        shutil.copytree(made, out)
        return
    assert diff().exit_code == 0
    shutil.copytree(out, made)
    looks.explained.clear()
    looks.requests.clear()


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_bytes())


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


def digest(photo: Path) -> str:
    return hashlib.sha256(photo.read_bytes()).hexdigest()


def names(looks: Looks, photos: Path, model: str) -> list[str]:
    """Return the names of the photos that a model explained, in order."""
    by_digest = {digest(photo): photo.name for photo in photos.iterdir()}
    return [by_digest[photo] for name, photo in looks.explained if name == model and photo in by_digest]


def refused(done: Result, out: Path, words: str) -> None:
    """Check that a command could not compare: one line on standard error, and no report."""
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert done.stdout == ""
    assert not any((out / name).exists() for name in OUTPUTS)
    assert not list(out.rglob("*.tmp"))


def test_models_that_look_at_the_same_are_the_same(diff: Any, out: Path, looks: Looks, photos: Path) -> None:
    done = diff()

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("large and tiny look at the same places on 12 photos\n")
    assert {name.name for name in out.iterdir()} == {*OUTPUTS, "recordings", ".lock"}
    assert names(looks, photos, "tiny") == names(looks, photos, "large") == sorted(p.name for p in photos.iterdir())
    assert report(out)["changed"] is False
    assert {case["change"] for case in report(out)["cases"]} == {"same"}


def test_model_that_looks_elsewhere_is_found(diff: Any, out: Path, looks: Looks) -> None:
    looks.dark = {"large"}
    done = diff()
    found = report(out)

    assert done.exit_code == 1
    assert done.stdout.startswith("large and tiny differ on 12 photos\n")
    assert all(reason in " ".join(done.stdout.split()) for reason in found["reasons"])
    assert len(found["reasons"]) == 2  # the median, and the share
    assert {(case["change"], case["spearman"]) for case in found["cases"]} == {("looks elsewhere", -1)}
    assert JUnitXml.fromfile(str(out / "junit.xml")).failures == COUNT + 1


def test_model_that_predicts_another_class_is_found(diff: Any, out: Path, looks: Looks) -> None:
    looks.flipped = {"large"}
    done = diff()
    found = report(out)

    assert done.exit_code == 1
    (reason,) = found["reasons"]
    assert "predicted class" in reason
    assert "100%" in reason
    assert {(case["change"], case["spearman"]) for case in found["cases"]} == {("prediction changed", 1)}
    assert {group["title"] for group in found["groups"]} == {"cat becomes dog", "dog becomes cat"}


def test_map_without_evidence_is_a_changed_verdict(diff: Any, out: Path, looks: Looks) -> None:
    looks.blind = {"large"}

    assert diff().exit_code == 1
    assert {group["title"] for group in report(out)["groups"]} == {"OK becomes FLAT"}
    assert report(out)["checks"][0]["median"]["value"] is None


def test_few_changes_are_allowed(diff: Any, looks: Looks, out: Path) -> None:
    looks.flipped = {"large"}

    assert diff("--max-changed", "1").exit_code == 0
    assert {case["change"] for case in report(out)["cases"]} == {"prediction changed"}


def test_both_models_explain_the_class_that_the_baseline_predicts(diff: Any, looks: Looks, photos: Path) -> None:
    looks.flipped = {"large"}
    diff()
    predicted = {}
    for photo in photos.iterdir():
        with Image.open(photo) as image:
            predicted[digest(photo)] = int(
                np.asarray(image.convert("L"))[: HEIGHT // GRID, : WIDTH // GRID].mean() > 128
            )
    asked = {
        hashlib.sha256(request.image).hexdigest(): request.targets[0].class_index
        for request in looks.requests if request.model == "large"
    }  # fmt: skip

    assert asked == predicted


def test_fewer_photos_than_the_rule_needs_are_refused_at_once(
    diff: Any, looks: Looks, out: Path, tmp_path: Path
) -> None:
    few = write_photos(tmp_path / "few", rule.MIN_PHOTOS - 1)
    done = diff(folder=few)

    refused(done, out, f"{rule.MIN_PHOTOS - 1} photos are too few to say")
    assert looks.explained == []
    refused(diff("--accept", "--baseline", out, "--candidate", "tiny", folder=few), out, "too few to say")
    write_photos(few, 1, first=rule.MIN_PHOTOS)
    assert diff(folder=few).exit_code == 0


def test_baseline_is_not_recorded_through_a_link(diff: Any, looks: Looks, out: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "elsewhere" / f".{'0a' * 8}.tmp"  # as of another program
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")
    base = tmp_path / "prepared"
    base.mkdir()
    (base / ".new").symlink_to(unfinished.parent)

    refused(diff("--baseline", f"{base}/", "--candidate", "tiny", "--accept"), out, "is a link")
    assert list(unfinished.parent.iterdir()) == [unfinished]
    assert looks.explained == []


def test_recorded_baseline_needs_no_model(diff: Any, looks: Looks, photos: Path, baseline: Path, out: Path) -> None:
    done = diff("--baseline", baseline, "--candidate", "large")

    assert done.exit_code == 0, done.output
    assert {model for model, _ in looks.explained} == {"large"}
    assert len(looks.explained) == COUNT
    assert report(out)["baseline"]["model"] == "tiny"
    assert files(baseline) == {recording.HEADER_FILE, recording.PHOTOS_FILE, recording.CALIBRATION_FILE}
    looks.dark = {"large"}
    write_photo(photos / "more.png", 99)
    looks.explained.clear()
    assert diff("--baseline", baseline, "--candidate", "large@", "--skip-failed").exit_code == 0
    assert looks.explained == []  # they were recorded before, and no baseline has the new photo


def test_recorded_baseline_decides_as_its_model_does(diff: Any, looks: Looks, baseline: Path, out: Path) -> None:
    looks.dark = {"large"}
    diff("--baseline", baseline, "--candidate", "large")
    by_record = report(out)
    diff()
    by_model = report(out)

    for found in (by_record, by_model):
        del found["baseline"]
    assert by_record == by_model


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def damage(name: str, data: bytes) -> Change:
    return lambda base, _: (base / name).write_bytes(data)


def delete(name: str) -> Change:
    return lambda base, _: (base / name).unlink()


def nothing(_base: Path, _photos: Path) -> None: ...


def delete_photos(_: Path, photos: Path) -> None:
    for index in (3, 4):
        (photos / f"00{index}.png").unlink()


def calibrate_another_method(base: Path, _: Path) -> None:
    calibration_of("other").save(base)


def make_pipe(base: Path, _: Path) -> None:
    (base / "photos.jsonl").unlink()
    os.mkfifo(base / "photos.jsonl")


# Changes to a baseline and its photos, flags, and a part of the error.
REFUSED: dict[str, tuple[Change, tuple[str, ...], str]] = {
    "newer format": (lambda base, _: edit(base / "recording.json", format="camserve recording 2"), (),
                     "has the format 'camserve recording 2'; this client reads 'camserve recording 1'"),
    "other method": (nothing, ("--method", "layercam"), "the methods differ: the baseline has gradcam, not layercam"),
    "other layer": (nothing, ("--layer", "body"), "the layers differ: the baseline has the default, not body"),
    "other fusion": (nothing, ("--fusion", "max"), "the fusions differ"),
    "other targets": (nothing, ("--target", "dog"), "the targets differ"),
    "more classes": (nothing, ("--top-k", "2"), "the numbers of explained classes differ"),
    "other labels": (lambda base, _: edit(base / "recording.json", labels="00"), (), "have different labels"),
    "changed photo": (lambda _, photos: write_photo(photos / "003.png", 99), (), "003.png is not the same as in"),
    "missing photos": (delete_photos, (), "003.png, 004.png are in"),
    "new photo": (lambda _, photos: write_photo(photos / "new.png", 99), (), "new.png is not in"),
    "no header": (delete("recording.json"), (), "is not a baseline: it has no recording.json"),
    "no calibration": (delete("calibration.json"), (), "has no calibration"),
    "damaged header": (damage("recording.json", b""), (), "recording.json is damaged"),
    "damaged photos": (damage("photos.jsonl", b"{}\n"), (), "photos.jsonl, line 1, is damaged"),
    "damaged calibration": (damage("calibration.json", b"[]"), (), "calibration.json is damaged"),
    "other calibration": (calibrate_another_method, (), "calibration lacks gradcam features"),
    "cut off": (lambda base, _: os.truncate(base / "photos.jsonl", 999), (), "photos.jsonl ends within a line"),
    "pipe": (make_pipe, (), "not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_baseline_that_does_not_fit_is_refused(
    diff: Any, photos: Path, baseline: Path, out: Path, looks: Looks, fault: str
) -> None:
    change, flags, words = REFUSED[fault]
    change(baseline, photos)
    refused(diff("--baseline", f"{baseline}/", "--candidate", "large", *flags), out, words)

    assert not looks.explained or fault == "other calibration"


def test_calibration_in_which_no_model_can_be_told_apart_is_refused(diff: Any, baseline: Path, out: Path) -> None:
    calibration_of(floor=(0.5, 0.5), random=(0.6, 0.6)).save(baseline)

    refused(diff("--baseline", baseline, "--candidate", "large"), out, "cannot tell two models apart")


def test_options_of_the_baseline_are_used_unless_others_are_named(
    diff: Any, looks: Looks, tmp_path: Path, out: Path
) -> None:
    base = tmp_path / "base"
    chosen = ("--method", "layercam", "--method", "smoothgrad:samples=4", "--layer", "a", "--top-k", "2")
    assert diff("--baseline", base, "--candidate", "tiny", "--accept", *chosen).exit_code == 0
    for flags in ((), ("--layer", "a", "--top-k", "2"), chosen):
        looks.requests.clear()
        (out / "recordings/candidate/photos.jsonl").unlink(missing_ok=True)
        done = diff("--baseline", base, "--candidate", "large", *flags)

        assert done.exit_code == 0, done.output
        assert {tuple(method.name for method in each.methods) for each in looks.requests} == {
            ("layercam", "smoothgrad")
        }
        assert {each.methods[1].parameters["samples"].number for each in looks.requests} == {4}
        assert {tuple(each.layers) for each in looks.requests} == {("a",)}
    (out / "report.json").unlink()
    (out / "index.html").unlink()
    (out / "junit.xml").unlink()
    refused(diff("--baseline", base, "--candidate", "large", "--layer", "b"), out, "the layers differ")


def test_accepted_baseline_has_the_options_of_the_one_it_replaces(diff: Any, looks: Looks, tmp_path: Path) -> None:
    base = tmp_path / "base"
    for flags in (("--method", "layercam"), ()):
        assert diff("--baseline", base, "--candidate", "tiny", "--accept", *flags).exit_code == 0
    assert Recording.load(base).header.options["methods"] == [{"name": "layercam"}]
    looks.requests.clear()

    assert diff("--baseline", base, "--candidate", "tiny", "--accept", "--target", "0").exit_code == 0
    assert {request.targets[0].class_index for request in looks.requests} == {0}
    done = diff("--baseline", base, "--candidate", "tiny", "--accept")
    refused(done, base, "has targets of its own: name them")


def test_interrupted_diff_explains_only_the_rest(
    diff: Any, looks: Looks, photos: Path, out: Path, tmp_path: Path
) -> None:
    assert diff().exit_code == 0
    whole = report(out)
    out.rename(tmp_path / "whole")
    variants = len(looks.explained) - 2 * COUNT  # photos with noise
    known: dict[str, set[str]] = {"tiny": set(), "large": set()}
    for more in (7, COUNT, COUNT + variants + 6, 1 << 20):  # within the baseline, the calibration, and the candidate
        looks.explained.clear()
        looks.stop_after = more
        done = diff()
        assert not any(known[model] & set(names(looks, photos, model)) for model in known)
        for model, side in (("tiny", "baseline"), ("large", "candidate")):
            known[model] = recorded(out / "recordings" / side)
    assert done.exit_code == 0, done.output

    assert report(out) == whole
    assert known["tiny"] == known["large"] == {photo.name for photo in photos.iterdir()}


def recorded(folder: Path) -> set[str]:
    """Return the photos of an unfinished recording, after its last line was cut off halfway."""
    path = folder / recording.PHOTOS_FILE
    if not path.exists() or not path.stat().st_size:
        return set()
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < COUNT:
        os.truncate(path, path.stat().st_size - len(lines.pop()) // 2)
    return {json.loads(line)["photo"] for line in lines}


def test_photo_that_is_recorded_is_not_explained_again(diff: Any, looks: Looks, photos: Path, out: Path) -> None:
    sample = ("--sample", COUNT)
    diff(*sample)
    first = contents(out)
    looks.explained.clear()

    assert diff(*sample).exit_code == 0
    assert looks.explained == []
    assert {name: data for name, data in contents(out).items() if name != "index.html"} == {
        name: data for name, data in first.items() if name != "index.html"
    }
    write_photo(photos / "005.png", 99)
    assert diff(*sample).exit_code == 0
    assert names(looks, photos, "large") == ["005.png"]
    # The new photo is in the sample of the calibration, which is measured again.
    assert len([model for model, _ in looks.explained if model == "tiny"]) > COUNT


@pytest.mark.usefixtures("compared")
def test_other_weights_are_explained_anew(diff: Any, looks: Looks, out: Path) -> None:
    edit(out / "recordings/candidate/recording.json", digest="00")

    assert diff().exit_code == 0
    assert [model for model, _ in looks.explained] == ["large"] * COUNT


@pytest.mark.usefixtures("compared")
def test_photos_of_an_earlier_diff_do_not_count(diff: Any, photos: Path, out: Path) -> None:
    (photos / "000.png").unlink()

    assert diff().exit_code == 0
    assert report(out)["photos"] == COUNT - 1


def test_interruption_is_one_line_and_no_report(diff: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Recording.append

    def interrupted(self: Recording, name: str, result: Any) -> None:
        if len(self.digests) == 5:
            raise KeyboardInterrupt
        append(self, name, result)

    monkeypatch.setattr(Recording, "append", interrupted)
    refused(diff(), out, "interrupted: run the same command again to go on")
    monkeypatch.undo()
    assert len(Recording.load(out / "recordings/baseline").digests) == 5


@pytest.mark.usefixtures("compared")
def test_report_of_an_earlier_run_is_not_taken_for_that_of_a_failed_one(diff: Any, out: Path, looks: Looks) -> None:
    looks.stop_after = 3

    refused(diff("--method", "layercam"), out, "the token has expired")


def test_report_that_cannot_be_made_leaves_no_part_of_it(diff: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> bytes:
        raise camserve.Internal("no")

    monkeypatch.setattr("camserve.diff.outputs.to_json", fail)
    refused(diff(), out, "no")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--baseline", "tiny", "--candidate", "other/"), "other is not a baseline: there is no such folder"),
        (("--baseline", "other/", "--candidate", "large"), "other is not a baseline: there is no such folder"),
        (("--baseline", "tiny@127.0.0.1:1", "--candidate", "large", "--timeout", "60"), "127.0.0.1:1"),
        (("--method", "gradcam", "--method", "gradcam"), "named twice"),
        (("--top-k", "99"), "top_k: 99 is not between 1 and 16"),
        (("--max-changed", "2"), "--max-changed"),
        (("--sample", "1"), "--sample"),
        (("--seed", "-1"), "--seed"),
    ],
)
def test_wrong_use_is_one_line(diff: Any, looks: Looks, out: Path, flags: Any, words: str) -> None:
    refused(diff(*flags), out, words)
    assert looks.explained == []


def test_missing_model_is_found_before_anything_is_explained(
    diff: Any, server: Any, refusal: Any, looks: Looks, out: Path
) -> None:
    server.refusals = [refusal(grpc.StatusCode.NOT_FOUND, 'unknown model "tiny"')]

    refused(diff(), out, 'unknown model "tiny"')
    assert looks.explained == []


def test_photos_that_are_not_there_are_one_line(run: Any, out: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "a.png").symlink_to(photos / "000.png")
    for path, words in {
        tmp_path / "missing.jpg": "missing.jpg' does not exist",
        tmp_path / "empty": f"no images in {tmp_path / 'empty'}",
        f"{tmp_path}/empty/*.jpg": "does not exist",
        "s3://bucket/photos": "s3://bucket/photos",
        tmp_path / "link": "a.png is a link out of its folder",
    }.items():
        refused(run("diff", path, *MODELS, "-o", out), out, words)
    refused(run("diff", photos, photos / "000.png", *MODELS, "-o", out), out, "have the same name")
    refused(run("diff", photos, *MODELS), out, "Missing option '-o'")


VANISHING = {
    "tiny cannot explain 005.png: image: cannot read": (diff_run, "_digest"),
    "005.png: No such file or directory": (calibration, "_pixels"),
}
"""Errors, and the function after which a photo is deleted."""


@pytest.mark.parametrize("words", VANISHING)
def test_photo_that_goes_away_is_one_line(diff: Any, out: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    module, name = VANISHING[words]
    read: Any = getattr(module, name)

    def read_and_delete(path: Path, *rest: Any) -> Any:
        result = read(path, *rest)
        if path.name == "005.png":
            path.unlink()
        return result

    monkeypatch.setattr(module, name, read_and_delete)
    refused(diff("--sample", COUNT), out, words)


def test_photo_that_changes_meanwhile_is_one_line(
    diff: Any, photos: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = diff_run.record

    def change_and_record(client: Any, recording: Recording, *rest: Any) -> Any:
        if recording.folder.name == "candidate":
            write_photo(photos / "011.png", 99)
        return record(client, recording, *rest)

    monkeypatch.setattr(diff_run, "record", change_and_record)
    refused(diff(), out, "011.png changed while the photos were explained")


def test_photos_that_fail_are_named_and_may_be_left_out(diff: Any, looks: Looks, photos: Path, out: Path) -> None:
    looks.failing = {digest(photos / "002.png")}
    (photos / "text.jpg").write_bytes(b"no photo")
    refused(diff(), out, "tiny cannot explain 002.png and 1 more of 13 photos: the model fails")

    done = diff("--skip-failed")
    assert done.exit_code == 0, done.output
    assert "2 photos are left out" in done.stdout
    assert {(each["image"], each["side"]) for each in report(out)["failures"]} == {
        ("002.png", "baseline"),
        ("text.jpg", "baseline"),
    }
    assert report(out)["photos"] == COUNT - 1
    looks.failing.clear()
    assert diff("--skip-failed").exit_code == 0
    assert report(out)["photos"] == COUNT


def test_photos_that_fail_may_leave_too_few(diff: Any, looks: Looks, photos: Path, out: Path) -> None:
    looks.failing = {digest(photo) for photo in list(photos.iterdir())[: COUNT - rule.MIN_PHOTOS + 1]}

    refused(diff("--skip-failed"), out, "too few to say")


def test_boxes_measure_the_evidence_in_the_object(diff: Any, photos: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "boxes.json").write_text(json.dumps({"000.png": [0, 0, WIDTH / 2, HEIGHT]}))
    assert diff("--boxes", tmp_path / "boxes.json").exit_code == 0
    energies = {case["image"]: case["box_energy"] for case in report(out)["cases"]}
    with Image.open(photos / "000.png") as image:
        evidence = np.asarray(image.convert("L"), np.float64).reshape(GRID, HEIGHT // GRID, GRID, -1).mean((1, 3)) - 128
    positive = evidence.clip(min=0)

    # The map is interpolated onto the photo, which moves a little evidence over the edge of the box.
    assert energies["000.png"] == pytest.approx([positive[:, : GRID // 2].sum() / positive.sum()] * 2, abs=0.1)
    assert {energy for image, energy in energies.items() if image != "000.png"} == {None}


@pytest.mark.parametrize(
    "content", ["", "[]", "7", '{"a": 1}', '{"a": [1, 2]}', '{"a": "abcd"}', '{"a": null}', "[" * 9999]
)
def test_invalid_boxes_are_one_line(diff: Any, looks: Looks, out: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "boxes.json").write_text(content)

    refused(diff("--boxes", tmp_path / "boxes.json"), out, "box")
    os.truncate(tmp_path / "boxes.json", 1 << 30)
    refused(diff("--boxes", tmp_path / "boxes.json"), out, "it has more than 67,108,864 bytes")
    assert looks.explained == []


def test_two_folders_are_compared_without_a_server(diff: Any, looks: Looks, baseline: Path, server: Any) -> None:
    looks.dark = {"large"}
    other = baseline.with_name("other")
    assert diff("--baseline", other, "--candidate", "large", "--accept").exit_code == 0
    server.calls.clear()

    assert diff("--baseline", baseline, "--candidate", other).exit_code == 1
    assert diff("--baseline", baseline, "--candidate", baseline).exit_code == 0
    assert server.calls == []


def test_each_side_may_have_a_server_of_its_own(diff: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMSERVE_SERVER", "127.0.0.1:1")  # nobody answers there
    sides = ("--baseline", f"tiny@{server.address}", "--candidate", f"large@{server.address}")
    done = diff(*sides)

    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"large@{server.address} and tiny@{server.address} look at the same places")


def test_summary_is_appended(diff: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert diff().exit_code == 0
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "summary.md"))
    assert diff().exit_code == 0

    assert (
        (tmp_path / "summary.md")
        .read_text()
        .startswith("before\n## large and tiny look at the same places on 12 photos\n")
    )


def test_second_run_in_a_folder_is_refused(diff: Any, looks: Looks, out: Path, baseline: Path) -> None:
    with dataset.locked(out):
        refused(diff(), out, f"another run uses {out}")
    with dataset.locked(baseline / ".new"):
        refused(diff("--baseline", baseline, "--candidate", "tiny", "--accept"), out, "another run uses")
    assert looks.explained == []


def test_hostile_names_of_photos_are_only_text(diff: Any, photos: Path, out: Path, looks: Looks) -> None:
    looks.dark = {"large"}
    hostile = [os.fsdecode(b"\xff.png"), "\x1b[2J.png", "line\nbreak.png", "<script>alert(1)<|`.png", "\u202egnp.png"]
    for index, name in enumerate(hostile):
        write_photo(photos / name, 50 + index)
    done = diff()

    assert done.exit_code == 1, done.output
    assert not set(done.output) & {"\x1b", "\u202e", "\udcff"}
    assert report(out)["photos"] == COUNT + len(hostile)
    assert {case["image"] for case in report(out)["cases"]} >= {"\ufffd.png", *hostile[1:]}
    assert b"<script>alert(1)" not in (out / "index.html").read_bytes()
    assert JUnitXml.fromfile(str(out / "junit.xml")).failures == COUNT + len(hostile) + 1
    assert diff().exit_code == 1


def test_accept_keeps_the_old_baseline_until_the_new_one_is_whole(
    diff: Any, looks: Looks, photos: Path, baseline: Path
) -> None:
    before = contents(baseline)
    looks.dark = {"large"}
    command = ("--baseline", baseline, "--candidate", "large", "--accept")
    (photos / "000.png").rename(photos / "0.png")
    for more in (COUNT - 1, SAMPLE):  # within the photos and the calibration
        looks.stop_after = len(looks.explained) + more
        refused(diff(*command), baseline, "the token has expired")
        kept = {name: data for name, data in contents(baseline).items() if not name.startswith(".new/")}
        assert kept == before
    (photos / "0.png").rename(photos / "000.png")
    looks.stop_after = 1 << 20
    done = diff(*command)

    assert done.stdout == f"{baseline} is the new baseline: 12 photos, explained by large\n"
    assert files(baseline) == set(before)
    assert list(Recording.load(baseline).digests) == sorted(photo.name for photo in photos.iterdir())
    assert diff("--baseline", baseline, "--candidate", "tiny").exit_code == 1
    assert diff("--baseline", baseline, "--candidate", "large").exit_code == 0


def test_accept_records_only_a_model_and_only_in_a_folder(diff: Any, baseline: Path, photos: Path, out: Path) -> None:
    before = contents(baseline)
    refused(diff("--baseline", baseline, "--candidate", baseline, "--accept"), out, "records a model, not a folder")
    refused(diff("--baseline", photos / "000.png", "--candidate", "tiny", "--accept"), out, "000.png is a file")

    assert contents(baseline) == before


@pytest.mark.usefixtures("compared")
def test_link_in_a_prepared_folder_is_not_written_through(diff: Any, out: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    elsewhere = tmp_path / "elsewhere"
    (out / "recordings/baseline").rename(elsewhere)
    kept = contents(elsewhere)
    for name in OUTPUTS:
        (out / name).unlink()
    (out / "recordings/baseline").symlink_to(elsewhere)
    refused(diff(), out, "is a link")
    (out / "recordings/baseline").unlink()
    elsewhere.rename(out / "recordings/baseline")
    for name in ("photos.jsonl", "recording.json", "calibration.json"):
        path = out / "recordings/baseline" / name
        path.unlink()
        path.symlink_to(victim)
        diff()
        path.unlink()
        path.write_bytes(kept[name])

    assert victim.read_text() == "precious"


def without_resolved_target(response: Any) -> None:
    response.explanations[0].ClearField("resolved_target")


def with_map_of_nothing(response: Any) -> None:
    response.explanations[0].heatmap.Clear()


def with_map_that_is_not_finite(response: Any) -> None:
    response.explanations[0].heatmap.data = np.full(GRID * GRID, np.nan, "<f4").tobytes()
    response.explanations[0].score = float("nan")


def with_one_more_explanation(response: Any) -> None:
    response.explanations.append(response.explanations[0])


def with_photo_of_no_size(response: Any) -> None:
    response.photo.width = response.photo.height = 0


def with_another_part(response: Any) -> None:
    response.photo.seen.left, response.photo.seen.right = response.photo.seen.right, response.photo.seen.left


def with_hostile_texts(response: Any) -> None:
    response.explanations[0].layer = "\x1b[2J\n| <script>"
    response.predictions[0].label = "\x1b[2J\n| <script>"


REPLIES: dict[str, tuple[Callable[[Any], object], int]] = {
    "no receipt": (lambda response: response.ClearField("receipt"), 2),
    "another photo": (lambda response: setattr(response.receipt, "image_sha256", "00" * 32), 2),
    "no explanation": (lambda response: response.ClearField("explanations"), 2),
    "no heatmap": (lambda response: response.explanations[0].ClearField("heatmap"), 2),
    "no predictions": (lambda response: response.ClearField("predictions"), 0),
    "no target": (without_resolved_target, 2),
    "empty map": (with_map_of_nothing, 2),
    "not finite": (with_map_that_is_not_finite, 2),
    "one more": (with_one_more_explanation, 2),
    "no size": (with_photo_of_no_size, 2),
    "another part": (with_another_part, 2),
    "hostile texts": (with_hostile_texts, 0),
}
"""Changes to each reply of a server, and the exit code if both models have them."""


@pytest.mark.parametrize("both", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reply", REPLIES)
def test_odd_server_makes_no_traceback(diff: Any, looks: Looks, server: Any, reply: str, both: bool) -> None:
    change, code = REPLIES[reply]

    def answer(request: Any, request_id: str = "id") -> Any:
        response = Looks.answer(looks, request, request_id)
        if both or request.model == "large":
            change(response)
        return response

    looks.answer = server.answer = answer  # type: ignore[method-assign]  # for this test
    done = diff()

    assert isinstance(done.exception, SystemExit | None), done.exception
    assert done.exit_code == code if both else done.exit_code in (0, 1, 2)
    assert len(done.stderr.splitlines()) == (done.exit_code == 2)
    assert "\x1b" not in done.output


@pytest.mark.parametrize("leak", [False, True])
def test_memory_does_not_grow_with_the_photos(tmp_path: Path, leak: bool) -> None:
    for name in ("a", "b"):
        record_maps(tmp_path / name)
    many, few = fork_server.call(functools.partial(peaks_of_report, leak=leak), tmp_path)
    # The further photos have maps of 10 × 2 × 25 kB; a case has a few numbers.
    assert (many - few > (MANY - FEW) * SIDE * SIDE * 4 / 2) == leak


SIDE, FEW, MANY = 80, 10, 20


def record_maps(folder: Path) -> None:
    rng = np.random.default_rng(0)
    recorded = Recording.create(folder, HEADER)
    for index in range(MANY):
        recorded.append(f"{index}.jpg", result_of(rng.normal(size=(SIDE, SIDE)).astype(np.float32)))
    recorded.close()


def peaks_of_report(folder: Path, *, leak: bool) -> list[int]:
    """Return the most bytes that comparing many photos, and few, allocates."""
    rule._RESAMPLES = 10  # in a process of its own
    if leak:
        kept: list[Any] = []
        read = Recording.photo
        Recording.photo = lambda self, name: (kept.append(read(self, name)), kept[-1])[1]  # type: ignore[method-assign]  # in a process of its own
    sides = tuple((name, Recording.load(folder / name)) for name in ("a", "b"))
    measured = calibration_of()

    def report(count: int) -> None:
        compare.report(sides, measured, [f"{index}.jpg" for index in range(count)], DiffSettings())

    report(FEW)  # what is cached is allocated now
    return [fork_server.allocating(report, count)[1] for count in (MANY, FEW)]


def test_calibration_is_that_of_the_model(baseline: Path) -> None:
    found = calibration.load(baseline)
    assert found is not None
    (method,) = found.methods

    assert (method.method, method.layer) == ("gradcam", "features")
    assert len(method.noise) >= SAMPLE
    assert all(0.9 < value <= 1 for value in method.noise)
    assert method.random == (0.25,) * SAMPLE  # as the fake server says
