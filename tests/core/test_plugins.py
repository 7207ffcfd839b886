"""Methods and model sources that other packages provide."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import camserve
import camserve_server
from camserve_server import methods, models
from camserve_server.core import plugins
from camserve_server.core.errors import ConfigError
from camserve_server.workers.in_process import InProcessWorker
from camserve_server.workers.messages import Setup
from support import PHOTOS, serving

SMALL = "small=torchvision:squeezenet1_1?weights=none&size=64"
EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example package, installed by pip into its own folder."""
    root = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, root / "source")  # pip leaves things there
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-build-isolation", "--no-index", "--target", root / "there", source]
    subprocess.run([*command, *options], check=True, timeout=100)
    yield root / "there"
    for name in ("camserve_example", "camserve_example.methods"):
        sys.modules.pop(name, None)


@pytest.fixture
def table():
    """The table of methods, restored after the test."""
    kept = dict(methods.METHODS)
    yield methods.METHODS
    methods.METHODS.clear()
    methods.METHODS.update(kept)


@pytest.fixture
def brought(tmp_path, monkeypatch, table):  # noqa: ARG001 -- what is brought is taken away again
    """Install a package with entry points and a module."""
    places = iter(range(9))

    def install(entries, code="", name="planted"):
        folder = tmp_path / str(next(places))
        about = folder / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(entries)
        (folder / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield install
    for name in ("planted", "second"):
        sys.modules.pop(name, None)


def test_method_and_source_of_an_installed_example_plugin_work(installed, monkeypatch, table):
    monkeypatch.syspath_prepend(str(installed))
    names = ["signed_layercam", "gradient_norm", "stripe_occlusion", "gradcam"]
    with serving(models=("zoo:stripes?weights=none",)) as served, camserve.Client(served.address) as client:
        listed = {method.name: method for method in client.methods()}
        result = client.explain(PHOTOS["chelsea"], methods=names)

    assert "signed_layercam" in table
    assert listed["signed_layercam"].summary.startswith("Weight each activation by its gradient, including")
    assert {prediction.label for prediction in result.predictions} <= {"plain", "striped"}
    assert [explanation.method for explanation in result.explanations] == names
    assert all(explanation.overlay and explanation.verdict != "FLAT" for explanation in result.explanations)


def test_worker_loads_the_methods_of_plugins(installed, monkeypatch, table):
    """A worker may run in its own process, whose table does not have the server's additions."""
    monkeypatch.syspath_prepend(str(installed))
    assert "signed_layercam" not in table

    InProcessWorker(
        Setup(device="cpu", threads=1, shares_device=False, log_level="error", log_format="text", path=())
    ).close()

    assert "signed_layercam" in table


def test_error_for_an_unknown_plugin_model_lists_the_known_ones(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    with pytest.raises(
        ConfigError, match=r'example-plugin 0.1.0 provides "zoo" .*there is no "spots" in the zoo: stripes'
    ):
        models.load(models.parse("zoo:spots"))


@pytest.mark.parametrize(
    ("entry", "code", "words"),
    [
        ("new = planted:nothing", "", r"the plugin planted 1.0 provides \"new\" .* cannot be loaded: AttributeError"),
        ("new = absent:it", "", "cannot be loaded: ModuleNotFoundError"),
        ("new = planted:it", "1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("new = planted:it", "it = 3", "that is a int, and a method is one of Cam, Saliency, Perturbation"),
        ("gradcam = planted:it", "it = 3", "not one of camserve's"),
        ("No-Name = planted:it", "it = 3", "a name has lower-case letters"),
    ],
)
def test_method_that_cannot_be_loaded_is_reported_with_its_package(brought, entry, code, words):
    brought(f"[camserve.methods]\n{entry}\n", code)
    before = set(methods.METHODS)

    with pytest.raises(ConfigError, match=words):
        methods.add_plugins()
    assert set(methods.METHODS) == before
    with pytest.raises(ConfigError, match=words), camserve_server.running(SMALL):
        pass


def test_error_for_a_duplicate_plugin_name_names_both_packages(brought):
    brought("[camserve.sources]\nzoo = planted:it\n")
    brought("[camserve.sources]\nzoo = second:it\n", name="second")

    with pytest.raises(ConfigError, match=r"(planted 1.0 and second|second 1.0 and planted) 1.0 both provide \"zoo\""):
        models.load(models.parse("zoo:net"))


def test_source_that_returns_no_module_is_refused(brought):
    brought("[camserve.sources]\nzoo = planted:it\n", "def it(spec):\n    return spec.arch")

    with pytest.raises(ConfigError, match="zoo:net made a str, not"):
        models.load(models.parse("zoo:net"))


def test_package_that_is_installed_later_into_the_same_folder_is_found(brought):
    folder = brought("[camserve.sources]\nzoo = planted:it\n")
    assert set(plugins.find(plugins.SOURCES)) == {"zoo"}

    shutil.copytree(folder / "planted-1.0.dist-info", later := folder / "later-1.0.dist-info")
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (later / "entry_points.txt").write_text("[camserve.sources]\nground = planted:it\n")
    assert set(plugins.find(plugins.SOURCES)) == {"zoo", "ground"}


def test_package_that_is_found_twice_counts_once(brought, monkeypatch):
    folder = brought("[camserve.sources]\nzoo = planted:it\n")
    monkeypatch.syspath_prepend(str(folder))

    assert plugins.find(plugins.SOURCES)["zoo"].value == "planted:it"


def test_files_in_the_working_directory_are_not_plugins(brought, monkeypatch):
    """Modules are imported from there, as with `python -m`, but nobody installed these files as plugins."""
    folder = brought("[camserve.methods]\nnew = planted:it\n", "raise SystemExit('it ran')")
    monkeypatch.chdir(folder)

    methods.add_plugins()

    assert "new" not in methods.METHODS
