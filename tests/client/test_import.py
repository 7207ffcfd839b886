"""The client imports no heavy packages, and all its public names are documented."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import camserve

ROOT = Path(__file__).parents[2]
PROBE = """
import json, sys
for name in ("camserve", "camserve.cli"):
    __import__(name)
    print(json.dumps(sorted(sys.modules)))
"""


@functools.cache
def imported() -> list[set[str]]:
    """Import the client, and then its command, in a new interpreter; return the top-level names imported until then."""
    done = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    return [{each.partition(".")[0] for each in json.loads(line)} for line in done.stdout.splitlines()]


def test_importing_the_client_imports_no_heavy_package() -> None:
    heavy = {"torch", "torchvision", "timm", "cv2", "camserve_server"}

    client, command = imported()
    assert client & {*heavy, "rich", "click"} == set()
    assert command & heavy == set()


def test_probe_detects_imported_packages() -> None:
    assert {"grpc", "numpy", "PIL", "camserve"} <= imported()[0]


def test_every_public_name_exists_and_is_documented() -> None:
    assert sorted(camserve.__all__) == camserve.__all__
    aliases = {"ImageLike", "MethodLike", "TargetLike"}
    for name in set(camserve.__all__) - aliases:
        assert getattr(camserve, name).__doc__


@pytest.mark.parametrize("module", ["dataset", "terminal"])
def test_names_defined_in_public_modules_are_documented(module: str) -> None:
    values = [value for name, value in vars(import_module(f"camserve.{module}")).items() if name[0] != "_"]
    own = [each for each in values if callable(each) and each.__module__.startswith("camserve.")]

    assert len(own) >= 5
    assert all(each.__doc__ for each in own)


def private_names(source: str) -> set[str]:
    """Return the private modules and names of the client that a program uses."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if name.startswith("camserve.") and "._" in name}


def test_server_uses_only_public_modules_of_the_client() -> None:
    files = list((ROOT / "service").rglob("*.py"))
    texts = {
        file.name: text for file in files if re.search(r"\bcamserve(\.| import )", text := file.read_text("utf-8"))
    }
    used = {name: names for name, text in texts.items() if (names := private_names(text))}

    assert len(files) > 50
    assert texts
    assert used == {}


@pytest.mark.parametrize(
    "line",
    [
        "from camserve import Client, _codec",
        "from camserve._terminal import echo",
        "import camserve._codec as wire",
        "def f():\n    from camserve.dataset import _x",
        "camserve._client.Client()",
    ],
)
def test_each_way_to_use_a_private_module_is_found(line: str) -> None:
    assert private_names(line)
    assert not private_names(line.replace("._", ".").replace(" _", " "))
