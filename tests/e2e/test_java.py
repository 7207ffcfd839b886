"""The Java client, which is generated from the .proto files."""

import shutil
import subprocess
from pathlib import Path

import pytest

import camserve
import needs
from support import PHOTOS

ROOT = Path(__file__).parents[2]
JARS = Path("/usr/share/java")
"""Folder of the Java libraries of Debian's packages."""

NEEDED = ("grpc-*", "protobuf", "guava", "netty-*", "perfmark-api", "geronimo-annotation-1.3-spec")
FOUND = [sorted(JARS.glob(f"{name}.jar")) for name in NEEDED]
TOOLS = ("java", "javac", "protoc", "grpc_java_plugin")

pytestmark = [
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=needs.JAVA),
    pytest.mark.skipif(not all(FOUND), reason=needs.JAVA),
]


def run(*command, check=True, folder=None):
    arguments = [str(argument) for argument in command]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=check)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Class path of the client, built as its page says."""
    build = tmp_path_factory.mktemp("build")
    plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
    outputs = (f"--java_out={build}", f"--grpc-java_out={build}", "camserve/v1/explain.proto")
    run("protoc", "-I", ROOT / "protos", plugin, *outputs)
    path = ":".join(str(path) for path in [build, *(jar for jars in FOUND for jar in jars)])
    sources = [*build.rglob("*.java"), ROOT / "clients" / "java" / "ExplainPhotos.java"]
    run("javac", "-nowarn", "-cp", path, "-d", build, *sources)
    return path


def test_java_client_gets_the_python_clients_overlay_and_reports_errors(address, classes, tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        shutil.copy(PHOTOS["chelsea"], tmp_path / folder / "cat.jpg")
    (tmp_path / "broken.jpg").write_bytes(b"no photo")
    photos = ("a/cat.jpg", "broken.jpg", "nothing.jpg", "b/cat.jpg")
    with camserve.Client(address) as client:
        expected = client.explain(PHOTOS["chelsea"]).explanations[0]
    proxy = ("-Dhttps.proxyHost=127.0.0.1", "-Dhttps.proxyPort=1")  # nothing listens there
    java = ("java", *proxy, "-cp", classes)
    result = run(*java, "ExplainPhotos", address, "out", *photos, check=False, folder=tmp_path)

    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        f"{photo}: 0.38 Egyptian cat by {expected.layer}: out/{name}.gradcam.jpg"
        for photo, name in (("a/cat.jpg", "cat"), ("b/cat.jpg", "cat-2"))
    ]
    assert result.stderr.splitlines() == [
        "broken.jpg: not a JPEG, PNG, WebP, BMP, TIFF or NPY file",
        "nothing.jpg: no such file",
    ]
    for name in ("cat", "cat-2"):
        assert (tmp_path / "out" / f"{name}.gradcam.jpg").read_bytes() == expected.overlay
