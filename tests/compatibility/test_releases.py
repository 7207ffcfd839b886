"""The client of the recorded release works with the server of this tree, and this tree's client with its server.

`records/` has the wheel of the release, so that the tests need neither git nor an index. The wheel of 0.1.0 is that of
commit b8f21e6.
"""

import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

import camserve
from compatibility import nets, release, storage, surfaces
from server_process import server_process

pytestmark = pytest.mark.slow
(WHEEL,) = storage.FOLDER.glob("*.whl")
RECORDED = WHEEL.name.split("-")[1]
CHANGELOG = (surfaces.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with both packages of the recorded release."""
    folder = tmp_path_factory.mktemp("release")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture
def with_release(folder, monkeypatch):
    """Make new processes import the packages of the recorded release."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, surfaces.ROOT / "tests"))))
    return folder


def outcomes_of_release(address, folder):
    """Return what the client of the recorded release gets from a server, in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "compatibility.release", address]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def check(old, new, folder):
    """Check that both clients got the same, and that the old one was that of the release."""
    assert old["client"] == str(folder)
    assert new["client"] == str(surfaces.ROOT / "clients/python")
    assert len(old["calls"]) == len(new["calls"]) > 90
    assert release.differences(old["calls"], new["calls"]) == []


def test_records_are_of_the_last_release_before_this_version_or_of_this_version():
    """A version whose predecessor was never recorded would be compared with a release that nobody supports any more."""
    newest, before, *_ = re.findall(r"^## (\d\S*)", CHANGELOG, re.MULTILINE)

    assert surfaces.version() == newest
    assert RECORDED in (newest, before), "run tests/compatibility/record.py in the tree of the last tag"


def test_client_of_recorded_release_gets_what_the_new_client_gets(address, with_release):
    check(outcomes_of_release(address, with_release), release.outcomes(address), with_release)


def test_new_client_gets_what_the_client_of_recorded_release_gets(with_release):
    """It is slow because the recorded server is a process that imports torch."""
    with server_process(nets.MODELS, "--device", "cpu", "--threads", "1") as server:
        with camserve.Client(server.address) as client:
            served = {method.name for method in client.methods()}
        old, new = outcomes_of_release(server.address, with_release), release.outcomes(server.address)

    assert served == {method["name"] for method in storage.read("calls")["methods"]["value"]}
    check(old, new, with_release)


def test_differences_are_losses_and_changes_and_not_additions_or_rounding():
    then = {"maps": [[0.1, 0.2]], "label": "fox", "score": 1.0, "gone": None}
    now = {"maps": [[0.1, 0.3]], "label": "frog", "score": 1.0000001, "added": 1}

    assert release.differences(then, now) == [
        ".gone: gone",
        ".maps[0][1]: 0.3, and it was 0.2",
        ".label: 'frog', and it was 'fox'",
    ]
