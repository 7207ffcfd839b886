"""Documentation: every code block runs, and prints what the page says."""

import shutil
import sys
from pathlib import Path

import pytest

from docs.pages import PAGES, ROOT, Reader
from server_process import server_process

pytestmark = pytest.mark.slow
REASONS = {
    "downloads weights",
    "needs a GPU",
    "needs a cluster",
    "needs a collector of traces",
    "needs a command of yours",
    "needs a container engine",
    "needs a module of yours",
    "needs a settings file of yours",
    "needs another package",
    "needs two models",
    "needs weights of yours",
    "runs until Ctrl-C",
    "takes minutes",
}
"""Why blocks are not run. The other reason is the file of the tests that run the block in another way."""

ON_SMALL_IMAGES = {
    "README.md": "The same from the command line",
    "docs/command-line.md": "",
    "docs/evaluation.md": "",
    "docs/inspection.md": "",
}
"""Pages whose blocks explain a photo up to hundreds of times, and show no result after this text."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Server with the default model; the value maps the documented ports to its ports."""
    flags, folder = ("--http-address", "0", "--metrics-address", "0"), tmp_path_factory.mktemp("shared")
    with server_process((), *flags, forked=True, cwd=folder) as server:
        metrics_port = int(server.metrics_address.rpartition(":")[2])
        yield {50051: server.port, 8080: server.http_port, 9464: metrics_port}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The same model for smaller images; the value maps the documented port to its port."""
    with server_process(("efficientnet_lite0?size=64",), forked=True, cwd=tmp_path_factory.mktemp("small")) as server:
        yield {50051: server.port}


@pytest.fixture
def reader(request, shared, tmp_path, monkeypatch):
    """A reader in a folder with the photo that the pages offer for download."""
    shutil.copy(ROOT / "docs" / "images" / "cat.jpg", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    page = request.node.callspec.id
    later = (ON_SMALL_IMAGES[page], request.getfixturevalue("small")) if page in ON_SMALL_IMAGES else None
    return Reader(tmp_path, monkeypatch, shared, later)


def named(path):
    return pytest.param(path, id=path.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("path", [named(path) for path in PAGES if "```" in path.read_text(encoding="utf-8")])
def test_code_blocks_of_a_page_run_in_order(path, reader):
    reader.read(path)

    assert [reason for reason in reader.skipped if reason not in REASONS and not (ROOT / reason).is_file()] == []
