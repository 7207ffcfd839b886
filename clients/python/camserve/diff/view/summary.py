"""The parts of the report as HTML that need no script: headline, sources, checks, findings and failures."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from camserve._show import html
from camserve.diff.values import Change
from camserve.diff.view.checks import checks_of
from camserve.diff.view.elements import Html, count, element, join, percent, percents, scrolling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from camserve.diff.values import Failure, Group, Report, Source

_DIGITS = 12  # of a digest: enough to tell two files apart
_EXAMPLES = 3  # photos that are named for a group


def headline(report: Report) -> str:
    """Return the outcome in one sentence."""
    if not report.changed:
        return "No difference beyond the calibration"
    verb = "looks elsewhere than" if any(check.changed for check in report.checks) else "differs from"
    return f"{report.candidate.name} {verb} {report.baseline.name}"


def summary(report: Report) -> Html:
    """Return everything above the list of cases as HTML."""
    return join((_header(report), _checks(report), _groups(report)))


def _header(report: Report) -> Html:
    reasons = join(element("li", reason) for reason in report.reasons)
    sources = (_source("A", "baseline", report.baseline), _source("B", "candidate", report.candidate))
    state = "changed" if report.changed else "same"
    return element(
        "header",
        element("p", "camserve diff", class_="kind"),
        element("h1", headline(report)),
        element("ul", reasons, class_="reasons") if reasons else Html(),
        *(element("p", sentence) for sentence in _counts(report)),
        element("div", *sources, class_="sources"),
        _failures(report.failures),
        class_=state,
    )  # fmt: skip


def _counts(report: Report) -> Iterator[str]:
    changes = Counter(case.change for case in report.cases)
    found = ", ".join(f"{changes[change]:,} {_SAYS[change]}" for change in Change if changes[change])
    total = f"{count(report.photos, 'photo')}, {count(len(report.cases), 'comparison')} of maps"
    yield f"{total}: {found}." if found else f"{total}."
    yield (
        f"The first prediction differs for {percents(report.predictions_changed)} of the photos. "
        f"Up to {percent(report.max_changed)} of the photos may change."
    )


_SAYS = {
    Change.ELSEWHERE: "look elsewhere",
    Change.PREDICTION: "with another prediction",
    Change.VERDICT: "with another verdict on the map",
    Change.NONE: "without a finding",
}


def _source(letter: str, role: str, source: Source) -> Html:
    model = ", ".join(part for part in (source.model, source.weights) if part)
    facts = {"Model": model, "SHA-256": source.digest[:_DIGITS]}
    facts |= {"Versions": ", ".join(f"{name} {version}" for name, version in source.versions.items())}
    rows = join(join((element("dt", name), element("dd", fact))) for name, fact in facts.items() if fact)
    title = element("h2", element("b", letter, class_="letter"), f" {source.name}", element("small", f" {role}"))
    return element("section", title, element("dl", rows), class_="source")


def _failures(failures: tuple[Failure, ...]) -> Html:
    if not failures:
        return Html()
    lines = [(failure.image, failure.side, failure.message) for failure in failures]
    table = Html(html.table(("Photo", "Side", "Error"), lines, "Photos that were left out"))
    title = f"{count(len({failure.image for failure in failures}), 'photo')} could not be explained by both models"
    return element("details", element("summary", title), scrolling(table, "Table of the errors"), class_="failures")


def _checks(report: Report) -> Html:
    if not report.checks:
        return Html()
    return element("section", *checks_of(report), aria_labelledby="checks", class_="checks")


def _groups(report: Report) -> Html:
    groups = [_group(report, index, group) for index, group in enumerate(report.groups)]
    found = element("ol", *groups, class_="groups") if groups else element("p", "Nothing was found.")
    return element("section", element("h2", "Findings", id="findings"), found, aria_labelledby="findings")


def _group(report: Report, index: int, group: Group) -> Html:
    photos = list(dict.fromkeys(report.cases[case].image for case in group.cases))
    named = ", ".join(photos[:_EXAMPLES]) + (", …" if len(photos) > _EXAMPLES else "")
    return element(
        "li",
        element("h3", group.title),
        element("p", element("b", count(group.photos, "photo")), f", {group.change.value}"),
        element("p", f"Worst first: {named}", class_="named"),
        data_group=str(index),
    )
