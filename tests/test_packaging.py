"""Published packages: a wheel that works with only its own dependencies, and a source distribution."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = {"camserve": ROOT / "clients/python/camserve", "camserve_server": ROOT / "service/camserve_server"}
ELSEWHERE = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COVERAGE", "COV_"))}


def run(*command, cwd):
    """Run a command away from the sources, and return how it went."""
    return subprocess.run(command, cwd=cwd, env=ELSEWHERE, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the source distribution, and the wheel out of it."""
    folder = tmp_path_factory.mktemp("dist")
    found = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel, without extras, where nothing else is."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    found = run(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    assert found.returncode == 0, found.stderr
    return folder / "venv/bin"


def sources():
    """Yield the path of every file of both packages, as the wheel names it."""
    for name, folder in PACKAGES.items():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{name}/{path.relative_to(folder).as_posix()}"


def test_the_wheel_holds_both_packages_whole_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert names == set(sources())
    assert {"camserve/py.typed", "camserve_server/py.typed"} <= names
    assert {f"camserve/v1/{name}_pb2.{end}" for name in ("explain", "models") for end in ("py", "pyi")} <= names
    assert {f"camserve/v1/{name}_pb2_grpc.{end}" for name in ("explain", "models") for end in ("py", "pyi")} <= names


def test_the_wheel_says_what_it_is_and_needs_torch_only_for_the_server(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(archive.read(name).decode())
        assert any(one.endswith("licenses/LICENSE") for one in archive.namelist())
    light = [need for need in about.get_all("Requires-Dist") if "extra ==" not in need]
    server = [need for need in about.get_all("Requires-Dist") if "extra == 'server'" in need.replace('"', "'")]

    assert (about["Name"], about["Version"]) == ("camserve", VERSION)
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    assert not any(need.startswith(("torch", "timm", "opencv", "pydantic")) for need in light)
    assert any(need.startswith("torch>=") for need in server)


def test_the_source_distribution_holds_what_it_takes_to_build_test_and_try_it(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}

    assert names >= {
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "README.md",
        "LICENSE",
        "protos/buf.yaml",
        "protos/camserve/v1/explain.proto",
        "protos/camserve/v1/models.proto",
        "clients/python/camserve/py.typed",
        "service/camserve_server/py.typed",
        "tests/test_packaging.py",
        "examples/demo.py",  # what `make demo` runs
    }
    assert not any("__pycache__" in name or name.startswith((".venv", "out/")) for name in names)


@pytest.mark.slow
def test_without_extras_the_client_imports_and_torch_is_not_even_installed(installed):
    code = """
import sys, importlib.util as find, camserve
assert not {"torch", "camserve_server"} & set(sys.modules), sorted(sys.modules)
assert "venv" in camserve.__file__, camserve.__file__
for name in ("torch", "torchvision", "timm", "cv2", "pydantic", "safetensors", "grpc_reflection"):
    assert find.find_spec(name) is None, name
for name in camserve.__all__:
    assert getattr(camserve, name)
with camserve.Client("localhost:1"):
    print("works")
"""
    found = run(installed / "python", "-W", "error", "-c", code, cwd=installed)

    assert (found.returncode, found.stdout, found.stderr) == (0, "works\n", "")


@pytest.mark.slow
def test_without_extras_the_clients_command_line_works(installed):
    helped = run(installed / "camserve", "--help", cwd=installed)
    version = run(installed / "camserve", "--version", cwd=installed)
    alone = run(installed / "camserve", "health", "--server", "127.0.0.1:1", cwd=installed)

    assert (helped.returncode, helped.stderr) == (0, "")
    assert "explain" in helped.stdout
    assert VERSION in version.stdout
    assert alone.returncode == 1
    assert alone.stderr.startswith("error: ")
    assert alone.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["serve"], ["--help"], []])
def test_without_extras_the_server_says_which_one_is_missing(installed, arguments):
    found = run(installed / "camserve-server", *arguments, cwd=installed)

    assert found.returncode == 2
    assert found.stderr.startswith("error: no module ")
    assert found.stderr.endswith('the server needs `pip install "camserve[server]"`\n')
    assert found.stderr.count("\n") == 1
