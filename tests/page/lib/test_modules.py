"""The tests of the modules that run in Node.js itself, and the files of the page."""

import subprocess
import sys
from pathlib import Path

import pytest

import needs
from camserve.web import assets
from page.lib.conftest import LIBRARY, NODE

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.skipif(NODE is None, reason=needs.NODE)
@pytest.mark.parametrize("file", sorted(HERE.glob("*.test.mjs")), ids=lambda file: file.name)
def test_modules_pass_their_tests_in_node(file):
    done = subprocess.run([NODE, file], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_colour_maps_are_generated_from_those_of_the_server():
    command = [sys.executable, ROOT / "tools" / "generate_colormaps.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


def test_modules_need_no_inline_script_and_no_other_origin():
    for file in LIBRARY.glob("*.js"):
        source = file.read_text()
        assert not any(word in source for word in ("eval(", "new Function", "innerHTML", "https://", ".style."))


def test_browser_loads_at_most_90_kilobytes():
    files = assets.load()
    del files[""]  # the page once more

    assert sum(len(file.compressed or file.body) for file in files.values()) <= 90_000
