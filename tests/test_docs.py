"""Documentation: examples run as printed, and lists and tables match the code."""

import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
import yaml

import camserve
import camserve_server
import fork_server
import needs
from camserve_server import methods, metrics
from camserve_server.cli import commands
from camserve_server.imaging import render
from camserve_server.models import spec
from methods.parity.catalogue import CASES
from support import PHOTOS, serving

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLUGIN = ROOT / "examples" / "plugin"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SMALL = "small=timm:test_resnet?weights=none&size=64"


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def code(document, opening):
    """Return the code block of a document that begins with these words, without its indentation."""
    for indent, block in re.findall(r"^( *)```python\n(.*?)^ *```", document, re.DOTALL | re.MULTILINE):
        text = "\n".join(line.removeprefix(indent) for line in block.splitlines())
        if text.startswith(opening):
            return text
    pytest.fail(f"no code begins with {opening!r}")


def test_page_on_own_methods_shows_the_example_plugin():
    module = (PLUGIN / "camserve_example" / "methods.py").read_text(encoding="utf-8")
    shown = "\n".join(
        code(page("own-method"), opening) for opening in ("from coll", "def _s", "def _grad", "def _stripe")
    )
    (toml,) = re.findall(r"```toml\n(.*?)```", page("own-method"), re.DOTALL)
    project = (PLUGIN / "pyproject.toml").read_text(encoding="utf-8")

    assert [line for line in shown.splitlines() if line not in module.splitlines()] == []
    assert [line for line in toml.splitlines() if line not in project.splitlines()] == []


@pytest.mark.parametrize("name", reference.PARTS)
def test_reference_page_agrees_with_the_code(name):
    assert page(f"reference/{name}") == reference.generated(name), "run 'make reference'"


def test_reference_page_without_the_marks_of_a_part_is_refused(monkeypatch):
    monkeypatch.setitem(reference.PARTS, "errors", lambda: {**reference.errors.parts(), "new": ""})

    with pytest.raises(ValueError, match=r"errors\.md has marks for"):
        reference.generated("errors")


def test_setting_without_a_subject_is_refused(monkeypatch):
    others = {title: names for title, names in reference.settings.GROUPS.items() if title != "Lifetime"}
    monkeypatch.setattr(reference.settings, "GROUPS", others)  # `delitem` would put it back at the end

    with pytest.raises(ValueError, match="GROUPS must have every setting once"):
        reference.settings.parts()


def test_models_page_lists_every_option_of_a_model():
    table = re.search(r"## Options\n(.*?)\n## ", page("models"), re.DOTALL).group(1)
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)

    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(spec.OPTIONS)


def test_readme_lists_every_method_once():
    rows = re.findall(
        r"^\| method: [^|]* \| (.*) \|$",
        README,
        re.MULTILINE,
    )
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]

    assert sorted(listed) == sorted(methods.METHODS)


def test_readme_counts_methods_metrics_and_colour_maps():
    assert f"{len(methods.METHODS)} explanation methods" in README
    assert f"{len(metrics.METRICS)} metrics" in README
    assert f"{len(render.COLORMAPS)} colour maps" in README


def test_evaluation_page_lists_every_metric_and_which_way_is_better():
    listed = re.findall(r"^\| `(\w+)` \| (lower|higher) ", page("evaluation"), re.MULTILINE)

    assert listed == [(name, "higher" if each.higher_is_better else "lower") for name, each in metrics.METRICS.items()]


def test_client_page_lists_every_colour_map():
    listed = re.search(r"Colour maps: (.*?)\.\n", page("client"), re.DOTALL).group(1)

    assert re.findall(r"`(\w+)`", listed) == sorted(render.COLORMAPS)


def test_errors_page_lists_every_error_class():
    listed = set(re.findall(r"^\| \[[A-Z_]+\].*? \| `(\w+)`", page("reference/errors"), re.MULTILINE))
    classes = {
        name
        for name, value in vars(camserve).items()
        if isinstance(value, type) and issubclass(value, camserve.CamserveError) and value is not camserve.CamserveError
    }

    assert listed == classes | {"CamserveError"}  # of a status without a class of its own


def test_api_pages_list_every_public_name():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^\.\. auto\w+:: (camserve|camserve_server)\.(\w+)$", pages, re.MULTILINE)
    public = [(module.__name__, name) for module in (camserve, camserve_server) for name in module.__all__]

    assert sorted(listed) == sorted(public)


@pytest.mark.slow  # each run imports torch
def test_diff_page_snapshot_is_recorded_and_compared(tmp_path):
    shutil.copy(PHOTOS["chelsea"], tmp_path / "cat.jpg")
    for opening in ("# conftest.py", "# test_model.py"):
        (tmp_path / opening.removeprefix("# ")).write_text(code(page("diff"), opening))
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"

    def run(*flags):
        return fork_server.run(program, "-q", "-p", "no:cacheprovider", *flags, cwd=tmp_path)

    missing = run()
    assert (missing.returncode, "record it with pytest --camserve-update" in missing.stdout) == (1, True)
    assert run("--camserve-update").returncode == 0
    assert run().returncode == 0


@pytest.mark.parametrize(
    ("name", "candidate"),
    [("diff", "my_package.models:build"), ("tutorials/ci-gate", "fruit:build?weights=fruit.safetensors")],
)
def test_workflow_of_diff_has_commands_that_parse(name, candidate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    (text,) = re.findall(r"```yaml\n(name: looks.*?)```", page(name), re.DOTALL)
    workflow = yaml.safe_load(text)
    (command,) = [step["run"] for step in workflow["jobs"]["diff"]["steps"] if "diff" in step.get("run", "")]
    words = shlex.split(command)
    context = commands.program.commands["diff"].make_context("diff", words[2:])

    assert words[:2] == ["camserve-server", "diff"]
    assert context.params["candidate"] == candidate


@pytest.fixture
def table():
    """The table of methods. Its content and order are restored after the test."""
    kept = dict(methods.METHODS)
    yield methods.METHODS
    methods.METHODS.clear()
    methods.METHODS.update(kept)


def test_contributing_method_example_is_one_function_and_one_line(table):
    """The example of CONTRIBUTING, added to a running server, works in requests, targets, batches and pictures."""
    names = {"Tensor": torch.Tensor}
    exec(code(CONTRIBUTING, "def gradcam_elementwise"), names)  # noqa: S102 -- that is the promise
    line = code(CONTRIBUTING, '"gradcam_elementwise"')
    added = eval("{" + line + "}", {"Cam": methods.Cam, "cams": type("cams", (), names)})  # noqa: S307 -- the same

    del table["gradcam_elementwise"]  # as before it was added
    with serving(models=(SMALL,)) as served, camserve.Client(served.address) as client:
        with pytest.raises(camserve.NotFound, match="unknown method"):
            client.explain(PHOTOS["chelsea"], methods="gradcam_elementwise")
        table |= added
        listed = {method.name: method.summary for method in client.methods()}
        result = client.explain(
            PHOTOS["chelsea"], methods=["gradcam_elementwise", "hirescam"], targets=[3, camserve.contrast(3, 4)]
        )

    assert (
        listed["gradcam_elementwise"]
        == "Weight each value of the feature maps by its own gradient and keep the positive products"
    )
    new, old = result.explanations[0].heatmap, result.explanations[2].heatmap
    assert (new >= np.maximum(old, 0) * (1 - 1e-6)).all()  # the positive parts alone are at least the sum
    assert all(each.overlay for each in result.explanations)


def generator(name):
    """Return the module of a script that writes a page."""
    spec = importlib.util.spec_from_file_location(f"generate_{name}", ROOT / "docs" / "generate" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_methods_page_agrees_with_the_servers_table():
    script = generator("methods_page")

    assert script.PAGE.read_text(encoding="utf-8") == script.text(), "run 'make gallery'"


def test_every_method_has_a_gallery_picture_or_a_reason():
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").partition("## ")[0]
    for name in methods.METHODS:
        (cell,) = re.findall(rf"^\| \[`{name}`\]\(methods.md#{name}\) \| (.+) \|$", gallery, re.MULTILINE)
        pictured = re.fullmatch(rf"!\[{name}\]\((images/gallery/{name}.jpg)\)", cell)

        assert (ROOT / "docs" / pictured[1]).exists() if pictured else "needs" in cell


def test_every_attention_method_is_shown_and_evaluated_on_a_transformer():
    section = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").partition("## On a transformer\n")[2]
    assert (ROOT / "docs" / "images" / "gallery" / "collage.jpg").exists()
    for name in (
        "gradcam",
        *(name for name, method in methods.METHODS.items() if isinstance(method, methods.Attention)),
    ):
        row = rf"^\| \[`{name}`\]\(methods.md#{name}\) \| (\S+) \| (\S+) \| !\[{name}\]\((images/gallery/\w+.jpg)\) \|$"
        ((share, peak, picture),) = re.findall(row, section, re.MULTILINE)

        assert (ROOT / "docs" / picture).exists(), "run 'make gallery'"
        for value in (float(share), float(peak)):
            assert value == 0.25 if name == "attention_rollout" else value > 0.25


def test_photos_of_the_gallery_collages_are_in_the_stated_quarters():
    script = generator("transformer")
    photos = {name: np.full((40 + 9 * i, 80 - 9 * i, 3), 60 * i, np.uint8) for i, name in enumerate(script.SHOWN)}
    whole = np.asarray(script.collage(script.SHOWN, photos))
    for place, name in enumerate(script.SHOWN):
        left, top, right, bottom = script.quarter(place)
        assert (whole[top:bottom, left:right] == photos[name][0, 0]).all()

    taught = script.put_together(torch.arange(8).view(2, 4, 1, 1, 1).expand(2, 4, 3, 1, 1))
    assert taught.tolist() == [[[[0, 1], [2, 3]]] * 3, [[[4, 5], [6, 7]]] * 3]


def test_parity_table_has_every_case():
    table = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    for case in CASES:
        assert f"| `{case.method}` | {case.oracle} |" in table, "run 'make parity'"


def file_names_shown(text, names):
    """Return the names among these that a page of the site shows: a link's text that is a file name becomes a title."""
    unseen = r"<!--.*?-->|^```\{include\}[^\n]*|(?<=\])\([^)\s]+\)"  # comments, includes, and targets of links
    links = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)[^)]*\)")
    shown = links.sub(lambda link: "" if Path(link[1]).name == Path(link[2]).name else link[0], text)
    shown = re.sub(unseen, "", shown, flags=re.DOTALL | re.MULTILINE)
    return [name for name in re.findall(r"[\w-]+\.md\b", shown) if name in names]


def test_pages_of_the_site_name_each_other_by_titles():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "decisions"} & set(path.parts)]
    names = {path.name for path in pages}

    found = {
        path.relative_to(ROOT).as_posix(): shown
        for path in (*pages, ROOT / "README.md")
        if (shown := file_names_shown(path.read_text(encoding="utf-8"), names))
    }

    assert found == {}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[diff.md](diff.md#a) [docs/diff.md](docs/diff.md) [a gate](diff.md) <!-- diff.md -->", []),
        ("see diff.md", ["diff.md"]),
        ("```sh\ncamserve diff  # diff.md\n```", ["diff.md"]),
        ("[as in diff.md](diff.md) [`[12]`](diff.md) [other.md](other.md) other.md", ["diff.md"]),
    ],
)
def test_file_name_that_a_page_shows_is_found(text, shown):
    assert file_names_shown(text, {"diff.md"}) == shown


def test_licence_list_has_every_pinned_package():
    listed = re.findall(
        r"^\| ([\w.-]+) \| ([\w.]+) \| (?:client, server|server|development) \| [^|]+ \|$",
        page("supply-chain"),
        re.MULTILINE,
    )
    pinned = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]

    assert sorted(map(list, listed)) == sorted(pinned)


DRIVERS = {"13": "580"}
"""The oldest driver for a major version of CUDA: docs.nvidia.com/deploy/cuda-compatibility, under minor versions."""


@pytest.mark.skipif(not torch.version.cuda, reason=needs.CUDA_BUILD)
@pytest.mark.parametrize("name", ["docs/container.md", "docs/kubernetes.md"])
def test_page_states_the_driver_and_gpu_that_the_image_needs(name):
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    pinned = re.search(r"^cuda-toolkit==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    oldest = min(int(each.removeprefix("sm_")) for each in torch.cuda.get_arch_list())

    assert pinned.groups() == tuple(torch.version.cuda.split(".")[:2])
    assert f"CUDA {torch.version.cuda}" in text
    assert f"driver {DRIVERS[pinned[1]]} or newer" in text
    assert f"compute capability {oldest // 10}.{oldest % 10} " in text
