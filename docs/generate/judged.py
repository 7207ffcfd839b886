"""Writes the table of docs/choosing.md: what metrics say of every method, on the documentation's photos.

    python docs/generate/judged.py    # some minutes on two cores

The model is the embedded one, the class the one that it finds most probable; means of the photos. Randomisation is
measured for methods that cost little, for it has them run again and again.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from skimage import data

import camserve
from camserve_server import running

PAGE = Path(__file__).parent.parent / "choosing.md"
PHOTOS = ("chelsea", "coffee", "rocket")
METRICS = ("deletion", "insertion", "road", "randomisation")
DEAR = 64  # rows: beyond, randomisation is left out


def main() -> None:
    """Judge every method and put the table between its marks."""
    page = PAGE.read_text(encoding="utf-8")
    with running(models=["efficientnet_lite0"]) as address, camserve.Client(address, timeout=3600) as client:
        rows = list(judged(client))
    best = {name: max(values[name] for _, values in rows if not np.isnan(values[name])) for name in METRICS[1:3]}
    best["deletion"] = min(values["deletion"] for _, values in rows)
    heads = "| method | deletion ↓ | insertion ↑ | ROAD ↑ | likeness after randomisation ↓ |\n|---|---|---|---|---|\n"
    table = heads + "\n".join(line(name, values, best) for name, values in rows)
    marks = r"(<!-- judged:[^>]*-->\n).*?(<!-- /judged -->)"
    PAGE.write_text(re.sub(marks, lambda mark: f"{mark[1]}{table}\n{mark[2]}", page, flags=re.DOTALL), encoding="utf-8")


def judged(client: camserve.Client) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each method and its means."""
    for method in client.methods():
        metrics = METRICS if method.rows <= DEAR else METRICS[:-1]
        try:
            found = [readings(client, method.name, metrics, getattr(data, photo)()) for photo in PHOTOS]
        except camserve.FailedPrecondition:
            continue  # it needs another kind of model
        means = {name: float(np.mean([one.get(name, np.nan) for one in found])) for name in METRICS}
        print(method.name, means, file=sys.stderr)
        yield method.name, means


def readings(client: camserve.Client, method: str, metrics: tuple[str, ...], photo: object) -> dict[str, float]:
    """Judge one method on one photo."""
    found = client.evaluate(photo, metrics=metrics, methods=method, overlay=None, heatmap=False)
    return {one.metric: one.value for one in found.readings}


def line(method: str, values: dict[str, float], best: dict[str, float]) -> str:
    """Write a method's row; the best of a column is bold."""
    cells = ["" if np.isnan(value) else f"{value:.2f}" for value in values.values()]
    bold = [f"**{cell}**" if values[name] == best.get(name) else cell for name, cell in zip(values, cells, strict=True)]
    return f"| `{method}` | " + " | ".join(bold) + " |"


if __name__ == "__main__":
    main()
