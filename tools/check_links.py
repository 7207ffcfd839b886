"""Check that every link of the Markdown files to a file of the project, and to a heading of it, leads somewhere."""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "clients/*/*.md")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """Return the Markdown files whose links are checked."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern)}
    return sorted(path for path in found if not {"node_modules", "_build"} & set(path.parts))


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a file's headings, as GitHub and the site make them."""
    headings = HEADING.findall(CODE.sub(lambda code: code[0].strip("`"), path.read_text(encoding="utf-8")))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def broken(path: Path) -> Iterator[str]:
    """Yield the links of a file that lead nowhere."""
    for target in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        name, _, heading = target.partition("#")
        linked = path.parent / name if name else path
        if "://" in target or target.startswith("mailto:"):
            continue
        if not linked.exists():
            yield f"{target}: no such file"
        elif heading and heading not in anchors(linked):
            yield f"{target}: no such heading"


def main(root: Path = ROOT) -> int:
    """Print the broken links, and return their number."""
    lines = [f"{path.relative_to(root)}: {line}" for path in pages(root) for line in broken(path)]
    print("\n".join(lines) or f"the links of {len(pages(root))} files lead to files and headings")
    return len(lines)


if __name__ == "__main__":
    sys.exit(bool(main()))
