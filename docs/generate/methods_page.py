"""Write docs/methods.md: the formula, paper, cost and parameters of each method, from the server's registry.

python docs/generate/methods_page.py
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from camserve_server import jobs
from camserve_server.api.codec import describe_method, kind_of
from camserve_server.methods import METHODS, Attention, Baseline, Parameter, Perturbation, formula, summary

PAGE = Path(__file__).parent.parent / "methods.md"

GROUPS = (
    "",
    "A layer's feature maps and their gradients",
    "The gradient at the input",
    "Perturbations: scores of edited images",
    "A transformer's attention",
    "Combinations of other methods' maps",
    "Baselines without a model",
)
"""Headings, indexed by the number of a kind on the wire."""

NOTES = {
    "A transformer's attention": """\
These methods explain vision transformers (ViT), which they recognise by running the model. They read the attention of
`torch.nn.MultiheadAttention`, of torch's `scaled_dot_product_attention`, which timm and transformers call, and of code
that computes attention itself with torch's softmax. `gradeclip` needs one of the first two. Attention of fused kernels
from other packages is not seen.

The attention must be global: in every block, the tokens of one grid of patches attend to all of them, with the same
number of heads. Models with windows, such as Swin, or with fewer keys than queries are refused, and the error says
why.
""",
}
"""Text below headings."""

HEAD = """\
# Methods

This page lists every explanation method with its formula, paper, cost and parameters, for readers who want to know
exactly what a map is. To find a method for your question, read [choosing](choosing.md). To see what the maps look like,
open the [gallery](gallery.md). [Parity](parity.md) lists the differences from other libraries. To add one,
[write a method of your own](own-method.md).

`make gallery` generates the page from the server's registry of methods.

## Options that methods share

- `augmentation_smoothing` averages the map over six copies of the image, mirrored or not, with the intensity multiplied
  by 0.9, 1 and 1.1. It costs at least six times the rows.
- `eigen_smoothing` uses the first principal component of the channels' terms instead of their sum. Methods that have it
  are marked *Eigen smoothing*.
- `per_channel` returns a map of [each channel of the input](pixels.md#one-map-for-each-channel). Methods that have it
  are marked *Per channel*.
- `fusion` combines the maps of several layers into one. For `mean`, `max` and `product`, each map goes through a ReLU,
  is min-max normalised, and is resized to the finest grid bilinearly. `sum` adds the signed maps, each divided by the
  area of its cells. `layers=["pyramid"]`, all scales of a [detector](choosing.md#detectors), uses `sum`.

## Notation

Formulas are for one image and one target.

- **x** is the model's normalised input, with colour channels x_c. Zero is the mean colour of the training set.
- **S** is the target's score: for a class its logit, while some papers use the probability. S(x) is the score of the
  image x, and ∂S/∂x its gradient there.
- **L** is a map on a layer's grid, **M** a map of the input's pixels.
- **A_k** is channel k of a layer's feature maps, and **g_k** = ∂S/∂A_k the gradient of the score there, both on the
  grid h×w.
- **i** and **j** are a row and a column of the grid or of the image. **⊙** multiplies element by element.
- **q** counts copies of the image, masks or points from 1 to **n**. N(0, σ²) is normal noise.
- **Min-max normalised** is (z − min z) / (max z − min z), which is between 0 and 1.
- In a transformer of D blocks, **A_l** is the attention of block l, a matrix N×N for each head, where **N** is the
  number of tokens and row i has the shares that token i takes from every token. **∇A_l** is the gradient of the score
  with respect to A_l, **E_h** the mean over heads, **I** the identity matrix, and **(·)⁺** the ReLU.

The formulas give signed maps that are not normalised. Pictures add a final ReLU, the division by the maximum (by the
99th percentile for maps of the input's pixels) and the [colours](client.md#colours).

## Rows

*Rows* is the cost of a method: the number of [rows](glossary.md#row) for one target, with the default parameters. A row
is one input that runs through the model for one target. If the number depends on the layer's channels, the page gives
it for 512 channels.

Every request also runs the unchanged image, one row for each target. Methods with a *shared* row compute their maps
from that row: they share one forward and backward pass. Methods that combine others run the unchanged image again for
each of them. So guided_gradcam has two rows for guided_backprop and one for gradcam.
"""


def text() -> str:
    """Return the whole page."""
    names = sorted(METHODS, key=lambda name: kind_of(METHODS[name]))
    parts = [HEAD]
    for kind, group in groupby(names, key=lambda name: kind_of(METHODS[name])):
        parts.append(f"## {GROUPS[kind]}\n")
        if note := NOTES.get(GROUPS[kind]):
            parts.append(note)
        parts += ["\n".join(section(name)) for name in group]
    return "\n".join(parts).rstrip() + "\n"


def section(name: str) -> Iterator[str]:
    """Yield the lines of one method's section."""
    method = METHODS[name]
    yield f"### {name}\n"
    yield f"{summary(method)}.\n"
    if formula(method):
        yield "\n".join(f"> {line}".rstrip() for line in formula(method).split("\n")) + "\n"
    yield f"- Paper: {method.paper}"
    yield f"- Rows: {cost(name)}"
    if method.needs:
        yield f"- Needs: {method.needs}"
    if method.smooths:
        yield "- Eigen smoothing"
    if method.per_channel:
        yield "- Per channel"
    yield from map(describe_parameter, method.parameters)
    if (PAGE.parent / "images" / "gallery" / f"{name}.jpg").exists():
        subject = "a collage, for four targets" if isinstance(method, Attention) else "three photos"
        yield f"\n![{name} on {subject}](images/gallery/{name}.jpg)"
    yield ""


def cost(name: str) -> str:
    """Return the number of rows of a method, in words."""
    method, rows = METHODS[name], describe_method(name).rows
    if isinstance(method, Baseline):
        return "0"  # the description counts the row of the unchanged image
    if isinstance(method, Perturbation) and method.layered:
        return f"{rows} for a layer of 512 channels"
    if jobs.runs_unchanged(jobs.default_call(name)):
        return "1 (shared)"
    return f"{rows:,}"


def describe_parameter(parameter: Parameter) -> str:
    """Describe a parameter in a line: its name, default, summary and range."""
    start = f"- `{parameter.name}` = "
    if parameter.choices:
        return f"{start}{parameter.default}: {parameter.summary} One of {', '.join(parameter.choices)}."
    kind = "integer, " if parameter.integer else ""
    limits = f"({kind}{_number(parameter.minimum)} to {_number(parameter.maximum)})"
    return f"{start}{parameter.default:g}: {parameter.summary} {limits}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
