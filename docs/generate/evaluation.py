"""Write the table of docs/choosing.md: metrics of every method on the documentation's photos.

    python docs/generate/evaluation.py    # some minutes on two cores

The model is the embedded one, the target is the class that it predicts, and the numbers are means over the photos.
Randomisation is only measured for methods with few rows, because it runs a method many times.
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
MAX_RANDOMISATION_ROWS = 64  # the most rows of a method for which randomisation is measured


def main() -> None:
    """Evaluate every method and write the table between its marks."""
    page = PAGE.read_text(encoding="utf-8")
    with running(models=["efficientnet_lite0"]) as address, camserve.Client(address, timeout=3600) as client:
        rows = list(evaluate(client))
    best = {name: max(values[name] for _, values in rows if not np.isnan(values[name])) for name in METRICS[1:3]}
    best["deletion"] = min(values["deletion"] for _, values in rows)
    heads = "| method | deletion ↓ | insertion ↑ | ROAD ↑ | similarity after randomisation ↓ |\n|---|---|---|---|---|\n"
    table = heads + "\n".join(line(name, values, best) for name, values in rows)
    marks = r"(<!-- evaluation:[^>]*-->\n).*?(<!-- /evaluation -->)"
    PAGE.write_text(re.sub(marks, lambda mark: f"{mark[1]}{table}\n{mark[2]}", page, flags=re.DOTALL), encoding="utf-8")


def evaluate(client: camserve.Client) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each method's name and the mean of each metric."""
    for method in client.methods():
        metrics = METRICS if method.rows <= MAX_RANDOMISATION_ROWS else METRICS[:-1]
        try:
            values = [readings(client, method.name, metrics, getattr(data, photo)()) for photo in PHOTOS]
        except camserve.FailedPrecondition:
            continue  # the method needs another kind of model
        means = {name: float(np.mean([by_metric.get(name, np.nan) for by_metric in values])) for name in METRICS}
        print(method.name, means, file=sys.stderr)
        yield method.name, means


def readings(client: camserve.Client, method: str, metrics: tuple[str, ...], photo: object) -> dict[str, float]:
    """Return the value of each metric for one method and photo."""
    result = client.evaluate(photo, metrics=metrics, methods=method, overlay=None, heatmap=False)
    return {reading.metric: reading.value for reading in result.readings}


def line(method: str, values: dict[str, float], best: dict[str, float]) -> str:
    """Return a method's row; the best value of a column is bold."""
    cells = ["" if np.isnan(value) else f"{value:.2f}" for value in values.values()]
    bold = [f"**{cell}**" if values[name] == best.get(name) else cell for name, cell in zip(values, cells, strict=True)]
    return f"| `{method}` | " + " | ".join(bold) + " |"


if __name__ == "__main__":
    main()
