"""A model compiled up to its default layer gives the same results, and compiles only while it is loaded."""

import logging
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import needs
from camserve_server import models
from camserve_server.core.errors import ConfigError
from camserve_server.engine.values import Row
from camserve_server.models import ModelSpec, digest, parse
from camserve_server.models.acceleration import compilation, layout, toolchain
from camserve_server.models.hooks import hook_count
from camserve_server.models.values import Pass
from camserve_server.targets.values import ClassTarget
from coloured import Finder
from methods.tools import CAMS, call, error_ratio, exact, gap, noise, run

pytestmark = pytest.mark.slow  # nothing is compiled by default

SIDE = 32
BATCHES = (1, 2, 11)
"""One row, several, and more than while the model was compiled."""

CALLS = {"cam": tuple(map(call, CAMS)), "curvature": (call("shapleycam"),), "score": ()}


@pytest.fixture(autouse=True, scope="module")
def cold(tmp_path_factory):
    """Compile without cached code, and use the result although such small models gain nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setattr(compilation, "_time_ratio", lambda *_: 0.5)
        yield


share = compilation._time_ratio
compiler = torch.compile


def trace(function, *, fullgraph, options):
    """Compile a function without generating C++ code, which takes fifteen seconds: its graph runs torch's own code.

    As `torch.compile` does, this removes the filter of guards from the options that it gets.
    """
    kept = {"guard_filter_fn": options.pop("guard_filter_fn")}
    return compiler(function, fullgraph=fullgraph, options=kept, backend="eager")


@pytest.fixture
def traced(monkeypatch):
    """Compile by `trace`, for tests of what happens around the compiler."""
    monkeypatch.setattr(torch, "compile", trace)


class Block(nn.Module):
    """A residual block; all blocks have the same shape and code."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, features):
        return torch.relu(self.bn(self.conv(features)) + features)


class Unruly(Block):
    """A block that cannot be compiled as a single graph."""

    def forward(self, features):
        torch._dynamo.graph_break()
        return super().forward(features)


class Tower(nn.Module):
    """Three blocks between a stem and a head, always with the same weights."""

    def __init__(self, middle=Block):
        torch.manual_seed(0)
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.one, self.two, self.three = Block(), middle(), Block()
        self.head = nn.Linear(8, 5)

    def forward(self, image):
        return self.head(torch.tanh(self.three(self.two(self.one(self.stem(image))))).mean((2, 3)))


class Short(Tower):
    """A tower of which only one block runs and is compiled: tracing a block takes 0.2 s."""

    def forward(self, image):
        return self.head(torch.tanh(self.one(self.stem(image))).mean((2, 3)))


def load(make=Tower, **options):
    planted = ModuleType("planted")
    planted.make = make
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "planted", planted)
        return models.load(ModelSpec("planted", "planted", "make", size=SIDE, **options))


@pytest.fixture(
    scope="module",
    params=["traced", "float32", "bfloat16"],
)
def pair(request):
    """Return a compiled model and the same model uncompiled; in bfloat16, in the other memory layout."""
    precision = "float32" if request.param == "traced" else request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "is_channels_last_faster", lambda *_, **__: precision == "float32")
        patch.setattr(torch, "compile", trace if request.param == "traced" else compiler)
        return [load(precision=precision, compile=compiling) for compiling in (True, False)]


def answers(model, rows, kind, layer=None):
    """Return all results of a batch of different images, from a thread of its own, as in a worker."""
    batch = [Row(noise(seed, SIDE), ClassTarget(3), CALLS[kind]) for seed in range(rows)]
    layers = [] if kind == "score" else [layer or model.info.default_layer]
    results = []
    thread = threading.Thread(target=lambda: results.extend(run(model, batch, layers, kind)))
    thread.start()
    thread.join()
    return [result.logits for result in results] + [
        heatmap for result in results for layer in result.maps for heatmap in layer
    ]


def calls_of_compiled_code(model, rows, kind):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        batch = [Row(noise(seed, SIDE), ClassTarget(3), CALLS[kind]) for seed in range(rows)]
        run(model, batch, [] if kind == "score" else [model.info.default_layer], kind)
    return sum(event.name.startswith("Torch-Compiled Region") for event in seen.events())


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("rows", BATCHES)
def test_results_equal_those_of_the_uncompiled_model(pair, rows, kind):
    """In bfloat16, fused operations do not round intermediate results."""
    if pair[0].info.precision == "float32":
        assert error(pair, rows, kind) <= 1
    else:
        assert max(map(gap, *(answers(model, rows, kind) for model in pair))) < 0.02


def error(pair, rows, kind):
    """Return the largest error ratio of a compiled model; plain float32 is the uncompiled model."""
    return max(map(error_ratio, *(answers(model, rows, kind) for model in (*pair, exact(pair[1])))))


def test_loaded_model_compiles_nothing_more(pair):
    model, before = pair[0], dict(counters["stats"])
    assert model.info.default_layer == "three"
    assert model.info.channels_last == (model.info.precision == "float32")
    assert model.accelerated.compiled_modules == ("one", "two", "three")
    for rows in BATCHES:
        for kind in CALLS:
            assert calls_of_compiled_code(model, rows, kind) == 3
    assert dict(counters["stats"]) == before


def test_counter_detects_later_compilation():
    before = dict(counters["stats"])
    torch.compile(lambda seen: seen + 1, backend="eager")(torch.zeros(3))
    assert dict(counters["stats"]) != before


def test_input_of_another_size_runs_uncompiled(pair):
    actual, expected = (model.accelerated.module for model in pair)
    before, image = dict(counters["stats"]), torch.randn(2, 3, 20, 20, dtype=pair[0].accelerated.dtype)
    with torch.no_grad():
        torch.testing.assert_close(actual(image), expected(image), rtol=0, atol=0)
    assert dict(counters["stats"]) == before


def test_model_itself_is_not_compiled_and_keeps_its_weights(pair):
    model, _ = pair
    assert digest(model.module) == model.info.digest
    assert not any("forward" in vars(module) for module in model.module.modules())
    for pass_ in (Pass("planted", "cam", (SIDE, SIDE), ("two",)), Pass("planted", "saliency", (SIDE, SIDE))):
        assert model.for_pass(pass_) is model
    assert hook_count(model.module) == 0


# --- modules that cannot be compiled ---


def test_missing_compiler_is_logged_and_the_model_runs(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    model = load(compile=True)
    assert model.accelerated.compiled_modules == ()
    assert "planted runs without being compiled: there is no C++ compiler: /nowhere/g++ is not installed" in caplog.text
    assert max(map(gap, answers(model, 3, "cam"), answers(load(), 3, "cam"))) == 0


BY_TRITON = r"""
from triton.runtime.build import compile_module_from_src
compile_module_from_src(name="probe", src='''
#include <Python.h>
static struct PyModuleDef probe = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&probe); }
''')
"""
"""The way in which Triton builds its module for a GPU's driver, shortened. Triton does this before the first kernel."""


@pytest.fixture
def noexec(tmp_path):
    """Return a folder on a file system that is mounted noexec."""
    folder = tmp_path / "noexec"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "noexec,size=16m", "none", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(needs.NOEXEC)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(not find_spec("triton"), reason=needs.TRITON)
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"CC": "/nowhere/gcc"},
        {"PATH": "/nowhere"},
        *({name: "{noexec}"} for name in ("HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TMPDIR")),
        {"TORCHINDUCTOR_CACHE_DIR": "{noexec}"},
    ],
    ids=lambda environment: "".join(environment) or "nothing",
)
def test_gpu_requirements_are_those_of_triton(environment, noexec, tmp_path, monkeypatch):
    for name in ("CC", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(noexec=noexec))
    done = subprocess.run([sys.executable, "-c", BY_TRITON], capture_output=True, text=True, check=False)

    assert (toolchain.missing_for("cuda:0") == "") == (done.returncode == 0), done.stderr


def test_missing_gpu_requirement_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "find_spec", lambda _name: ModuleType("triton"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert toolchain.missing_for("cuda:0") == "there is no C compiler: gcc, clang are not installed"
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert toolchain.missing_for("cuda:0") == f"Python's headers are not installed: there is no {tmp_path}/Python.h"
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    assert toolchain.missing_for("cuda:0") == ""
    monkeypatch.setattr(os, "ST_NOEXEC", 8, raising=False)
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=8))
    reason = toolchain.missing_for("cuda:0")
    assert f"compiled code cannot be loaded from {tmp_path}/new, which is mounted noexec" in reason
    assert "TRITON_CACHE_DIR names another folder" in reason
    monkeypatch.setattr(toolchain, "find_spec", lambda _name: None)
    assert toolchain.missing_for("cuda:0") == "Triton is not installed"


def test_noexec_folder_is_logged_and_the_model_runs(noexec, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(noexec / "new"))
    assert load(compile=True).accelerated.compiled_modules == ()
    assert f"runs without being compiled: compiled code cannot be loaded from {noexec}/new" in caplog.text


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("backend='inductor' raised:\nNotImplementedError: no such kernel\n\nSet TORCHDYNAMO_VERBOSE=1", "NotImpl"),
        ("C++ compile error\n\nCommand:\ng++ ...\n\nOutput:\nfatal error: Python.h: No such file", "fatal error: Py"),
        ("", ""),
    ],
)
def test_failing_compiler_is_a_warning(message, reason, monkeypatch, caplog):
    def failing(*_args, **_options):
        return broken

    def broken(_seen):
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "compile", failing)
    model = load(compile=True)
    assert model.accelerated.compiled_modules == ()
    assert f"one of model planted runs without being compiled: RuntimeError: {reason}" in caplog.text
    assert "model planted runs without being compiled: no module can be compiled" in caplog.text
    assert max(map(gap, answers(model, 3, "cam"), answers(load(), 3, "cam"))) == 0


@pytest.mark.usefixtures("traced")
def test_only_the_module_that_fails_to_compile_runs_uncompiled(caplog):
    caplog.set_level(logging.INFO)
    make = lambda: Tower(Unruly)  # noqa: E731 -- a factory
    model, plain = load(make, compile=True), load(make)
    assert model.accelerated.compiled_modules == ("one", "three")
    assert "two of model planted runs without being compiled: Unsupported: Call to `torch._dynamo.graph_break()`" in (
        caplog.text
    )
    assert "model planted: one, three compiled in " in caplog.text
    assert calls_of_compiled_code(model, 2, "cam") == 2
    assert error((model, plain), 3, "cam") <= 1


@pytest.mark.usefixtures("traced")
def test_compiled_code_with_other_results_is_discarded(monkeypatch, caplog):
    def wrong(part):
        settle(part)
        known = part._module.forward
        part._module.forward = lambda seen: known(seen) * 1.001

    settle = compilation.CompiledModule.enable
    monkeypatch.setattr(compilation.CompiledModule, "enable", wrong)
    model = load(Short, compile=True)
    assert model.accelerated.compiled_modules == ()
    assert "planted runs without being compiled: its default layer would be off by 0.00" in caplog.text
    assert max(map(gap, answers(model, 3, "cam"), answers(load(Short), 3, "cam"))) == 0


@pytest.mark.usefixtures("traced")
def test_slower_compiled_code_is_discarded(monkeypatch, caplog):
    times = iter([1.0, 1.25] * 5 + [1.0, 0.9] * 5)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compilation, "_time_ratio", share)
    monkeypatch.setattr(compilation, "_seconds", lambda *_: next(times))
    model = load(Short, compile=True)
    assert model.accelerated.compiled_modules == ()
    assert "runs without being compiled: it would be slower: a batch takes 1.25 times as long" in caplog.text
    assert calls_of_compiled_code(model, 2, "cam") == 0
    assert load(Short, compile=True).accelerated.compiled_modules == ("one",)
    assert "s: 0.90 of the time" in caplog.text


def test_model_that_takes_one_image_at_a_time_is_not_compiled(caplog):
    class Single(Tower):
        def forward(self, image):
            assert len(image) == 1, "one at a time"
            return super().forward(image)

    model = load(Single, compile=True)
    assert model.accelerated.compiled_modules == ()
    assert "runs without being compiled: AssertionError: one at a time" in caplog.text


def test_compiled_code_and_onednn_are_timed_in_turn(monkeypatch):
    ran = []
    monkeypatch.setattr(compilation, "_seconds", lambda *_: ran.append(f"{part.state}, {patch.state}") or 1.0)
    part, patch = SimpleNamespace(state=""), SimpleNamespace()
    patch.enable, patch.disable = (lambda state=state: setattr(patch, "state", state) for state in ("oneDNN", "torch"))
    monkeypatch.setattr(compilation.CompiledModule, "disable", lambda part: setattr(part, "state", "plain"))
    monkeypatch.setattr(compilation.CompiledModule, "enable", lambda part: setattr(part, "state", "compiled"))
    assert share(None, [part], torch.zeros(1), patch) == 1
    assert ran == ["plain, oneDNN", "compiled, torch"] * compilation.ROUNDS


def test_detector_is_not_compiled(plant, caplog):
    caplog.set_level(logging.INFO)
    assert plant(Finder, size=64, compile=True).accelerated is None
    assert "it cannot be accelerated (it detects objects" in caplog.text


def test_option_compile_is_true_or_false():
    assert parse("torchvision:resnet18?compile=true").compile
    assert not parse("torchvision:resnet18?compile=false").compile
    assert not parse("torchvision:resnet18").compile
    with pytest.raises(ConfigError, match='compile must be true or false, not "yes"'):
        parse("torchvision:resnet18?compile=yes")
