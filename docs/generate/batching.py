"""Draw docs/images/batching.svg: rows of four requests, and the batches that they share.

`python docs/generate/batching.py` writes it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parent.parent / "images" / "batching.svg"
WIDTH, HEIGHT = 700, 290
CELL, GAP = 26, 4  # pixels: side of a row's square, and the space between two
ROOM = 8  # inputs of a batch

REQUESTS = (
    ("A", "#4c72b0", "Grad-CAM of one class", 1),
    ("B", "#dd8452", "Grad-CAM of three classes", 3),
    ("C", "#55a868", "LayerCAM of one class", 1),
    ("D", "#c44e52", "SmoothGrad, 8 noisy copies of its photo", 8),
)
"""Letter, colour, description and rows of each request; the rows of B share an input."""

BATCHES = (
    ("batch 1: forward pass and gradients at the layer", (("A",), ("B", "B", "B"), ("C",))),
    ("batch 2: gradients at the image", (("D",),) * 8),
)
"""Name of each batch, and the rows of each of its inputs."""

COLOURS = {letter: colour for letter, colour, _, _ in REQUESTS}


def main() -> None:
    """Write the picture."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(20, 28, "requests in the queue", bold=True),
        text(400, 28, "batches of up to 8 inputs", bold=True),
        *requests(),
        *batches(),
        text(340, 150, "\N{RIGHTWARDS ARROW}", bold=True),
        "</svg>",
    ]
    PICTURE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def requests() -> Iterator[str]:
    """Yield each request: its rows and its description."""
    for index, (letter, _, description, rows) in enumerate(REQUESTS):
        top = 50 + index * 60
        yield from squares(20, top, [letter] * rows)
        yield text(20, top + 42, f"{letter}: {description}")


def batches() -> Iterator[str]:
    """Yield each batch: a box with room for eight inputs; rows of one input are on top of each other."""
    for index, (name, inputs) in enumerate(BATCHES):
        top = (50, 200)[index]
        height = max(map(len, inputs)) * (CELL + GAP) + GAP
        yield (
            f'<rect x="400" y="{top}" width="{ROOM * (CELL + GAP) + GAP}" height="{height}" rx="5"'
            ' fill="#f2f2f2" stroke="#888888"/>'
        )
        for column, rows in enumerate(inputs):
            for level, letter in enumerate(rows):
                yield from squares(404 + column * (CELL + GAP), top + GAP + level * (CELL + GAP), [letter])
        yield text(400, top + height + 16, name)


def squares(left: int, top: int, letters: Iterable[str]) -> Iterator[str]:
    """Yield a coloured square with a letter for each row."""
    for index, letter in enumerate(letters):
        x = left + index * (CELL + GAP)
        yield f'<rect x="{x}" y="{top}" width="{CELL}" height="{CELL}" rx="4" fill="{COLOURS[letter]}"/>'
        yield text(x + 8, top + 18, letter, fill="#ffffff")


def text(x: int, y: int, words: str, *, bold: bool = False, fill: str = "#222222") -> str:
    """Return a line of text."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="14" fill="{fill}"{weight}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
