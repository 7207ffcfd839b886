"""Writes docs/methods.md: every method's formula, paper, cost and parameters, from the table that the server serves.

python docs/generate/methods_page.py
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from camserve_server import jobs
from camserve_server.api.codec import describe_method, kind_of
from camserve_server.methods import METHODS, Attention, Parameter, Perturbation, formula, summary

PAGE = Path(__file__).parent.parent / "methods.md"

GROUPS = (
    "",
    "A layer's feature maps and their gradients",
    "The gradient at the input",
    "Scores of changed images",
    "A transformer's attention",
    "Other methods' maps, put together",
    "No model at all",
)
"""Headings, by the number that a kind has on the wire."""

HEAD = """\
# Methods

Generated from the server's own table of methods by `make gallery`. What they look like: [gallery](gallery.md). Which to
choose, and where each fails: [choosing](choosing.md). How far each is from other libraries: [parity](parity.md).

In the formulas, for one image: A_k is channel k of a layer's feature maps, g_k the gradient of the score S there, both
on the grid h×w; x is the model's normalised input. Maps are signed and not normalised; cutting at zero, dividing by the
maximum and colouring is rendering. *Rows* are copies of the image through the model, for one target, with the default
parameters; where that depends on the layer's channels, for 512 of them. All CAMs of one image without copies share one
row.

Any method can be the mean over mirrored and brightened copies of the image (`augmentation_smoothing`, six times the
rows). Those marked *smooths* can be the first principal component of the channels' terms instead of their sum
(`eigen_smoothing`). Maps of several layers can become one (`fusion`: mean, max, product).
"""


def text() -> str:
    """Return the whole page."""
    names = sorted(METHODS, key=lambda name: kind_of(METHODS[name]))
    parts = [HEAD]
    for kind, group in groupby(names, key=lambda name: kind_of(METHODS[name])):
        parts.append(f"## {GROUPS[kind]}\n")
        parts += ["\n".join(section(name)) for name in group]
    return "\n".join(parts).rstrip() + "\n"


def section(name: str) -> Iterator[str]:
    """Yield the lines on one method."""
    method = METHODS[name]
    yield f"### {name}\n"
    yield f"{summary(method)}.\n"
    if formula(method):
        yield f"> {formula(method)}\n".replace("\n\n", "\n>\n").replace("\n", "\n> ").rstrip("> ").rstrip() + "\n"
    yield f"- Paper: {method.paper}"
    yield f"- Rows: {cost(name)}"
    if method.needs:
        yield f"- Needs: {method.needs}"
    if method.smooths:
        yield "- Smooths"
    yield from map(parameter, method.parameters)
    if (PAGE.parent / "images" / "gallery" / f"{name}.jpg").exists():
        seen = "a collage, for four targets" if isinstance(method, Attention) else "three photos"
        yield f"\n![{name} on {seen}](images/gallery/{name}.jpg)"
    yield ""


def cost(name: str) -> str:
    """Say what a method costs."""
    method, rows = METHODS[name], describe_method(name).rows
    if isinstance(method, Perturbation) and method.layered:
        return f"{rows} for a layer of 512 channels"
    if jobs.is_clean(jobs.default_call(name)):
        return "1, shared with all others that say so"
    return f"{rows:,}"


def parameter(one: Parameter) -> str:
    """Describe one parameter in a line."""
    if one.choices:
        return f"- `{one.name}` = {one.default}: {one.summary} One of {', '.join(one.choices)}."
    whole = "whole, " if one.integer else ""
    return f"- `{one.name}` = {one.default:g}: {one.summary} ({whole}{one.minimum:g} to {one.maximum:g})"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
