"""The published wheel works with only its own dependencies installed, and the source distribution is complete."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools import release_notes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
PACKAGES = {"camserve": ROOT / "clients/python/camserve", "camserve_server": ROOT / "service/camserve_server"}
ELSEWHERE = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COVERAGE", "COV_"))}


def run(*command, cwd):
    """Run a command outside of the sources; return its result."""
    return subprocess.run(command, cwd=cwd, env=ELSEWHERE, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the source distribution, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    result = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel without extras into an environment that has its dependencies and theirs, and nothing else.

    They are links to this environment's own: to install them again would take most of the time.
    """
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", "--no-deps", "--no-index"]
    result = run(*pip, "--disable-pip-version-check", wheel, cwd=folder)
    assert result.returncode == 0, result.stderr
    packages = Path(sysconfig.get_path("purelib", vars={"base": folder / "venv"}))
    (about,) = packages.glob("camserve-*.dist-info")
    for needed in dependencies(importlib.metadata.Distribution.at(about)):
        for path in {top_level(file) for file in needed.files if file.parts[0] != ".."}:
            (packages / path).parent.mkdir(exist_ok=True)
            (packages / path).symlink_to(needed.locate_file(path))
    return folder / "venv/bin"


def dependencies(distribution):
    """Return the installed distributions that one needs without extras, by way of others too."""
    found, waiting = {}, [distribution]
    while waiting:
        for need in map(Requirement, waiting.pop().requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                needed = importlib.metadata.distribution(need.name)
                assert need.specifier.contains(needed.version), (need, needed.version)
                if canonical(need.name) not in found:
                    found[canonical(need.name)] = needed
                    waiting.append(needed)
    return found.values()


def top_level(file):
    """Return the path of a module or package that has a file; `google` is a folder of several distributions."""
    return Path(*file.parts[: 2 if file.parts[0] == "google" else 1])


def sources():
    """Yield the path in the wheel of every file of both packages."""
    for name, folder in PACKAGES.items():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{name}/{path.relative_to(folder).as_posix()}"


def test_wheel_contains_exactly_both_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert names == set(sources())
    assert {"camserve/py.typed", "camserve_server/py.typed"} <= names
    assert {f"camserve/v1/{name}_pb2.{end}" for name in ("explain", "models") for end in ("py", "pyi")} <= names
    assert {f"camserve/v1/{name}_pb2_grpc.{end}" for name in ("explain", "models") for end in ("py", "pyi")} <= names


def test_wheel_metadata_requires_torch_only_for_the_server(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(archive.read(name).decode())
        assert any(each.endswith("licenses/LICENSE") for each in archive.namelist())
    light = [need for need in about.get_all("Requires-Dist") if "extra ==" not in need]
    server = [need for need in about.get_all("Requires-Dist") if "extra == 'server'" in need.replace('"', "'")]

    assert (about["Name"], about["Version"]) == ("camserve", VERSION)
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    assert not any(need.startswith(("torch", "timm", "opencv", "pydantic")) for need in light)
    assert any(need.startswith("torch>=") for need in server)


def test_source_distribution_can_be_built_tested_and_tried(built):
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


def test_client_without_extras_can_be_imported_without_torch(installed):
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
    result = run(installed / "python", "-W", "error", "-c", code, cwd=installed)

    assert (result.returncode, result.stdout, result.stderr) == (0, "works\n", "")


def test_client_command_works_without_extras(installed):
    helped = run(installed / "camserve", "--help", cwd=installed)
    version = run(installed / "camserve", "--version", cwd=installed)
    alone = run(installed / "camserve", "health", "--server", "127.0.0.1:1", cwd=installed)

    assert (helped.returncode, helped.stderr) == (0, "")
    assert "explain" in helped.stdout
    assert VERSION in version.stdout
    assert alone.returncode == 1
    assert alone.stderr.startswith("error: ")
    assert alone.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["serve"], ["--help"], []])
def test_server_without_extras_names_the_missing_one(installed, arguments):
    result = run(installed / "camserve-server", *arguments, cwd=installed)

    assert result.returncode == 2
    assert result.stderr.startswith("error: no module ")
    assert result.stderr.endswith('the server needs `pip install "camserve[server]"`\n')
    assert result.stderr.count("\n") == 1


def test_second_build_elsewhere_has_the_same_bytes(built, tmp_path):
    """The second build is of the source distribution, in another folder, with other file times and permissions."""
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (10**9, 10**9))
    result = run(sys.executable, "-m", "hatchling", "build", "-d", tmp_path / "dist", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr

    names = {path.name for path in built.iterdir()}
    assert {path.name for path in (tmp_path / "dist").iterdir()} == names
    for name in names:
        assert (tmp_path / "dist" / name).read_bytes() == (built / name).read_bytes(), name


ENTRY = re.compile(r"^([\w.-]+)==(\S+)(?: ; ([^\n]*))? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE)
LOCK = (ROOT / "service/requirements.lock").read_text(encoding="utf-8")


def canonical(name):
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    """Return the versions in constraints.txt, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}


def names_of(needs):
    return {canonical(re.match(r"[\w.-]+", need)[0]) for need in needs}


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("service/requirements.lock", [*PROJECT["project"]["dependencies"], *EXTRAS["server"], *EXTRAS["otel"]]),
        ("service/build.lock", PROJECT["build-system"]["requires"]),
        ("tools/dist.lock", PROJECT["dependency-groups"]["dist"]),
    ],
)
def test_lock_file_has_hashes_for_the_pinned_versions_of_all_needs(path, needs):
    lock = (ROOT / path).read_text(encoding="utf-8")
    entries = [match.groups() for match in ENTRY.finditer(lock)]
    pinned = pins()

    assert len(entries) == len(re.findall(r"^[^\s#]", lock, re.MULTILINE)), "an entry has no hash"
    assert names_of(needs) <= {name for name, *_ in entries}, "run 'make lock'"
    for name, version, _ in entries:
        assert pinned.get(name, version) == version, "run 'make lock'"


def test_every_package_of_the_image_is_pinned():
    pinned = pins()

    for name, _, marker in (match.groups() for match in ENTRY.finditer(LOCK)):  # packages of other systems have no pin
        assert name in pinned or "sys_platform" in marker, f"add {name} to constraints.txt"


# One row for each file that names the version of this tree: how the version looks there, and how often.
NAMED = [
    ("service/Dockerfile", r"^ARG VERSION=(.*)$", 1),
    ("clients/node/package.json", r'^  "version": "(.*)"', 1),
    ("clients/node/package-lock.json", r'"camserve-client-example",\n +"version": "(.*)"', 2),
]


@pytest.mark.parametrize(("path", "pattern", "count"), NAMED, ids=[path for path, *_ in NAMED])
def test_file_names_the_version_of_the_package(path, pattern, count):
    text = (ROOT / path).read_text(encoding="utf-8")

    assert re.findall(pattern, text, re.MULTILINE) == [VERSION] * count


def test_manifests_and_pages_name_the_image_of_the_version():
    paths = [*(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    tags = re.findall(r"(?:\bcamserve:|newTag: )(\d\S*)-[cg]pu", text)

    assert len(tags) > 10
    assert set(tags) == {VERSION}


def test_newest_section_of_the_changelog_is_that_of_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, newest, *_ = re.findall(r"^## (.*)$", text, re.MULTILINE)

    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", newest)
    assert release_notes.section(text, VERSION).startswith("- **")
