"""`camserve-server tune`: measurements, the choice of settings, and the report."""

import dataclasses
import io
import math
import os
import tomllib

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import camserve
from camserve_server.app import server
from camserve_server.cli import commands
from camserve_server.core import config, hardware
from camserve_server.core.errors import ConfigError, FailedPrecondition, OutOfMemory
from camserve_server.tuning import bench, choice, report, survey
from camserve_server.tuning.survey import Measurement, Survey, Variant
from support import serving

ONE, TWO, HALF = Variant("net", "float32", 1), Variant("net", "float32", 2), Variant("net", "bfloat16", 2)
MODEL = "resnet18=timm:test_resnet?weights=none&size=64"


class Machine:
    """Fake machine on which only batches take time, as given by a function."""

    def __init__(self, seconds):
        self.seconds, self.now, self.ran = seconds, 0.0, []

    def clock(self):
        return self.now

    def run(self, line, batch):
        self.ran.append((line, batch))
        self.now += self.seconds(line, batch)

    def survey(self, lines, seconds=1e6, latency=1e6):
        return survey.measure(lines, self.run, seconds, latency, self.clock)


def cells(line, **seconds):
    """Cells of a line: b4=0.1 is a batch of four in 0.1 seconds."""
    return tuple(Measurement(line, int(name[1:]), took) for name, took in seconds.items())


def chosen(*measured_cells, latency=1.0, usual="float32", **options):
    return choice.choose(Survey(measured_cells, ()), {"net": usual}, latency, **options)


# Measurements


def test_batches_grow_while_they_gain_more_than_5_percent():
    """A batch of up to 8 images takes as long as one image; each further image adds time."""
    machine = Machine(lambda _line, batch: max(1.0, batch / 8))
    result = machine.survey([ONE])
    assert [cell.batch for cell in result.measurements] == [1, 2, 4, 8, 16]
    assert result.left_out == ()


def test_batches_stop_growing_after_one_that_is_too_slow():
    result = Machine(lambda _line, batch: batch**0.5).survey([ONE], latency=1.9)
    assert [cell.batch for cell in result.measurements] == [1, 2, 4]


def test_variants_take_turns_and_the_first_round_is_a_warmup():
    seconds = iter([50, 50, 1, 2, 1, 2, 1, 2])
    machine = Machine(lambda _line, _batch: next(seconds))
    result = machine.survey([ONE, TWO], latency=0.5)
    assert machine.ran == [(ONE, 1), (TWO, 1)] * 4
    assert [cell.seconds for cell in result.measurements] == [1, 2]


def test_single_slow_round_does_not_change_the_median():
    seconds = iter([1.0, 1.0, 30.0, 1.25])
    assert Machine(lambda _line, _batch: next(seconds)).survey([ONE], latency=0.5).measurements[0].seconds == 1.25


@pytest.mark.parametrize("seconds", [5, 20, 60, 300])
def test_time_limit_is_kept_and_skipped_batches_are_reported(seconds):
    machine = Machine(lambda _line, batch: 0.9 * batch**0.9)
    result = machine.survey([ONE, TWO, HALF], seconds)
    assert machine.now <= seconds + 0.9
    assert result.left_out
    attempted_cells = {(cell.variant, cell.batch) for cell in result.measurements} | set(result.left_out)
    for line in (ONE, TWO, HALF):
        batches = [batch for its, batch in attempted_cells if its == line]
        assert sorted(batches) == list(survey.BATCHES[: len(batches)])


def test_out_of_memory_ends_the_growth_of_one_variant_only():
    def run(line, batch):
        if line == ONE and batch == 4:
            raise OutOfMemory("the device has no memory for this", retry_after=1.0)
        return 0.1

    result = Machine(run).survey([ONE, TWO])
    assert [(cell.batch, cell.seconds) for cell in result.measurements if cell.variant == ONE][-1] == (4, math.inf)
    assert [cell.batch for cell in result.measurements if cell.variant == TWO] == list(survey.BATCHES)


# Choice


def test_smallest_of_equally_fast_batches_is_chosen():
    best = chosen(*cells(TWO, b1=0.1, b2=0.1, b4=0.1, b8=0.196, b16=0.39))
    assert (best.batch, best.threads) == (4, 2)
    assert best.reason == "4 images per batch and 2 threads: 8 would be 2% faster"


def test_batch_beyond_the_latency_limit_is_not_chosen():
    best = chosen(*cells(TWO, b1=0.5, b2=0.6, b4=1.1, b8=1.2), latency=1.0)
    assert best.batch == 2
    assert best.reason.endswith("4 would take 1,100 ms, and the limit is 1,000 ms")


def test_shortest_batch_is_chosen_if_all_are_too_slow():
    best = chosen(*cells(ONE, b1=3.0, b2=5.0), *cells(TWO, b1=2.0, b2=3.5), latency=1.0)
    assert (best.batch, best.threads) == (1, 2)
    assert "no measured batch takes less than 1,000 ms" in best.reason


def test_fewer_threads_are_chosen_where_they_are_faster():
    assert chosen(*cells(ONE, b1=0.1), *cells(TWO, b1=0.2)).threads == 1


def test_faster_precision_is_chosen_only_if_allowed():
    result = *cells(TWO, b1=0.3), *cells(HALF, b1=0.1)
    assert chosen(*result).measurements["net"].variant.precision == "float32"
    assert chosen(*result, any_precision=True).measurements["net"].variant.precision == "bfloat16"
    assert chosen(*result, usual="bfloat16").measurements["net"].variant.precision == "bfloat16"


def test_batch_without_memory_is_not_chosen():
    assert chosen(*cells(TWO, b1=0.1, b2=math.inf), latency=math.inf).batch == 1


def test_choice_is_fair_to_several_models():
    """One thread is twice as fast for the small model, and a quarter as fast for the large one."""
    small, large = Variant("small", "float32", 1), Variant("large", "float32", 1)
    result = (
        *(*cells(small, b1=0.1), *cells(Variant("small", "float32", 2), b1=0.2)),
        *(*cells(large, b1=0.8), *cells(Variant("large", "float32", 2), b1=0.2)),
    )
    usual = {"small": "float32", "large": "float32"}
    best = choice.choose(Survey(result, ()), usual, 1.0)
    assert best.threads == 2
    with pytest.raises(ConfigError, match="allow more seconds"):
        choice.choose(Survey(cells(small, b1=0.1), ()), usual, 1.0)


# Report


def tuned(*measured_cells, left=(), **options):
    return report.TuningResult(
        Survey(measured_cells, left),
        chosen(*measured_cells, **options),
        {("net", "bfloat16"): 0.99987},
        {"net": "net=timm:resnet18"},
    )


def test_table_compares_with_float32_and_marks_the_choice():
    rows = tuned(*cells(TWO, b1=0.1), *cells(HALF, b1=0.04)).rows()
    assert rows == [
        ("net", "float32", "2", "1", "100", "10", "1.00", "", "chosen"),
        ("net", "bfloat16", "2", "1", "40", "25", "2.50", "0.9998", ""),
    ]


def test_summary_has_speed_and_similarity_of_other_precisions():
    words = tuned(*cells(TWO, b1=0.1), *cells(HALF, b1=0.04), left=[(ONE, 2)]).summary()
    alike = "(cosine similarity of its maps to float32: at least 0.9998)"
    assert words[1:] == [
        f"net: float32, exact; bfloat16 would be 2.5 times as fast {alike}.",
        "Not measured, for lack of time: net in float32 with 1 thread from batch size 2 on.",
    ]
    taken = tuned(*cells(TWO, b1=0.1), *cells(HALF, b1=0.04), any_precision=True).summary()
    assert taken[1] == f"net: bfloat16, 2.5 times as fast as float32 {alike}."


@pytest.mark.parametrize(
    ("text", "precision", "respelled"),
    [
        ("timm:resnet18", "float32", "timm:resnet18"),
        ("timm:resnet18", "bfloat16", "timm:resnet18?precision=bfloat16"),
        ("a=timm:resnet18?weights=none", "bfloat16", "a=timm:resnet18?weights=none&precision=bfloat16"),
        ("timm:resnet18?precision=bfloat16&size=64", "float32", "timm:resnet18?size=64&precision=float32"),
        ("timm:resnet18?precision=bfloat16", "bfloat16", "timm:resnet18?precision=bfloat16"),
    ],
)
def test_chosen_precision_is_added_to_the_models_text(text, precision, respelled):
    assert report._with_precision(text, precision) == respelled


def test_settings_with_special_characters_are_valid_toml():
    settings = {"models": ['a?labels=C:\\nötes"x.txt'], "threads": 2, "log_level": "info"}
    settings["max_queue_delay_ms"] = 0.5  # real timeout: only written and read
    assert tomllib.loads(report.toml(settings)) == settings


def test_other_settings_of_a_file_are_kept(tmp_path):
    path = tmp_path / "camserve.toml"
    path.write_text('# mine\nmax_queue_rows = 7\nthreads = 9\nmodels = [\n  "timm:vgg16",\n]\n')
    report.write(path, {"models": ["timm:resnet18"], "threads": 2, "max_batch_rows": 4}, ["Because."])
    settings = config.load(path, environment={})
    assert (settings.models, settings.threads, settings.max_batch_rows) == (("timm:resnet18",), 2, 4)
    assert settings.max_queue_rows == 7
    assert "# Because.\n" in path.read_text()


def test_processes_that_fit_are_proposed_and_not_written():
    result = tuned(*cells(TWO, b1=0.1))
    several = dataclasses.replace(result, processes=4)

    proposal = "Not measured: 4 processes fit this machine, with --processes auto."
    assert several.summary() == [*result.summary(), proposal]
    assert several.settings() == result.settings()


def test_unwritable_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory"):
        report.write(tmp_path / "gone" / "camserve.toml", {"threads": 2}, [])


def test_invalid_file_is_not_overwritten(tmp_path):
    path = tmp_path / "camserve.toml"
    path.write_text("thread = 9\n")
    with pytest.raises(ConfigError, match=r'unknown setting "thread" \(did you mean "threads"'):
        report.write(path, {"threads": 2}, [])
    assert path.read_text() == "thread = 9\n"


# Command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to an empty folder, remove settings from the environment, and restore torch's threads."""
    for name in os.environ:
        if name.startswith("CAMSERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "cores", lambda: 1)  # tests share their cores
    monkeypatch.setattr(survey, "BATCHES", (1, 2))
    threads = torch.get_num_threads()
    yield tmp_path
    assert torch.get_num_threads() == threads


def run(*arguments):
    device = () if "--device" in arguments else ("--device", "cpu")
    return CliRunner().invoke(commands.program, ["tune", "--seconds", "600", *device, *arguments])


def test_tuned_settings_are_written_and_can_be_served(folder):
    result = run(MODEL, "--write", "camserve.toml", "--latency-ms", "60000")
    assert result.exit_code == 0, result.output

    settings = config.load(folder / "camserve.toml", environment={})
    assert settings.models == (MODEL,)
    assert settings.threads == 1
    assert settings.max_batch_rows in (1, 2)
    packed = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(packed, "PNG")
    written = tomllib.loads((folder / "camserve.toml").read_text())
    with serving(**written) as served, camserve.Client(served.address) as client:
        assert client.explain(packed.getvalue()).explanations[0].method == "gradcam"


def test_settings_are_printed_after_the_table_without_a_file(folder):
    result = run(MODEL)
    assert result.exit_code == 0, result.output
    heading, *lines = result.stdout.splitlines()
    assert heading.split()[:3] == ["model", "precision", "threads"]
    assert sum(line.rstrip().endswith("chosen") for line in lines) == 1
    assert tomllib.loads("\n".join(lines[-3:]))["models"] == [MODEL]
    assert "\x1b" not in result.stdout
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["timm:resnet5000"], 'timm has no model "resnet5000" (did you mean'),
        ([MODEL, MODEL], 'two models are called "resnet18"'),
        ([MODEL, "--device", "gpu"], 'device "gpu"'),
        ([MODEL, "--write", "here.toml"], "here.toml exists: --force replaces the tuned settings"),
        ([MODEL, "--write", "gone/camserve.toml"], "cannot write gone/camserve.toml: there is no folder gone"),
        ([MODEL, "--write", "."], "cannot write .: it is a folder"),
        (["--write", "wrong.toml", "--force"], 'unknown setting "thread"'),
    ],
)
def test_errors_are_reported_before_any_measurement(arguments, words, folder, monkeypatch):
    monkeypatch.setattr(bench.Bench, "run", lambda *_: pytest.fail("it was measured"))
    (folder / "here.toml").write_text("threads = 1\n")
    (folder / "wrong.toml").write_text("thread = 1\n")
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert words in result.stderr
    assert result.stdout == ""


def test_models_default_to_those_of_the_file(folder):
    (folder / "camserve.toml").write_text(f'models = ["{MODEL}"]\nmax_queue_rows = 7\n')
    result = run("--write", "camserve.toml", "--force")
    assert result.exit_code == 0, result.output
    settings = config.load(folder / "camserve.toml", environment={})
    assert (settings.models, settings.max_queue_rows) == ((MODEL,), 7)


def test_another_precisions_maps_are_compared_for_the_same_class(monkeypatch):
    """Float32 equals itself. A model with other weights that claims another precision is detected."""
    monkeypatch.setattr(bench, "precisions", lambda _device: ("float32", "bfloat16"))
    ready = bench.prepare(server.specs_by_name([MODEL]), "cpu")
    kinds = ready.models["resnet18"]
    assert ready.similarity("resnet18", "float32") == pytest.approx(1, abs=1e-6)
    assert 0.99 < ready.similarity("resnet18", "bfloat16") < 1
    kinds["bfloat16"] = dataclasses.replace(kinds["bfloat16"], accelerated=None)
    with torch.no_grad():
        kinds["bfloat16"].module.layer4[0].conv2.weight.mul_(-1)
    assert ready.similarity("resnet18", "bfloat16") < 0.9


def test_failure_in_a_precision_names_the_model(monkeypatch):
    def refuse(*_):
        raise FailedPrecondition("no gradient came back")

    monkeypatch.setattr(bench, "precisions", lambda _device: ("float32",))
    ready = bench.prepare(server.specs_by_name([MODEL]), "cpu")
    monkeypatch.setattr(bench.Engine, "run", refuse)
    with pytest.raises(ConfigError, match="model resnet18 in float32: no gradient came back"):
        ready.run(Variant("resnet18", "float32", torch.get_num_threads()), 1)


@pytest.mark.parametrize(("load", "reported"), [((9.0, 0, 0), True), ((0.1, 0, 0), False)])
def test_busy_machine_is_reported(load, reported, monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: load)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    commands._announce(["net"], 60)
    assert ("busy (load 9.0)" in capsys.readouterr().err) is reported


@pytest.mark.parametrize("can", ["amx_bf16", "avx512_bf16", ""])
def test_cpu_is_measured_in_its_native_precisions(can, monkeypatch):
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False} | ({can: True} if can else {})
    )
    assert bench.precisions("cpu") == (("float32", "bfloat16") if can else ("float32",))


@pytest.mark.parametrize(
    ("device", "precisions"),
    [("cuda:0", ("float32", "float16")), ("cuda:1", ("float32", "bfloat16", "float16"))],
)
def test_gpu_is_measured_in_its_native_precisions(monkeypatch, device, precisions):
    """GPUs below compute capability 8.0 emulate bfloat16."""
    capabilities = {torch.device("cuda:0"): (7, 5), torch.device("cuda:1"): (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)

    assert bench.precisions(device) == precisions


def test_variant_sets_its_threads_and_they_are_restored(monkeypatch):
    monkeypatch.setattr(bench, "precisions", lambda _device: ("float32",))
    ready, before = bench.prepare(server.specs_by_name([MODEL]), "cpu"), torch.get_num_threads()
    with bench.restore_threads():
        for threads in (2, 1):
            assert len(ready.run(Variant("resnet18", "float32", threads), 2)) == 2
            assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before


def test_images_are_always_the_same_and_all_different():
    some, again = bench.images((32, 48), 4), bench.images((32, 48), 4)
    assert [each.shape for each in some] == [(32, 48, 3)] * 4
    assert all(np.array_equal(each, other) for each, other in zip(some, again, strict=True))
    assert len({each.tobytes() for each in some}) == 4
