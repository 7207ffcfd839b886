"""Write docs/parity.md: how far every method and its oracles are from the truth in float64.

    PYTHONPATH=tests python docs/generate/parity.py

Exits with 1, after writing the page, if a case is beyond its limit.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

from methods.parity import MODELS, Case, Distances
from methods.parity.catalogue import CASES
from methods.tools import FACTOR, FLOOR

Result = tuple[Case, Distances | float]

PAGE = Path(__file__).parent.parent / "parity.md"

HEAD = f"""\
# Parity

camserve's maps are as exact as those of other libraries. This page gives the numbers: the table compares the methods
with another library, or with the paper's formula. `make parity` generates this page from the cases that `make test`
checks.

Each cell has two errors of float32 maps: `camserve / oracle`. The oracle is the other library, or the paper's formula
on torch's own autograd. The first number is the error of camserve's raw map, and the second the error of the oracle
itself in plain float32. Both are compared with the truth: the oracle in float64. An error is the largest difference
from the truth, as a share of the truth's largest value.

The limit for camserve is {FACTOR} × the oracle's own error + {FLOOR:.0e}. An absolute limit would not work: float32
rounds differently on every processor, and some maps amplify rounding errors. Near the zero of a ReLU, rounding
decides whether a gradient passes, in camserve and in the oracle alike.

One run of the oracle can be accurate by chance. So if camserve exceeds the limit, the oracle runs up to four more
times, and the largest of its errors counts. One of these runs does not use oneDNN's kernels. In the other three, every
number of the input is rounded up or down by one unit in the last place.

The numbers are from one processor, and from the photo on which camserve comes closest to its limit. If the oracle is
documented to compute something else, the cell shows Pearson's *correlation* of the maps instead, and the section
below explains the difference. efficientnet_lite0 has its ImageNet weights. The other models have seeded random
weights: a formula must be right for any weights.

"""


def main() -> int:
    """Measure every case and write the page."""
    torch.set_num_threads(1)
    results = [(case, measure(case)) for case in CASES]  # in the catalogue's order: model by model
    lines = [row(method, oracle, cases) for (method, oracle), cases in group(results)]
    notes = sorted({(case.method, case.note) for case, _ in results if case.note})
    heads = ["| method | oracle | " + " | ".join(MODELS) + " |", "|---" * (len(MODELS) + 2) + "|"]
    page = HEAD + "\n".join([*heads, *lines]) + "\n"
    if notes:
        page += "\n## Where we differ, and why\n\n" + "\n".join(f"- `{name}`: {note}" for name, note in notes) + "\n"
    PAGE.write_text(page, encoding="utf-8")
    failures = [str(case) for case, result in results if not is_within_limit(case, result)]
    print("\n".join(failures) or f"{len(results)} cases, all within their limits", file=sys.stderr)
    return len(failures) > 0


def measure(case: Case) -> Distances | float:
    """Return the two errors of a case, or its correlation."""
    return case.distances() if case.least is None else case.likeness()


def is_within_limit(case: Case, result: Distances | float) -> bool:
    """Return True if a case is within its limit."""
    return result.ratio <= 1 if isinstance(result, Distances) else result >= case.least


def group(results: list[Result]) -> list[tuple[tuple[str, str], list[Result]]]:
    """Group results by method and oracle."""
    ordered = sorted(results, key=method_and_oracle)
    return [(key, list(cases)) for key, cases in groupby(ordered, key=method_and_oracle)]


def method_and_oracle(result: Result) -> tuple[str, str]:
    """Return the key to group a result by."""
    return result[0].method, result[0].oracle


def row(method: str, oracle: str, cases: Sequence[Result]) -> str:
    """Return the row of a method and an oracle."""
    by_model = {case.model: cell(result) for case, result in cases}
    return f"| `{method}` | {oracle} | " + " | ".join(by_model.get(model, "") for model in MODELS) + " |"


def cell(result: Distances | float) -> str:
    """Return the cell of a result: the two errors, or the correlation."""
    if isinstance(result, Distances):
        return f"{result.ours:.1e} / {result.plain:.1e}"
    return f"*{result:.4f}*"


if __name__ == "__main__":
    sys.exit(main())
