"""A test run ends with one line for each reason of skips, with the command that installs the missing tool."""

import ast
import os
import re
from pathlib import Path

import pytest

import needs
import skipped

TESTS = Path(__file__).parent
REASONS = {name: value for name, value in vars(needs).items() if name.isupper() and ":" in value}
SKIPS = {"skip", "skipif", "importorskip"}
MENTIONS = re.compile(rf"\b({'|'.join(SKIPS)})\b")
FORM = re.compile(r"[^:]+ is (not installed|missing): \S.+")
MODULE = """
import pytest

pytest.importorskip("nothing_of_this_name", reason="a module is not installed: pip install it")
"""
SKIPPING = """
import pytest

@pytest.mark.parametrize("number", range({count}))
@pytest.mark.skipif(True, reason="a tool is not installed: apt-get install tool")
def test_skipped(number):
    pass

def test_passed():
    pass
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the tests of a folder with the plugin and without this project's configuration; return the output."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", os.devnull]

    def run(folder):
        assert pytest.main([*options, str(folder)], plugins=[skipped]) == pytest.ExitCode.OK
        return capsys.readouterr().out

    return run


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_some.py").write_text(SKIPPING.format(count=3))
    (tmp_path / "test_module.py").write_text(MODULE)
    return tmp_path


def test_each_reason_is_printed_once_with_its_count(folder, run):
    shown = run(folder)

    assert shown.count("apt-get install tool") == 1
    assert "    3  a tool is not installed: apt-get install tool\n" in shown
    assert "    1  a module is not installed: pip install it\n" in shown


def test_run_without_skipped_tests_prints_no_summary(tmp_path, run):
    (tmp_path / "test_passing.py").write_text("def test_passed(): pass")

    assert skipped.TITLE not in run(tmp_path)


@pytest.mark.parametrize("reason", REASONS.values(), ids=REASONS)
def test_reason_names_the_missing_tool_and_the_command_to_get_it(reason):
    assert FORM.fullmatch(reason)


def literal_reasons():
    """Yield the reason of every skip in this project's tests."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if MENTIONS.search(text) else []:
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name in SKIPS:
                words = [each.value for each in node.keywords if each.arg == "reason"]
                words += node.args[:1] if name == "skip" else []
                yield from ((path.name, word.value) for word in words if isinstance(word, ast.Constant))


def test_every_reason_for_a_missing_tool_names_its_command():
    results = [(name, text) for name, text in literal_reasons() if re.search(r"installed|missing|there is no", text)]

    assert [(name, text) for name, text in results if not FORM.fullmatch(text)] == []
