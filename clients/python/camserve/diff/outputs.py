"""Outputs of a diff for programs and for CI: JSON, JUnit XML, Markdown, and tables for a terminal."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any, Final, cast

from camserve._core.text import brief
from camserve.diff.values import Change

if TYPE_CHECKING:
    from camserve.diff.values import Answer, Case, Group, Interval, Report

FORMAT: Final = "camserve diff 1"
CHECK_HEADINGS: Final = ("method", "layer", "maps", "rank correlation", "floor", "ceiling", "nearer to ceiling", "")
GROUP_HEADINGS: Final = ("finding", "", "photos", "worst")

_EXAMPLES = 3  # photos that are named for each group
_SURROGATE = re.compile("[\ud800-\udfff]")  # in names of files that are not UTF-8; other parsers refuse it
_NOT_XML = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+.!|~:@$-])")


def headline(report: Report) -> str:
    """Return the outcome in one sentence."""
    names = f"{report.candidate.name} and {report.baseline.name}"
    photos = f"{report.photos:,} photos"
    if report.changed:
        return f"{names} differ on {photos}"
    return f"{names} look at the same places on {photos}"


def left_out(report: Report) -> str:
    """Return a sentence about the photos that are left out."""
    count = len(report.failures)
    photos = "1 photo is" if count == 1 else f"{count:,} photos are"
    first = report.failures[0]
    return f"{photos} left out, because one of the models could not explain it: {first.image}: {first.message}"


def to_json(report: Report) -> bytes:
    """Return the whole report as JSON. Numbers that are undefined are null."""
    content = {
        "format": FORMAT,
        "changed": report.changed,
        "reasons": report.reasons,
        "max_changed": report.max_changed,
        "photos": report.photos,
        "baseline": asdict(report.baseline),
        "candidate": asdict(report.candidate),
        "predictions_changed": asdict(report.predictions_changed),
        "checks": list(map(asdict, report.checks)),
        "groups": [{**asdict(each), "change": str(each.change)} for each in report.groups],
        "failures": list(map(asdict, report.failures)),
        "cases": list(map(_plain_case, report.cases)),
    }
    text = json.dumps(_without_nan(content), indent=1, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text).encode()


def _plain_case(case: Case) -> dict[str, Any]:
    return {
        "image": case.image,
        "method": case.method,
        "layer": case.layer,
        "target": case.target,
        "change": str(case.change),
        "position": case.position,
        "places": case.places,
        "baseline": _plain_answer(case.baseline),
        "candidate": _plain_answer(case.candidate),
        **case.comparison.plain(),
    }


def _plain_answer(answer: Answer) -> dict[str, Any]:
    return {**asdict(answer), "verdict": str(answer.verdict)}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return list(map(_without_nan, cast("list[Any]", value)))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_junit(report: Report) -> bytes:
    """Return the report as JUnit XML: a test case for each check, and one for each photo, method, layer and target.

    A finding is a failure if the models differ. Otherwise it is among those that may change, and is only described.
    """
    suite = ET.Element("testsuite", name=_xml(f"camserve diff {report.baseline.name} {report.candidate.name}"))
    for check in report.checks:
        element = ET.SubElement(
            suite, "testcase", classname="check", name=_xml(f"{check.method} {check.layer}".strip())
        )
        if check.changed:
            _failure(element, "rule", "; ".join(check.reasons))
    predictions = ET.SubElement(suite, "testcase", classname="check", name="predicted classes")
    of_maps = {reason for check in report.checks for reason in check.reasons}
    if others := [reason for reason in report.reasons if reason not in of_maps]:
        _failure(predictions, str(Change.PREDICTION), "; ".join(others))
    for case in sorted(report.cases, key=lambda case: (case.image, case.index)):
        _add_case(suite, case, failed=report.changed)
    counts = {"tests": len(suite), "failures": len(suite.findall("testcase/failure")), "errors": 0, "skipped": 0}
    for name, count in counts.items():
        suite.set(name, str(count))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    data: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return data


def _add_case(suite: ET.Element, case: Case, *, failed: bool) -> None:
    classname = _xml(".".join(filter(None, (case.method, case.layer))))
    element = ET.SubElement(suite, "testcase", classname=classname, name=_xml(f"{case.image} [{case.target}]"))
    if case.change is not Change.NONE:
        message = f"{case.change}: {describe(case)}"
        if failed:
            _failure(element, str(case.change), message)
        else:
            ET.SubElement(element, "system-out").text = _xml(message)


def _failure(element: ET.Element, kind: str, message: str) -> None:
    ET.SubElement(element, "failure", type=kind, message=_xml(message)).text = _xml(message)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def describe(case: Case) -> str:
    """Return what changed in a case, in a few words."""
    one, other = case.baseline, case.candidate
    if case.change is Change.PREDICTION:
        return f"{_class(one)} becomes {_class(other)}"
    if case.change is Change.VERDICT:
        return f"{one.verdict} becomes {other.verdict}"
    numbers = f"rank correlation {case.comparison.spearman:.2f}, overlap {case.comparison.iou:.0%}"
    return f"from the {case.places[0]} to the {case.places[1]}, {numbers}"


def _class(answer: Answer) -> str:
    prediction = answer.prediction
    return f"{prediction.name} ({prediction.probability:.0%})" if prediction else "nothing"


def check_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of the table of checks: see ``CHECK_HEADINGS``."""
    return [
        (
            check.method,
            check.layer,
            f"{check.cases:,}",
            _interval(check.median, ".2f"),
            f"{check.floor:.3g}, from {check.floor_limit:.3g}",
            f"{check.ceiling:.3g}",
            _interval(check.elsewhere, ".0%"),
            "differs" if check.changed else "same",
        )
        for check in report.checks
    ]


def _interval(interval: Interval, form: str) -> str:
    value, low, high = (format(number, form) for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})"


def group_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of the table of findings: see ``GROUP_HEADINGS``."""
    return [(str(each.change), each.title, f"{each.photos:,}", _examples(report, each)) for each in report.groups]


def _examples(report: Report, group: Group) -> str:
    names = dict.fromkeys(report.cases[index].image for index in group.cases)
    shown = ", ".join(list(names)[:_EXAMPLES])
    return f"{shown}, …" if len(names) > _EXAMPLES else shown


def to_markdown(report: Report) -> str:
    """Return a summary in GitHub's Markdown."""
    parts = [f"## {_markdown(headline(report))}", ""]
    parts += [f"- {_markdown(reason)}" for reason in report.reasons]
    parts += ["", *_markdown_table(CHECK_HEADINGS, check_rows(report))]
    if report.groups:
        parts += ["", *_markdown_table(GROUP_HEADINGS, group_rows(report))]
    if report.failures:
        parts += ["", _markdown(left_out(report))]
    return "\n".join(parts) + "\n"


def _markdown_table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [headings, ("---",) * len(headings), *(tuple(map(_markdown, row)) for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _markdown(text: str) -> str:
    """Escape text, so that it is no markup in Markdown or HTML."""
    return _MARKDOWN.sub(r"\\\1", escape(brief(text), quote=False))
