"""Outputs for programs and CI are what their parsers read, and no text in them is more than text."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from junitparser import Failure as JUnitFailure
from junitparser import JUnitXml
from markdown_it import MarkdownIt

from camserve import Prediction, Verdict
from camserve.diff import outputs
from camserve.diff.values import Answer, Change, Failure, Interval
from client.diff import reports

if TYPE_CHECKING:
    from pathlib import Path

    from camserve.diff.values import Case, Report

EVIL = (
    "</failure><script>alert(1)</script>",
    "| a | b |\n|---|---|",
    "[click](javascript:alert(1)) ![x](https://evil.example/x.png) <https://evil.example>",
    "https://evil.example www.evil.example me@evil.example @team #1 $x^2$",
    "\x1b[2J\x1b]0;title\x07\x9b2J",
    "line\nbreak\r\n\n# heading\n\n- list\n1. one\n```\ncode",
    "\u202egpj.exe \u2066 \U000e0041",
    "\udcff\ud800",
    "]]> &amp; &lt; \" ' ` \\| \\\\| \\",
    "**bold** _it_ ~~no~~ <!-- c --> :smile:",
    "\0\ufffe\uffff",
    "x" * 9000,
)
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # a terminal would act on these


def hostile(text: str) -> Report:
    """Return a report that has a text in place of every other one."""
    prediction = Prediction(text, 0.5, 3, 1.0)
    answer = Answer(prediction, 1.0, 0.5, Verdict.OK)
    names = {"image": text, "method": text, "layer": text, "target": text, "places": (text, text)}
    cases = [
        replace(reports.case_of(index, change=change), baseline=answer, candidate=answer, **names)
        for index, change in enumerate(Change)
    ]
    check = replace(reports.check_of("gradcam", "a"), method=text, layer=text, reasons=(text,))
    group = replace(reports.groups_of(cases)[0], title=text)
    plain = reports.report_of(5)
    sides = (
        replace(side, name=text, model=text, weights=text, versions={text: text})
        for side in (plain.baseline, plain.candidate)
    )
    baseline, candidate = sides
    return replace(
        plain, baseline=baseline, candidate=candidate, cases=tuple(cases), checks=(check,), groups=(group,),
        failures=(Failure(text, "candidate", text),), reasons=(text,),
    )  # fmt: skip


def strict(data: bytes) -> Any:
    """Parse JSON as a strict parser does: UTF-8 without surrogates, and no NaN."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    text = data.decode("utf-8")
    content = json.loads(text, parse_constant=refuse)
    json.dumps(content, ensure_ascii=False).encode("utf-8")
    return content


def junit(report: Report, folder: Path) -> Any:
    (folder / "junit.xml").write_bytes(outputs.to_junit(report))
    (suite,) = JUnitXml.fromfile(str(folder / "junit.xml"))
    return suite


def markdown(report: Report) -> list[Any]:
    return MarkdownIt("commonmark").enable("table").parse(outputs.to_markdown(report))


def outline(tokens: list[Any]) -> list[str]:
    """Return the kinds of all elements, those inside of a line too."""
    return [kind for token in tokens for kind in (token.type, *(child.type for child in token.children or ()))]


def texts(tokens: list[Any]) -> list[str]:
    """Return the text of each line and cell."""
    return ["".join(child.content for child in token.children) for token in tokens if token.type == "inline"]


def test_json_has_every_number_of_the_report() -> None:
    report = reports.report_of(10)
    content = strict(outputs.to_json(report))

    assert content["format"] == outputs.FORMAT
    assert (content["changed"], content["reasons"]) == (True, list(report.reasons))
    assert [check["median"]["low"] for check in content["checks"]] == [check.median.low for check in report.checks]
    assert [group["cases"] for group in content["groups"]] == [list(group.cases) for group in report.groups]
    for plain, case in zip(content["cases"], report.cases, strict=True):
        assert (plain["image"], plain["method"], plain["change"]) == (case.image, case.method, str(case.change))
        assert plain["spearman"] == case.comparison.spearman
        assert plain["candidate"]["prediction"]["label"] == case.candidate.prediction.label  # type: ignore[union-attr]


def test_undefined_numbers_are_null_in_json() -> None:
    undefined = Interval(math.nan, math.inf, -math.inf)
    case = reports.case_of(0, position=math.nan)
    content = strict(outputs.to_json(replace(reports.report([case]), predictions_changed=undefined)))

    assert content["predictions_changed"] == {"value": None, "low": None, "high": None}
    assert content["cases"][0]["position"] is None


def test_junit_has_a_test_for_each_case_and_check(tmp_path: Path) -> None:
    report = reports.report_of(10)
    suite = junit(report, tmp_path)
    tests = list(suite)
    failed = [test for test in tests if any(isinstance(result, JUnitFailure) for result in test.result)]
    changed = sum(case.change is not Change.NONE for case in report.cases)

    assert (suite.tests, len(tests)) == (len(report.cases) + len(report.checks) + 1,) * 2
    assert (suite.failures, len(failed)) == (changed + 2,) * 2  # and a check, and the predicted classes
    assert {test.name for test in tests if test.classname == "check"} == {
        "gradcam layer4",
        "smoothgrad",
        "predicted classes",
    }
    messages = [test.result[0].message for test in failed if "photo-0.jpg" in test.name]
    assert all(message.startswith("looks elsewhere: from the ") for message in messages)


def test_findings_among_those_that_may_change_fail_no_test(tmp_path: Path) -> None:
    few = Interval(0.01, 0, 0.03)
    check = reports.check_of("gradcam", "layer4", changed=False)
    report = reports.report_of(10, reasons=(), checks=(check,), predictions_changed=few)
    suite = junit(report, tmp_path)

    assert (suite.failures, suite.errors) == (0, 0)
    described = [test.system_out for test in suite if test.system_out]
    assert len(described) == sum(case.change is not Change.NONE for case in report.cases)


def test_summary_is_a_heading_with_reasons_and_tables() -> None:
    report = reports.report_of(10)
    tokens = markdown(report)
    rows = [token.type for token in tokens].count("tr_open")

    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h2"]
    assert rows == 2 + len(report.checks) + len(report.groups)
    found = texts(tokens)
    assert outputs.headline(report) in found
    assert all(reason in found for reason in report.reasons)
    assert all(cell in found for row in outputs.check_rows(report) for cell in row)


def test_photos_that_are_left_out_are_counted() -> None:
    one, failures = reports.report_of(10), tuple(Failure(f"{index}.jpg", "candidate", "no") for index in range(1234))

    assert outputs.left_out(one).startswith("1 photo is left out")
    assert outputs.left_out(replace(one, failures=failures)).startswith("1,234 photos are left out")
    assert "left out" not in outputs.to_markdown(replace(one, failures=()))


@pytest.mark.parametrize("text", EVIL)
def test_hostile_text_is_only_text_in_json(text: str) -> None:
    data = outputs.to_json(hostile(text))
    content = strict(data)

    assert not UNSAFE.search(data.decode().replace("\x7f", "").translate(dict.fromkeys(range(0x80, 0xA0))))
    readable = re.sub("[\ud800-\udfff]", "\ufffd", text)
    assert {case["image"] for case in content["cases"]} == {readable}
    assert content["failures"][0]["message"] == readable


@pytest.mark.parametrize("text", EVIL)
def test_hostile_text_is_only_text_in_junit(text: str, tmp_path: Path) -> None:
    report, plain = hostile(text), hostile("plain")
    suite = junit(report, tmp_path)
    data = (tmp_path / "junit.xml").read_bytes().decode("utf-8")

    assert not UNSAFE.search(data)
    assert [(len(test.result), bool(test.system_out)) for test in suite] == [
        (len(test.result), bool(test.system_out)) for test in junit(plain, tmp_path)
    ]
    assert re.findall("<[a-z/?-]+", data) == re.findall("<[a-z/?-]+", outputs.to_junit(plain).decode())


@pytest.mark.parametrize("text", EVIL)
def test_hostile_text_is_only_text_in_markdown(text: str) -> None:
    tokens = markdown(hostile(text))

    assert outline(tokens) == outline(markdown(hostile("plain")))
    assert not any(UNSAFE.search(found) for found in texts(tokens))
    expected = outputs.brief(text)
    # Spaces around the text of a cell are no part of it.
    assert [found for found in texts(tokens) if found.strip() == expected.strip()]
    summary = outputs.to_markdown(hostile(text))
    assert not re.search(r"(?<!\\)[<@$:]|www\.", summary)  # GitHub makes links of addresses, too


def test_planted_markup_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_markdown", str)
    monkeypatch.setattr(outputs, "_xml", str)

    assert outline(markdown(hostile(EVIL[2]))) != outline(markdown(hostile("plain")))
    assert UNSAFE.search(outputs.to_junit(hostile("\x1b[2J")).decode())


@pytest.mark.parametrize("change", Change)
def test_case_is_described_in_a_few_words(change: Change) -> None:
    described: Case = reports.case_of(0, change=change, places=("top", "left"))
    words = {
        Change.PREDICTION: "tabby (80%) becomes tabby (80%)",
        Change.VERDICT: "OK becomes OK",
    }.get(change, "from the top to the left, rank correlation ")

    assert outputs.describe(described).startswith(words)
