"""Commands import nothing from the current folder, which may be untrusted."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import fork_server

PROGRAM = Path(sys.executable).with_name("camserve-server")
SMALL = "small=torchvision:squeezenet1_1?weights=none&size=32"
MINE = "mine=nets_of_mine:net?size=32"
WRITE_NAME = "open({mark!r}, 'a').write(__name__ + '\\n')\nraise ImportError('it ran')\n"
NEVER_INSTALLED = ("sitecustomize", "usercustomize", "apex", "flash_attn", "openvino", "camserve_plugins")
NETS = """
from torch import nn

def net():
    import not_installed_anywhere  # in the same folder, which is searched once a spec names a module in it
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
"""
CHECK = ("check-config", "mine.toml", "--load")
FORKED = """
import atexit, json, sys
sys.path.remove('')
atexit.register(lambda: print(json.dumps(sys.path)))
from camserve_server.cli import main
main()
"""
"""The command in a fork, which imports little; at its end it prints where it would search for modules."""
BOTH = """
import json, runpy, sys
program, commands = sys.argv[1:]
for arguments in json.loads(commands):
    sys.argv = [program, *arguments]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ending:
        if ending.code:
            raise
"""
"""The program with several commands, one after the other: a new process imports torch for seconds."""
EXPLAIN = ("explain", "photo.png", "--resume", "--device", "cpu")


@pytest.fixture(scope="module")
def names():
    """Return every module name that Python or camserve may import."""
    installed = [name for name in importlib.metadata.packages_distributions() if name.isidentifier()]
    return {*sys.stdlib_module_names, *installed, *NEVER_INSTALLED}


@pytest.fixture
def folder(tmp_path, names):
    """Return a folder with a photo, and a module for each of these names."""
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.png")
    (tmp_path / "mine.toml").write_text(f'models = ["{SMALL}", "{MINE}"]\ndevice = "cpu"')
    (tmp_path / "nets_of_mine.py").write_text(NETS)
    (tmp_path / "not_installed_anywhere.py").touch()
    for name in names:
        (tmp_path / f"{name}.py").write_text(WRITE_NAME.format(mark=str(tmp_path / "it ran")))
    return tmp_path


def run(folder, *command):
    """Run a command in a folder; return its exit code and the modules of the folder that it imported."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return result.returncode, imported_in(folder)


def imported_in(folder):
    """Return the modules of the folder that were imported, of those that it should not be asked for."""
    mark = folder / "it ran"
    return mark.read_text().split() if mark.exists() else []


@pytest.mark.parametrize(("model", "places"), [(SMALL, []), (MINE, [-1])], ids=["another's", "mine"])
def test_folder_is_searched_last_and_only_for_a_module_that_the_settings_name(tmp_path, model, places):
    (tmp_path / "nets_of_mine.py").write_text(NETS)
    (tmp_path / "not_installed_anywhere.py").touch()
    (tmp_path / "mine.toml").write_text(f'models = ["{model}"]\ndevice = "cpu"')
    done = fork_server.run(FORKED, *CHECK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout.splitlines()[-1])

    assert [place - len(path) for place, entry in enumerate(path) if entry in ("", ".", str(tmp_path))] == places


@pytest.mark.slow
def test_commands_import_nothing_from_the_current_folder(folder):
    """Only a module that the settings or the model name is imported, with its own imports, after all others.

    The flag --resume starts a worker process.
    """
    commands = json.dumps([CHECK, (*EXPLAIN, "-o", "out", "--model", MINE)])

    assert run(folder, sys.executable, "-P", "-c", BOTH, PROGRAM, commands) == (0, [])


def test_planted_modules_are_imported_by_python_without_protection(folder):
    _, imported = run(folder, sys.executable, "-c", "import torch")
    assert imported
