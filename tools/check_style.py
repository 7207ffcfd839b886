"""Check sizes, names and texts: how long classes and functions are, and words that only the authors would understand.

The limits and the lists of words are below. Usage: `check_style.py [PATH]...`; without a path, the whole project.
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZED = ("service/camserve_server", "clients/python/camserve")
NAMED = (*SIZED, "tests", "benchmarks", "tools", "docs", "examples", "clients")
GENERATED = re.compile(r"_pb2|/records/|node_modules|/\.|/check_style\.py|test_check_style\.py")

CLASS_LINES = 200
FUNCTION_LINES = 40
MEDIAN_LINES = 6
TEST_NAME = 79
README_LINES = 200

OLD_NAMES = frozenset(
    """
    Local Reply halves said kept House nursery _nurse _Nursery _Born _Spawned _Life Beat BEAT SILENCE _bury Ask
    Port twin BORNE DOUBTS
    _sings give_up PATIENCE Patience floods Parser _Parsing Guard Kept Told told Record _telling conversing
    answering attempted _Pulse Shelf shelf easel _Ticket Ticket _Place Place _company brisk is_brisk Units
    Quick quickened Direct Site Damaged Room ramps Seen glancing watching Desk Think Study Sheet Evidence
    Looked Edited Repeated Exhibit _Court judged Judged Door Meters meters _board _chart Unread _Line Absent
    aimed _see _heard _say _tell scraping Fleet company xray _xray
    """.split()  # noqa: SIM905 -- a list of eighty lines is harder to read
)
"""Names of classes, functions, modules and constants that were replaced by the terms of the field."""

DIALECT = re.compile(
    r"""
    \b(?: is\ told | are\ told | was\ told | hears?\ of | there\ (?:is|are)\ none | so\ many | one\ of\ which
        | taken\ for | has\ come\ so\ far | had\ of\ it | to\ speak\ of | as\ it\ were )\b
    """,
    re.VERBOSE,
)
"""Phrases that make a reader stop."""

VERBLESS = re.compile(r"(?:What|Whether|Which|Whose|Who|Where|How|Of which|In which)\b(?!.*\?)")
"""How a docstring's first line must not begin: it says what the thing is or does."""


def faults(paths: list[Path]) -> Iterator[str]:
    """Yield one line for each fault in these files and folders."""
    lengths: list[int] = []
    for path in _files(paths):
        place = path.relative_to(ROOT).as_posix()
        if path.suffix == ".md":
            yield from _text_faults(place, path)
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if place.startswith(SIZED):
            lengths += _function_lengths(tree)
            yield from _size_faults(place, tree)
        yield from _name_faults(place, path.stem, tree)
        yield from _docstring_faults(place, tree)
    if lengths and (median := statistics.median(lengths)) > MEDIAN_LINES:
        yield f"the median function has {median:g} lines, and {MEDIAN_LINES} is the limit"


def _files(paths: list[Path]) -> list[Path]:
    found = [path for path in paths if path.is_file()]
    for folder in paths:
        found += [*folder.rglob("*.py"), *folder.rglob("*.md")]
    return sorted(path for path in found if not GENERATED.search(path.as_posix()))


def _function_lengths(tree: ast.AST) -> list[int]:
    return [_lines(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _size_faults(place: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _lines(node) > FUNCTION_LINES:
            yield f"{place}:{node.lineno}: {node.name} has {_lines(node)} lines, and {FUNCTION_LINES} is the limit"
        if isinstance(node, ast.ClassDef) and _lines(node) > CLASS_LINES:
            yield f"{place}:{node.lineno}: {node.name} has {_lines(node)} lines, and {CLASS_LINES} is the limit"


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Return the number of lines without docstrings, so that none is shortened to fit."""
    return _span(node) - sum(map(_docstring_lines, ast.walk(node)))


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    return 0 if ast.get_docstring(node) is None else _span(node.body[0])


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _name_faults(place: str, module: str, tree: ast.AST) -> Iterator[str]:
    if module in OLD_NAMES:
        yield f"{place}: {module} is a name that was replaced"
    for line, name in _defined(tree):
        if name in OLD_NAMES:
            yield f"{place}:{line}: {name} is a name that was replaced"
        if name.startswith("test_") and len(name) > TEST_NAME:
            yield f"{place}:{line}: {name} has {len(name)} characters, and {TEST_NAME} is the limit"


def _defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every class and function, and of every constant of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
    for node in getattr(tree, "body", ()):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def _docstring_faults(place: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        line = node.body[0].lineno if text else 0
        if VERBLESS.match(text.partition("\n")[0]):
            yield f"{place}:{line}: the docstring does not begin with what this is or does: {text.splitlines()[0]}"
        if phrase := DIALECT.search(text):
            yield f"{place}:{line}: say it plainly: {phrase[0]}"
        if isinstance(node, ast.ClassDef) and not node.bases:
            for name in sorted(_documented(text) - _attributes(node)):
                yield f"{place}:{line}: {node.name} has no attribute {name}, which its docstring describes"


def _documented(docstring: str) -> set[str]:
    """Return the names under "Attributes:"."""
    section = re.search(r"^Attributes:\n((?: {4}.*\n?|\n)*)", docstring, re.MULTILINE)
    return set(re.findall(r"^ {4}(\w+):", section[1], re.MULTILINE)) if section else set()


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class defines, and those that its methods assign to `self`."""
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
            names.add(part.attr)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
    return names


def _text_faults(place: str, path: Path) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    if place == "README.md" and len(lines) > README_LINES:
        yield f"{place}: {len(lines)} lines, and {README_LINES} is the limit"
    for number, line in enumerate(lines, 1):
        if phrase := DIALECT.search(line):
            yield f"{place}:{number}: say it plainly: {phrase[0]}"


def main() -> int:
    """Print every fault; return the exit code."""
    paths = [Path(path).resolve() for path in sys.argv[1:]]
    everything = [*(ROOT / name for name in NAMED), *ROOT.glob("*.md")]
    found = list(dict.fromkeys(faults(paths or everything)))
    print("\n".join(found) or "sizes, names and texts are within their limits")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
