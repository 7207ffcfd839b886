"""check-config: all that is wrong with a file of settings, at once, where it stands."""

import json
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from camserve_server.cli import commands
from camserve_server.core import config

SMALL = "small=torchvision:squeezenet1_1?weights=none&size=64&classes=7"
EXAMPLES = Path(__file__).parents[2] / "examples"
FAULTY = """\
adress = "127.0.0.1:50051"
address = "0.0.0.0:50051"
threads = -3
models = [
  "timm:resnet81?weights=none",
  "torchvision:resnet18?wieghts=none",
  "a=torchvision:resnet18?weights=nothing.pth",
  "efficientnet_lite0",
  "efficientnet_lite0?size=64",
  "nosuchthing:build",
  "hf:google/vit-base-patch16-224",
  "tim:resnet18",
  "net.pt",
]
device = "gpu"
tls_cert = "x.pem"
tokens_file = "tokenz"
model_folder = "nowhere"
"""
FAULTS = (
    (1, 'unknown setting "adress" (did you mean "address"?)'),
    (3, "threads = -3: "),
    (5, 'timm has no model "resnet81" (did you mean'),
    (6, 'has no option "wieghts" (did you mean "weights"?)'),
    (7, "weights=nothing.pth: there is no such file"),
    (9, 'two are called "efficientnet_lite0"'),
    (10, '"nosuchthing" is not a source, and there is no module nosuchthing either'),
    (11, "nothing is fetched from the Hub here"),
    (12, '"tim" is not a source (did you mean "timm"?)'),
    (13, '"net.pt" is a file'),
    (15, 'device "gpu"'),
    (16, "TLS needs both"),
    (17, "cannot read tokenz"),
    (18, "model_folder = nowhere: there is no such folder"),
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Keep the log configuration of the test run."""
    monkeypatch.setattr(commands.logs, "configure", lambda *_: None)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Run the command in an empty folder on a file with this text; return the exit code and the lines."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAMSERVE_THREADS", "none of its business")

    def run(text, *options):
        Path("camserve.toml").write_bytes(text.encode() if isinstance(text, str) else text)
        result = CliRunner().invoke(commands.program, ["check-config", "camserve.toml", *options])
        return result.exit_code, result.output.splitlines()

    return run


def test_all_faults_are_reported_with_their_lines(check):
    code, lines = check(FAULTY)

    assert code == 1
    assert lines[-1] == f"camserve.toml: {len(FAULTS)} faults"
    for line, (number, words) in zip(lines, FAULTS, strict=False):
        assert line.startswith(f"camserve.toml:{number}: ")
        assert words in line


def test_fault_is_reported_at_the_line_of_its_setting(check):
    _, lines = check(
        'threads = 1\nmetrics_address = "0.0.0.0:9464"\naddress = "127.0.0.1:0"\ntls_key = "x.pem"\nmodels = []\n'
    )

    assert [line.split(":")[1] for line in lines[:-1]] == ["2", "4", "5"]
    assert lines[0].startswith("camserve.toml:2: 0.0.0.0:9464 can be reached from other machines")
    assert lines[2] == "camserve.toml:5: models = []: name at least one"


def test_valid_file_is_reported_without_loading_models(check, monkeypatch):
    monkeypatch.setattr("camserve_server.cli.config_check.models.load", lambda *_: pytest.fail("a model was loaded"))

    assert check('models = ["timm:vit_base_patch16_224?weights=none", "torchvision:resnet50"]\nthreads = 2') == (
        0,
        ["camserve.toml: valid"],
    )


def test_users_module_is_found_but_not_run(check, tmp_path):
    (tmp_path / "my_nets.py").write_text("raise SystemExit('it ran')")

    assert check('models = "my_nets:build"')[0] == 0


def test_load_describes_each_model(check, tmp_path):
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    more = "second=torchvision:squeezenet1_1?weights=none&size=32&classes=2&labels=labels.txt"
    code, lines = check(f'models = ["{SMALL}", "{more}"]\ndevice = "cpu"', "--load")

    assert code == 0
    assert lines[0].startswith("small: torchvision:squeezenet1_1, 64x64 pixels, 7 classes, without labels; layer ")
    assert lines[1].startswith('second: torchvision:squeezenet1_1, 32x32 pixels, 2 classes, "cat" to "dog"; layer ')
    assert lines[2] == "camserve.toml: valid"


def test_load_reports_a_broken_model_at_its_line(check, tmp_path):
    (tmp_path / "broken_nets.py").write_text("def build():\n    raise RuntimeError('no weights here')")
    code, lines = check('models = [\n  "broken_nets:build",\n  "' + SMALL + '",\n]\ndevice = "cpu"', "--load")

    assert code == 1
    assert lines[0].startswith("small: ")
    assert lines[1].startswith("camserve.toml:2: models: ")
    assert lines[1].endswith("RuntimeError: no weights here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("threads = 1\nthreads: 3", "camserve.toml:2: camserve.toml is not valid TOML: "),
        (b"address = '\xff'", "camserve.toml: camserve.toml is not valid TOML: "),
        ("address = '0.0.0.0:1'", "camserve.toml:1: 0.0.0.0:1 can be reached from other machines"),
        ("address = 'unix:x'\nprocesses = 2", "camserve.toml:2: processes = 2: a Unix socket serves one process"),
        ("models = []", "camserve.toml:1: models = []: "),
        ("models = 3", "camserve.toml:1: models = 3: "),
        ("[server]\nthreads = 1", 'camserve.toml:1: unknown setting "server"'),
    ],
)
def test_file_that_is_not_toml_is_reported_in_one_line(check, text, words):
    code, lines = check(text)

    assert (code, lines[-1]) == (1, "camserve.toml: 1 fault")
    assert lines[0].startswith(words)


def test_missing_file_is_reported(check, tmp_path):
    check("")
    (tmp_path / "camserve.toml").unlink()
    result = CliRunner().invoke(commands.program, ["check-config", "camserve.toml"])

    assert (result.exit_code, result.output.splitlines()[0]) == (
        1, "camserve.toml: cannot read camserve.toml: No such file or directory",
    )  # fmt: skip
    assert "missing FILE" in CliRunner().invoke(commands.program, ["check-config"]).output


@pytest.fixture
def schema():
    result = json.loads(CliRunner().invoke(commands.program, ["check-config", "--schema"]).output)
    jsonschema.Draft7Validator.check_schema(result)
    return jsonschema.Draft7Validator(result)


def test_schema_has_every_setting_with_description_and_default(schema):
    listed = schema.schema["properties"]

    assert list(listed) == list(config.Settings.model_fields)
    for name, setting in config.Settings.model_fields.items():
        assert listed[name]["description"] == setting.description
        default = listed[name]["default"]
        assert (tuple(default) if isinstance(default, list) else default) == setting.default


def test_schema_accepts_and_refuses_the_same_as_the_server(schema):
    taken = {"threads": 3, "models": ["a=timm:resnet18?weights=none", "hf:./models/vit"], "log_level": "debug"}
    assert schema.is_valid(taken)
    assert not config.faults_of(taken)
    for wrong in ({"threads": -1}, {"thread": 1}, {"log_level": "loud"}, {"models": []}, {"models": ["?"]}):
        assert not schema.is_valid(wrong)
        assert config.faults_of(wrong) or wrong == {"models": ["?"]}  # a model's name is read later


def test_example_is_valid_and_names_its_schema(schema, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(EXAMPLES)
    text = Path("camserve.toml").read_text(encoding="utf-8")
    result = CliRunner().invoke(commands.program, ["check-config", "camserve.toml"])

    assert (result.exit_code, result.output) == (0, "camserve.toml: valid\n")
    assert text.startswith("#:schema ./camserve.schema.json\n")
    assert schema.is_valid(tomllib.loads(text))
