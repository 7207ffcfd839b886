"""The checks of the server's packages find each planted fault."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools import check_rooms

ROOT = Path(__file__).parents[1]
LAYERS = next(
    contract["layers"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if contract["type"] == "layers"
)
TOP, BOTTOM = LAYERS[0], LAYERS[-1]


def write(package, files):
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)


@pytest.fixture
def package(tmp_path):
    """A package without a fault: the API imports the codec, and the command imports the client's public names."""
    files = {
        "__init__.py": "",
        "__main__.py": "from camserve_server.cli import main\n",
        "api/server.py": "import grpc\nfrom camserve.v1 import explain_pb2\n",
        "cluster/proxy.py": "from google.rpc import code_pb2\n",
        "cli/commands.py": "from camserve import Client, __version__\nimport grpcish\n",
        "core/errors.py": "import math\n",
    }
    write(tmp_path, files)
    return tmp_path


def test_valid_packages_have_no_faults(package):
    assert list(check_rooms.faults(package)) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("loose.py", "", "loose.py: a module belongs to a room, not to the root"),
        ("core/a.py", "import grpc.aio\n", "core/a.py:1: imports grpc.aio, which only api and cluster do"),
        (
            "serving/a.py",
            "def f():\n    from google.protobuf import json_format\n",
            "serving/a.py:2: imports google.protobuf.json_format, which only api and cluster do",
        ),
        (
            "jobs/a.py",
            "from camserve.v1 import explain_pb2\n",
            "jobs/a.py:1: imports camserve.v1.explain_pb2, which only api and cluster do",
        ),
        (
            "app/a.py",
            "from grpc_health.v1 import health\n",
            "app/a.py:1: imports grpc_health.v1.health, which only api and cluster do",
        ),
        (
            "cli/a.py",
            "from camserve import _tables\n",
            "cli/a.py:1: imports camserve._tables, which is private to the client",
        ),
        (
            "api/a.py",
            "import camserve._calls.x\n",
            "api/a.py:1: imports camserve._calls.x, which is private to the client",
        ),
        (
            "jobs/a.py",
            "from camserve.cli import _run\n",
            "jobs/a.py:1: imports camserve.cli._run, which is private to the client",
        ),
    ],
)
def test_each_planted_fault_is_found(package, name, text, fault):
    write(package, {name: text})

    assert list(check_rooms.faults(package)) == [fault]


def test_import_that_only_type_checkers_see_is_found(package):
    write(package, {"core/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import grpc\n"})

    assert list(check_rooms.faults(package)) == ["core/a.py:3: imports grpc, which only api and cluster do"]


def contracts(folder):
    """Return the exit code and the output of import-linter for the packages in a folder."""
    paths = {"PYTHONPATH": f"{folder / 'service'}:{folder / 'clients/python'}"}
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, timeout=100, check=False
    )
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Copy both packages and the contracts; return the folder."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copy(ROOT / "pyproject.toml", folder)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("clients/python/camserve", "service/camserve_server"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def place_of(package, layer):
    """Return the file to which a line of a layer can be added: its module, or the `__init__` of its package."""
    return package / layer / "__init__.py" if (package / layer).is_dir() else package / f"{layer}.py"


@pytest.fixture(scope="module")
def broken(copied):
    """Plant a fault of each kind, with none of which the contracts are kept before; return import-linter's output."""
    assert contracts(copied)[0] == 0
    package = copied / "service/camserve_server"
    with place_of(package, BOTTOM).open("a") as file:
        file.write(f"\nfrom camserve_server import {TOP}\n")
    write(package, {"attic/__init__.py": ""})
    names = [path.stem for path in sorted((package / "jobs").glob("*.py")) if path.stem != "__init__"]
    for name, other_name in (names[:2], names[1::-1]):
        with (package / f"jobs/{name}.py").open("a") as file:
            file.write(f"\nfrom camserve_server.jobs import {other_name}\n")
    code, output = contracts(copied)
    assert code == 1
    return output


def test_import_upward_breaks_the_contract_of_the_layers(broken):
    assert f"camserve_server.{BOTTOM} is not allowed to import camserve_server.{TOP}" in broken


def test_package_missing_from_the_layers_breaks_their_contract(broken):
    assert "camserve_server.attic" in broken


def test_import_cycle_inside_a_package_breaks_a_contract(broken):
    assert "no circles BROKEN" in broken
