"""A report as HTML is complete and small, executes no text of others, and is written without growing in memory."""

from __future__ import annotations

import base64
import functools
import json
import math
import re
import weakref
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fork_server
from camserve import Box, Prediction
from camserve._show import bundle
from camserve._show import html as show_html
from camserve.diff import html
from camserve.diff.html import Pictures
from camserve.diff.values import Failure, Group, Interval, Source
from client.diff import reports

if TYPE_CHECKING:
    from pathlib import Path

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--<script>' \" & \u2028"
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Page(HTMLParser):
    """A parsed report.

    Attributes:
        outline: Each element: its tag, and the names of its attributes.
        blocks: Text of each script with an id.
        marks: Style of each mark of the charts, by its class.
        text: All text outside of scripts and styles.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.outline: list[tuple[str, ...]] = []
        self.blocks: dict[str, str] = {}
        self.marks: dict[str, list[str]] = {}
        self.text = ""
        self._open = ""
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = dict(attrs)
        self.outline.append((tag, *values))
        self._open = tag
        if tag == "i" and "style" in values:
            self.marks.setdefault(values["class"], []).append(values["style"])
        if tag == "script":
            self._block = values.get("id", "")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 -- the name is HTMLParser's
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.blocks[self._block] = self.blocks.get(self._block, "") + data
        elif self._open != "style":
            self.text += data

    def data(self, name: str) -> Any:
        """Return the data of a block, which must be JSON without NaN."""
        return json.loads(self.blocks[name], parse_constant=refuse)


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Function that writes a report and returns its page."""

    def run(report: Any, pictures: Any = reports.pictures_of) -> Page:
        html.write(tmp_path / "index.html", report, pictures)
        return Page(tmp_path / "index.html")

    return run


def with_names(name: str) -> Any:
    """Return a report in which every text of others is ``name``."""
    person = Prediction(name, 0.5, 1, 2.0)
    first = reports.case_of(0)
    answer = replace(first.baseline, prediction=person)
    case = replace(first, image=name, method=name, layer=name, target=name, baseline=answer, candidate=answer)
    source = Source(name, name, name, name, {name: name})
    return reports.report(
        [case], baseline=source, candidate=source, checks=(replace(reports.check_of(name, name), reasons=(name,)),),
        groups=(Group(first.change, name, (0,), 1),), failures=(Failure(name, name, name),), reasons=(name,),
    )  # fmt: skip


def same_photo(_case: Any) -> Pictures:
    return Pictures(reports.jpeg(0), (reports.WHOLE, reports.WHOLE), reports.maps(0, "gradcam"))


def with_maps(*heatmaps: Any) -> Any:
    """Return a function that returns pictures with these maps."""
    return lambda _case: Pictures(b"", (reports.WHOLE, reports.WHOLE), heatmaps)


def decoded(plain: Any) -> Any:
    """Return a stored map."""
    integers = np.frombuffer(base64.b64decode(plain["data"]), np.int8).astype(np.float64)
    values = np.where(integers == -128, np.nan, integers * plain["scale"] / 127)
    return values.reshape(plain["height"], plain["width"])


def averaged(heatmap: Any, cells: int) -> Any:
    """Return the means over ``cells`` equal parts of each axis."""
    for axis in (0, 1):
        fine = np.repeat(np.asarray(heatmap, np.float64), cells, axis)  # now each part has whole cells
        heatmap = np.stack([part.mean(axis) for part in np.split(fine, cells, axis)], axis)
    return heatmap


def test_hostile_names_neither_end_the_script_nor_become_elements(written: Any) -> None:
    hostile = written(with_names(EVIL), same_photo)
    harmless = written(with_names("tabby"), same_photo)

    assert hostile.outline == harmless.outline
    assert all("<" not in block for name, block in hostile.blocks.items() if name)
    entry = hostile.data("index")[0]
    assert {entry["image"], entry["method"], entry["layer"], entry["target"], *entry["predictions"]} == {EVIL}


def test_comparison_of_outlines_finds_a_name_that_is_not_escaped(written: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("camserve.diff.view.elements.escape", str)
    hostile = written(with_names(EVIL), same_photo)
    harmless = written(with_names("tabby"), same_photo)

    assert hostile.outline != harmless.outline


def test_name_that_is_no_unicode_is_written(written: Any) -> None:
    page = written(with_names("\udce9.jpg"), same_photo)

    assert page.data("index")[0]["image"] == "\udce9.jpg"


def test_thumbnail_is_stored_once_per_photo(written: Any) -> None:
    page = written(reports.report_of(3))

    stored = {name: block for name, block in page.blocks.items() if name.startswith("photo-")}
    entries = page.data("index")
    assert len(entries) == 6
    assert len(stored) == 3
    for entry in entries:
        number = int(re.findall(r"\d+", entry["image"])[0])
        thumbnail = page.data(f"photo-{entry['photo']}")
        assert base64.b64decode(thumbnail) == reports.jpeg(number)
        assert page.source.count(thumbnail) == 1


def test_photo_without_a_thumbnail_gets_that_of_its_next_case(written: Any) -> None:
    thumbnails = iter((b"", b"jpeg"))
    report = reports.report([reports.case_of(0), reports.case_of(0, "smoothgrad", "")])
    page = written(report, lambda case: replace(reports.pictures_of(case), thumbnail=next(thumbnails)))

    assert base64.b64decode(page.data("photo-0")) == b"jpeg"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_write_leaves_no_file_and_keeps_the_old_one(tmp_path: Path, error: Any) -> None:
    old = tmp_path / "index.html"
    old.write_text("old")
    calls = iter(range(3))

    def pictures(case: Any) -> Pictures:
        if next(calls) == 2:
            raise error
        return reports.pictures_of(case)

    with pytest.raises(error):
        html.write(old, reports.report_of(3), pictures)

    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert old.read_text() == "old"


def test_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "index.html"
    other.write_text("mine")
    path.symlink_to(other)

    html.write(path, reports.report_of(1), reports.pictures_of)

    assert other.read_text() == "mine"
    assert not path.is_symlink()


class Lender:
    """Source of pictures that counts how many of its maps were alive at the same time before it returned the next."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.most_alive = 0
        self._maps: list[weakref.ref[Any]] = []

    def __call__(self, case: Any) -> Pictures:
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._maps))
        self.asked.append(case)
        heatmaps = (np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))
        self._maps += map(weakref.ref, heatmaps)
        return Pictures(b"", (reports.WHOLE, reports.WHOLE), heatmaps)


def test_pictures_are_asked_for_one_at_a_time_and_not_kept(written: Any) -> None:
    lender = Lender()
    report = reports.report_of(5)
    written(report, lender)

    assert lender.asked == list(report.cases)
    assert lender.most_alive == 0


def test_count_of_living_maps_sees_pictures_that_are_kept(written: Any) -> None:
    lender, kept = Lender(), []

    def keeping(case: Any) -> Pictures:
        kept.append(lender(case))
        return kept[-1]

    written(reports.report_of(5), keeping)

    assert lender.most_alive == 2 * 9


def peak_bytes(folder: Path, *, leak: bool) -> list[int]:
    """Return the most bytes that writing a report of many photos and one of few allocates."""
    kept: list[Pictures] = []

    def pictures_of(case: Any) -> Pictures:
        pictures = reports.pictures_of(case)
        if leak:
            kept.append(replace(pictures, thumbnail=bytes(bytearray(pictures.thumbnail))))
        return pictures

    html.write(folder / "few.html", reports.report_of(20, failures=()), pictures_of)  # what is cached is allocated now
    peaks = []
    for name, photos in (("many", 60), ("few", 20)):
        report = reports.report_of(photos, failures=())
        _, peak = fork_server.allocating(html.write, folder / f"{name}.html", report, pictures_of)
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("leak", [False, True])
def test_memory_does_not_grow_with_the_number_of_photos(tmp_path: Path, leak: bool) -> None:
    many, few = fork_server.call(functools.partial(peak_bytes, leak=leak), tmp_path)
    larger = (tmp_path / "many.html").stat().st_size - (tmp_path / "few.html").stat().st_size

    assert larger > 400_000
    assert (many - few > 40_000) == leak  # a name and a number of each photo


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (14, 9), (64, 64)])
def test_small_map_decodes_to_within_its_quantisation(written: Any, shape: Any) -> None:
    heatmap = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    page = written(reports.report([reports.case_of(0)]), with_maps(heatmap, 1e-30 * heatmap))
    stored, other = page.data("case-0")["maps"]

    step = np.abs(heatmap).max() / 127
    assert np.abs(decoded(stored) - heatmap).max() <= 0.5001 * step
    assert np.abs(decoded(other) - 1e-30 * heatmap).max() <= 0.5001e-30 * step


@pytest.mark.parametrize("side", [65, 100, 128, 224])
def test_large_map_is_averaged_to_64_cells(written: Any, side: int) -> None:
    heatmap = np.random.default_rng(0).normal(1, 1, size=(side, side)).astype(np.float32)
    page = written(reports.report([reports.case_of(0)]), with_maps(heatmap, heatmap[:, :5]))
    stored, narrow = page.data("case-0")["maps"]

    expected = averaged(heatmap, 64)
    assert np.abs(decoded(stored) - expected).max() <= 0.5001 * np.abs(expected).max() / 127
    assert (narrow["height"], narrow["width"]) == (64, 5)
    assert len(page.blocks["case-0"]) < 9000


def test_constant_maps_are_exact(written: Any) -> None:
    maps = (np.zeros((7, 7), np.float32), np.full((100, 100), -2.5, np.float32))
    zero, constant = written(reports.report([reports.case_of(0)]), with_maps(*maps)).data("case-0")["maps"]

    assert not decoded(zero).any()
    np.testing.assert_allclose(decoded(constant), np.full((64, 64), -2.5), rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_nan_and_spoil_no_others(written: Any, value: float) -> None:
    small = np.arange(49, dtype=np.float32).reshape(7, 7)
    small[2, 3] = value
    large = np.ones((128, 128), np.float32)
    large[10, 20] = value
    first, second = written(reports.report([reports.case_of(0)]), with_maps(small, large)).data("case-0")["maps"]

    assert np.argwhere(np.isnan(decoded(first))).tolist() == [[2, 3]]
    assert np.nanmax(np.abs(decoded(first) - np.where(np.isfinite(small), small, 0))) <= 0.5001 * 48 / 127
    assert np.argwhere(np.isnan(decoded(second))).tolist() == [[5, 10]]
    assert np.nanmax(np.abs(decoded(second) - 1)) == 0


def test_map_without_a_finite_value_is_stored(written: Any) -> None:
    heatmap = np.full((3, 3), np.nan, np.float32)
    stored = written(reports.report([reports.case_of(0)]), with_maps(heatmap, heatmap)).data("case-0")["maps"][0]

    assert np.isnan(decoded(stored)).all()


def test_numbers_that_are_undefined_are_null(written: Any) -> None:
    numbers: Any = dict.fromkeys(("spearman", "shift", "ssim", "pearson", "kl", "score_change"), math.nan)
    numbers |= {"iou_curve": (math.nan,) * 6, "box_energy": (math.nan, 0.5)}
    comparison = replace(reports.case_of(0).comparison, **numbers)
    case = reports.case_of(0, comparison=comparison, position=math.inf)
    nothing = Interval(math.nan, math.nan, math.nan)
    check = replace(reports.check_of("gradcam", ""), cases=0, median=nothing, floor=math.nan, ceiling=math.nan)
    page = written(reports.report([case], checks=(check,), predictions_changed=nothing))

    found = page.data("index")[0]["numbers"]
    assert [name for name, value in found.items() if value is not None] == ["probability_change"]
    assert page.data("case-0")["box_energy"] == [None, 0.5]
    assert "nan" not in page.text.lower()


def test_entry_has_the_numbers_of_its_case(written: Any) -> None:
    case = reports.case_of(0)
    comparison = replace(case.comparison, box_energy=(0.25, 0.75))
    page = written(reports.report([replace(case, comparison=comparison)]))

    found = page.data("index")[0]["numbers"]
    expected = {**{name: getattr(comparison, name) for name in found if hasattr(comparison, name)}}
    expected |= {"position": case.position, "box_change": 0.5}
    assert found == {name: pytest.approx(value, rel=1e-4) for name, value in expected.items()}


def test_policy_comes_before_all_that_it_governs(written: Any) -> None:
    page = written(reports.report_of(1))

    policy = page.source.index(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">')
    assert policy < min(page.source.index("<style"), page.source.index("<script"))
    outside = page.source.replace("http://www.w3.org/2000/svg", "")  # the name of a language
    assert "://" not in outside
    assert not re.search(r"\bimport\b|\bfetch\(|XMLHttpRequest|WebSocket", page.blocks[""])


def test_summary_says_all_without_a_script(written: Any) -> None:
    report = reports.report_of(10)
    page = written(report)

    assert "resnet50-v2 looks elsewhere than resnet50" in page.text
    assert "10 photos, 20 comparisons of maps: 4 look elsewhere, 4 with another prediction" in page.text
    named = [check.method for check in report.checks] + [group.title for group in report.groups]
    for text in (*report.reasons, *named, "0676ba610676", "11ad3fa611ad", "broken.jpg", "image: not a JPEG"):
        assert text in page.text
    assert "0676ba61" * 2 not in page.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "resnet50-v2 looks elsewhere than resnet50"),
        ({"checks": (), "reasons": ("31 % of the predictions changed",)}, "resnet50-v2 differs from resnet50"),
        ({"reasons": ()}, "No difference beyond the calibration"),
    ],
)
def test_headline_says_how_the_models_differ(written: Any, changes: Any, expected: str) -> None:
    assert f"<h1>{expected}</h1>" in written(reports.report_of(1, **changes)).source


def places(page: Page, kind: str) -> list[float]:
    """Return the positions of the marks of a kind, in percent of their axes."""
    return [float(re.findall(r"left:([\d.]+)%", style)[0]) for style in page.marks[kind]]


def test_marks_of_a_check_lie_at_their_values(written: Any) -> None:
    check = replace(reports.check_of("gradcam", ""), ceiling=-0.17)
    page = written(reports.report_of(1, checks=(check,)))

    def place(value: float) -> Any:  # the axis starts at -0.2
        return pytest.approx(100 * (value + 0.2) / 1.2, abs=0.01)

    assert places(page, "ceiling") == [place(-0.17)]
    assert places(page, "floor") == [place(check.floor)]
    assert places(page, "band") == [place(check.floor_limit)]
    assert places(page, "dot") == [place(check.median.value), pytest.approx(20)]
    assert places(page, "whisker") == [place(check.median.low), pytest.approx(12)]
    assert places(page, "allowed") == [pytest.approx(5)]


def test_report_of_nothing_is_complete(written: Any) -> None:
    page = written(reports.report([], checks=(), groups=(), failures=(), reasons=()))

    assert page.data("index") == []
    assert page.source.endswith("</html>\n")
    assert "could not" not in page.text


def test_box_of_the_object_has_the_evidence_of_both_maps(written: Any) -> None:
    case = reports.case_of(0)
    one, two = (reports.Side(heatmap, 1.0, reports.TABBY) for heatmap in reports.maps(0, "gradcam"))
    compared = reports.compare_explanations(one, two, Box(0, 0, 100, 150))
    page = written(reports.report([replace(case, comparison=compared)]))

    assert page.data("case-0")["box_energy"] == pytest.approx(compared.box_energy, rel=1e-4)


def undefined(script: str) -> list[str]:
    """Return the modules that a script uses before it defines them."""
    defined: set[str] = set()
    missing = []
    for line in script.splitlines():
        missing += [name for name in re.findall(r"^const \{.*\} = \$(\w+);$", line) if name not in defined]
        defined |= set(re.findall(r"^const \$(\w+) = ", line))
    return missing


@pytest.mark.parametrize("modules", [html._MODULES, show_html._NOTEBOOK_MODULES])
def test_script_defines_each_module_before_its_use(modules: Any) -> None:
    script = bundle.script(*modules)

    assert undefined(script) == []
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert "</script" not in script
    assert "<!--" not in script


def test_module_in_the_wrong_order_is_found() -> None:
    assert undefined(bundle.script(*reversed(html._MODULES))) != []
