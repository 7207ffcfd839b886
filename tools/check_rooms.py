"""Check the server's rooms: what its root holds, and who imports gRPC, protobuf or the client's private modules.

The order of the rooms, and that there are no circles, are contracts of import-linter in pyproject.toml. The rules here
hold for every room but the two that are named, so that they hold for a new room as well.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SERVER = Path(__file__).parents[1] / "service/camserve_server"
ROOT_MODULES = {"__init__.py", "__main__.py"}
BORDER = {"api", "cluster"}
"""The rooms that talk to callers: only they import `WIRE`."""
WIRE = ("grpc", "grpc_health", "grpc_reflection", "google", "camserve.v1")


def faults(package: Path) -> Iterator[str]:
    """Yield what is wrong in a package, one line for each fault."""
    for path in sorted(package.glob("*.py")):
        if path.name not in ROOT_MODULES:
            yield f"{path.name}: a module belongs to a room, not to the root"
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        for line, name in imported(path.read_text(encoding="utf-8")):
            if wrong := _fault(place.parts[0], name):
                yield f"{place.as_posix()}:{line}: {wrong}"


def _fault(room: str, name: str) -> str:
    if room not in BORDER and any(f"{name}.".startswith(f"{wire}.") for wire in WIRE):
        return f"imports {name}, which only {' and '.join(sorted(BORDER))} do"
    client, *parts = name.split(".")
    if client == "camserve" and any(part.startswith("_") and not part.endswith("__") for part in parts):
        return f"imports {name}, which is private to the client"
    return ""


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of each import, wherever it stands: in functions and for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def main() -> int:
    """Print every fault; return the exit code."""
    found = list(faults(SERVER))
    print("\n".join(found) or "every module is in a room, and only the border knows the wire")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
