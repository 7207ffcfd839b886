"""A recording has what the server sent, goes on after any interruption, and refuses a damaged file in words."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from camserve import (
    Box,
    FailedPrecondition,
    InvalidArgument,
    Method,
    Picture,
    Prediction,
    Verdict,
    finer,
    mask,
    segment,
    similarity,
)
from camserve._codec.explain import explain_request
from camserve._codec.targets import target_json
from camserve.diff import calibration, lines, recording
from camserve.diff.recording import Header, Recording
from client.diff.looks import DIGEST, HEADER, WHOLE, calibration_of, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAP = np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4)
NAMES = ("a.jpg", "sub/b.jpg", "\udcff\n<c>.jpg")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of three photos, with a calibration."""
    made = record(tmp_path / "base", *NAMES)
    calibration_of().save(made.folder)
    return made.folder


def record(folder: Path, *names: str, header: Header = HEADER) -> Recording:
    made = Recording.create(folder, header)
    for index, name in enumerate(names):
        made.append(name, result_of(MAP * (index + 1)))
    made.close()
    return made


def decoded(result: Any) -> lines.RecordedPhoto:
    return lines.decode(lines.encode("a.jpg", result), "here")


def test_line_has_all_that_a_comparison_needs() -> None:
    object_box = Prediction("dog", 0.5, 1, 1.5, Box(1, 2, 3, 4), 0.25)
    picture = Picture("jpeg", b"\xff\xd8", 2, 1)
    result = result_of(MAP, MAP + 1, target=object_box, verdict=Verdict.OK, overlay_picture=picture)
    found = decoded(result)

    assert (found.name, found.sha256, found.photo) == ("a.jpg", DIGEST, WHOLE)
    assert (found.predictions, found.thumbnail) == (result.predictions, b"\xff\xd8")
    for one, other in zip(found.explanations, result.explanations, strict=True):
        assert (one.method, one.layer, one.title, one.target) == (other.how, other.layer, other.title, object_box)
        assert (one.score, one.verdict, one.photo) == (other.score, other.verdict, other.photo)
        assert one.receipt.to_json() == replace(other.receipt, heatmap=None).to_json()
        np.testing.assert_allclose(one.heatmap, other.heatmap, rtol=2**-11, atol=0)


@given(
    npst.arrays(np.float32, npst.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.floats(width=32)),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e6, 1e30]),
)
@settings(max_examples=60, deadline=None)
def test_map_of_any_magnitude_is_rounded_to_three_digits(values: Any, scale: float) -> None:
    with np.errstate(all="ignore"):
        heatmap = values * np.float32(scale)
    finite = np.isfinite(heatmap)
    largest = float(np.abs(heatmap[finite]).max(initial=0))

    with np.errstate(all="raise", under="ignore"):
        found = decoded(result_of(heatmap)).explanations[0].heatmap

    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[~finite], heatmap[~finite])
    tolerance = largest * 2**-24 + np.finfo(np.float32).tiny * 2**-11
    np.testing.assert_allclose(found[finite], heatmap[finite], rtol=2**-11 + 2**-22, atol=tolerance)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e-44, 3e38])
def test_map_of_one_odd_value_comes_back(number: float) -> None:
    heatmap = np.full((1, 1), number, np.float32)

    np.testing.assert_array_equal(decoded(result_of(heatmap)).explanations[0].heatmap, heatmap)


def test_targets_are_those_of_the_first_method() -> None:
    kinds = [0, finer(1, 0, 2), segment(1, (1, 2, 3, 4)), similarity(b"\xff\xd8\xff"), mask(1, b"\x89PNG")]

    message = explain_request(targets=kinds)
    resolved = [target_json(target) for target in message.targets]
    explanations = [
        replace(each, method=method, receipt_or_none=replace(each.receipt, target=target))
        for method in ("gradcam", "layercam")
        for target, each in zip(resolved, result_of(*[MAP] * len(resolved)).explanations, strict=True)
    ]
    found = decoded(replace(result_of(MAP), explanations=tuple(explanations)))
    again = explain_request(targets=found.targets)

    assert list(again.targets) == list(message.targets)


def test_photos_are_found_by_name(folder: Path) -> None:
    loaded = Recording.load(folder)

    assert (loaded.header, loaded.digests) == (HEADER, dict.fromkeys(NAMES, DIGEST))
    for index, name in enumerate(NAMES):
        np.testing.assert_allclose(loaded.photo(name).explanations[0].heatmap, MAP * (index + 1), rtol=2**-11)


def test_photo_recorded_again_replaces_the_first(folder: Path) -> None:
    made = Recording.create(folder, HEADER)
    made.append("a.jpg", result_of(MAP * 9, digest="00" * 32))
    made.close()

    loaded = Recording.load(folder)
    assert loaded.digests["a.jpg"] == "00" * 32
    np.testing.assert_allclose(loaded.photo("a.jpg").explanations[0].heatmap, MAP * 9, rtol=2**-11)


def test_compacted_recording_has_the_last_line_of_each_photo(folder: Path) -> None:
    made = Recording.create(folder, HEADER)
    made.append("a.jpg", result_of(MAP * 9))
    made.close()
    made.compact(["sub/b.jpg", "a.jpg"])

    loaded = Recording.load(folder)
    assert list(loaded.digests) == ["sub/b.jpg", "a.jpg"]
    np.testing.assert_allclose(loaded.photo("a.jpg").explanations[0].heatmap, MAP * 9, rtol=2**-11)
    assert (folder / recording.PHOTOS_FILE).read_bytes().count(b"\n") == 2


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_recording_cut_off_anywhere_goes_on(cut: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = record(Path(temporary) / "base", *NAMES).folder
        path = folder / recording.PHOTOS_FILE
        whole = path.read_bytes()
        end = cut % (len(whole) + 1)
        os.truncate(path, end)
        complete = whole[:end].count(b"\n")

        made = Recording.create(folder, HEADER)
        assert list(made.digests) == list(NAMES[:complete])
        for index in range(complete, len(NAMES)):
            made.append(NAMES[index], result_of(MAP * (index + 1)))
        made.close()

        assert path.read_bytes() == whole
        assert list(Recording.load(folder).digests) == list(NAMES)


def test_unfinished_recording_is_not_a_baseline(folder: Path) -> None:
    path = folder / recording.PHOTOS_FILE
    os.truncate(path, path.stat().st_size - 1)
    before = path.read_bytes()

    with pytest.raises(InvalidArgument, match=r"photos\.jsonl ends within a line: record it again"):
        Recording.load(folder)
    assert path.read_bytes() == before


def test_recording_of_another_model_is_started_anew(folder: Path) -> None:
    other = replace(HEADER, digest="00" * 32)
    made = record(folder, "a.jpg", header=other)

    assert list(made.digests) == ["a.jpg"]
    assert Recording.load(folder).header == other
    assert calibration.load(folder) is None


def test_names_of_options_in_an_error_are_those_of_the_client() -> None:
    for option, (name, words) in {"methods": ("methods", "methods"), "top_k": ("topK", "numbers of explained")}.items():
        with pytest.raises(FailedPrecondition, match=f"the {words}.* differ: the baseline has"):
            HEADER.check_options({**HEADER.options, name: "x" * 999}, [option])
    HEADER.check_options({**HEADER.options, "layers": ["x"]}, ["methods"])


def test_models_with_other_classes_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match="different numbers of classes, 2 and 3"):
        HEADER.check_classes(replace(HEADER, classes=3))
    with pytest.raises(FailedPrecondition, match="different labels"):
        HEADER.check_classes(replace(HEADER, labels="00"))


def test_maps_of_single_channels_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="leave out per_channel"):
        recording.plain_options({"methods": [Method("saliency", per_channel=[1])]})


@pytest.mark.parametrize("twice", [{"methods": ["gradcam", "gradcam"]}, {"layers": ["a", "a"]}])
def test_method_or_layer_named_twice_is_refused(twice: Any) -> None:
    with pytest.raises(InvalidArgument, match="named twice"):
        recording.plain_options(twice)
    recording.plain_options({"methods": ["gradcam", "layercam"], "layers": ["a", "b"]})


def test_options_come_back_from_the_header() -> None:
    given: Any = {"methods": [("smoothgrad", {"samples": 4.0, "finish": "max"})], "layers": ["a", "b"], "fusion": "max"}
    header = replace(HEADER, options=recording.plain_options({**given, "top_k": 3}))

    assert recording.plain_options(recording.options_of(header)) == header.options


# Faults of each file, as a function of its content, with a part of the error.
HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (
        lambda content: {**content, "format": "camserve recording 2"},
        "this client reads 'camserve recording 1'",
    ),
    "other": (lambda content: {**content, "format": "camserve receipt 1"}, "is not a recording"),
    "numbered": (lambda content: {**content, "format": 7}, "is not a recording"),
    "lacking": (lambda content: {key: content[key] for key in content if key != "digest"}, "is damaged: its fields"),
    "more": (lambda content: {**content, "more": 1}, "is damaged: its fields"),
    "typed": (lambda content: {**content, "classes": "2"}, "is damaged: its fields"),
    "list": (lambda content: [content], "is damaged: it is not a JSON object"),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_invalid_header_is_refused(folder: Path, fault: str) -> None:
    change, words = HEADERS[fault]
    path = folder / recording.HEADER_FILE
    path.write_text(json.dumps(change(json.loads(path.read_text()))))

    with pytest.raises(InvalidArgument, match=words) as caught:
        Recording.load(folder)
    assert str(path) in caught.value.message


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {key: value for key, value in content.items() if key != name}


def _map(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(content: dict[str, Any]) -> Any:
        content["explanations"][0]["map"] |= changes
        return content

    return change


def _explanation(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(content: dict[str, Any]) -> Any:
        content["explanations"][0] |= changes
        return content

    return change


LINES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no predictions": (_without("predictions"), "it has no 'predictions'"),
    "no thumbnail": (_without("thumbnail"), "it has no 'thumbnail'"),
    "no explanation": (lambda content: {**content, "explanations": []}, "it has no explanation"),
    "odd explanations": (lambda content: {**content, "explanations": {"a": 1}}, "damaged"),
    "odd receipt": (_explanation(receipt=1), "not a camserve receipt"),
    "no layer": (_explanation(layer=None, map=None), "damaged"),
    "no width": (lambda content: {**content, "geometry": {**content["geometry"], "width": 0}}, "geometry"),
    "endless": (lambda content: {**content, "geometry": {**content["geometry"], "seen": dict.fromkeys(
        ("left", "top", "right", "bottom"), float("inf"))}}, "geometry"),
    "empty map": (_map(height=0, width=0, data=""), "a map is invalid"),
    "negative sides": (_map(height=-3, width=-4), "a map is invalid"),
    "short map": (_map(height=99), "a map is invalid"),
    "huge map": (_map(height=10**400), "damaged"),
    "no number": (_map(scale=float("nan")), "a map is invalid"),
    "scale of zero": (_map(scale=0), "a map is invalid"),
    "huge scale": (_map(scale=1e300), "a map is invalid"),
    "list of scales": (_map(scale=[1, 2]), "damaged"),
    "no base64": (_map(data="?"), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LINES)
def test_damaged_line_is_refused_with_its_place(folder: Path, fault: str) -> None:
    change, words = LINES[fault]
    path = folder / recording.PHOTOS_FILE
    written = path.read_bytes().splitlines(keepends=True)
    written[1] = json.dumps(change(json.loads(written[1]))).encode() + b"\n"
    path.write_bytes(b"".join(written))

    loaded = Recording.load(folder)
    loaded.photo("a.jpg")
    with pytest.raises(InvalidArgument, match=words) as caught:
        loaded.photo("sub/b.jpg")
    assert f"{path}, line 2, is damaged" in caught.value.message


@pytest.mark.parametrize("line", [b"", b"{", b"\xff", b"[1]", b"null", b'{"photo": 1}', b'{"photo": "a"}', b"[" * 9999])
def test_line_that_names_no_photo_is_refused_with_its_place(folder: Path, line: bytes) -> None:
    path = folder / recording.PHOTOS_FILE
    path.write_bytes(path.read_bytes() + line + b"\n")

    for open_recording, advice in (
        (Recording.load, ""),
        (lambda where: Recording.create(where, HEADER), "to start again"),
    ):
        with pytest.raises(InvalidArgument, match=f"is damaged.*{advice}") as caught:
            open_recording(folder)
        assert f"{path}, line 4, is damaged" in caught.value.message


CALIBRATIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "list": lambda content: [content],
    "text": lambda content: content["format"],
    "number": lambda _: 7,
    "newer": lambda content: {**content, "format": "camserve calibration 2"},
    "no methods": lambda content: {key: content[key] for key in content if key != "methods"},
    "nan": lambda content: {**content, "methods": [{**content["methods"][0], "random": [float("nan")]}]},
    "huge": lambda content: {**content, "methods": [{**content["methods"][0], "random": [10**400]}]},
    "text for numbers": lambda content: {**content, "methods": [{**content["methods"][0], "random": "ab"}]},
    "infinite seed": lambda content: {**content, "seed": float("inf")},
    "odd share": lambda content: {**content, "predictions_changed": float("nan")},
}


@pytest.mark.parametrize("fault", CALIBRATIONS)
def test_damaged_calibration_is_refused(folder: Path, fault: str) -> None:
    path = folder / recording.CALIBRATION_FILE
    path.write_text(json.dumps(CALIBRATIONS[fault](json.loads(path.read_text()))))

    with pytest.raises(InvalidArgument, match=r"calibration\.json is damaged"):
        calibration.load(folder)


def test_line_without_an_end_is_not_read_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / recording.PHOTOS_FILE
    monkeypatch.setattr(lines, "MAX_BYTES", max(map(len, path.read_bytes().splitlines(keepends=True))))
    assert len(Recording.load(folder).digests) == 3
    whole = path.stat().st_size
    os.truncate(path, 1 << 30)

    with pytest.raises(InvalidArgument, match="ends within a line"):
        Recording.load(folder)
    Recording.create(folder, HEADER)
    assert path.stat().st_size == whole


@pytest.mark.parametrize("name", [recording.HEADER_FILE, recording.CALIBRATION_FILE])
def test_large_file_of_a_recording_is_not_read(folder: Path, name: str) -> None:
    os.truncate(folder / name, 1 << 30)

    with pytest.raises(InvalidArgument, match=f"cannot read .*{name}: it has more than 67,108,864 bytes"):
        (recording.read_header if name == recording.HEADER_FILE else calibration.load)(folder)


def test_calibration_comes_back(folder: Path) -> None:
    assert calibration.load(folder) == calibration_of()
    measured = calibration_of("smoothgrad", "", (0.1, 1 / 3), (-1.0, 1e-9))
    measured.save(folder)
    assert calibration.load(folder) == measured


FILES = (recording.HEADER_FILE, recording.PHOTOS_FILE, recording.CALIBRATION_FILE)


def everything(folder: Path) -> None:
    """Read all of a recording."""
    loaded = Recording.load(folder)
    for name in loaded.digests:
        loaded.photo(name)
    recording.options_of(loaded.header)
    calibration.load(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_file_of_another_kind_is_refused(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink()
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path.name),
    }
    make[kind]()

    with pytest.raises(InvalidArgument, match=f"cannot read .*{name}: "):
        everything(folder)


@pytest.mark.parametrize("name", [recording.HEADER_FILE, recording.CALIBRATION_FILE])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"\0"])
def test_file_that_is_no_json_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)

    with pytest.raises(InvalidArgument, match=f"{name} is damaged"):
        everything(folder)


def test_photo_of_more_pixels_than_a_picture_may_have_is_refused() -> None:
    content = json.loads(lines.encode("a.jpg", result_of(MAP)))
    content["geometry"] |= {"width": 30_000, "height": 30_000}

    with pytest.raises(InvalidArgument, match="here is damaged: the photo has 30,000 x 30,000 pixels"):
        lines.decode(json.dumps(content).encode(), "here")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_json_in_a_line_makes_a_traceback(data: st.DataObject) -> None:
    content = json.loads(lines.encode("a.jpg", result_of(MAP)))
    place = data.draw(st.sampled_from(sorted(_paths(content))))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(JSON)
    with suppress(InvalidArgument):
        found = lines.decode(json.dumps(content).encode(), "here")
        assert all(each.heatmap.size and each.heatmap.ndim == 2 for each in found.explanations)


def _paths(content: Any, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*start, key)
        yield from _paths(value, (*start, key))


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_no_options_in_a_header_make_a_traceback(options: Any) -> None:
    header = replace(HEADER, options={"methods": options, "topK": 1})
    with suppress(InvalidArgument):
        recording.plain_options(recording.options_of(header))


def test_baseline_of_small_maps_is_small(tmp_path: Path) -> None:
    heatmap = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
    made = Recording.create(tmp_path, HEADER)
    for index in range(10):
        made.append(f"{index}.jpg", result_of(heatmap))
    made.close()

    assert (tmp_path / recording.PHOTOS_FILE).stat().st_size < 10 * 2048
    data = json.loads((tmp_path / recording.PHOTOS_FILE).read_text().splitlines()[0])["explanations"][0]["map"]["data"]
    assert len(base64.b64decode(data)) == 2 * heatmap.size
