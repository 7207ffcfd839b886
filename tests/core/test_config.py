"""Sources of settings, their precedence, and the messages for invalid ones."""

import difflib
import json
import math
import os
import re
import sys

import pytest
from click.testing import CliRunner

from camserve_server.cli import commands
from camserve_server.core import config, errors
from camserve_server.core.errors import ConfigError
from camserve_server.core.limits import Limits

FIELDS = config.Settings.model_fields


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Remove the caller's own settings from the environment."""
    for name in os.environ:
        if name.startswith(config.ENVIRONMENT):
            monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "camserve.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def complaint(**given):
    with pytest.raises(ConfigError) as caught:
        config.load(**{"environment": {}, **given})
    return str(caught.value)


def test_defaults_are_loopback_and_the_embedded_model():
    settings = config.load(environment={})

    assert settings == config.Settings()
    assert settings.address == "127.0.0.1:50051"
    assert settings.models == ("efficientnet_lite0",)


def test_flags_override_the_environment_which_overrides_the_file(toml):
    path = toml("max_queue_rows = 1\nmax_batch_rows = 1\nthreads = 1\nlog_level = 'error'")
    environment = {"CAMSERVE_MAX_BATCH_ROWS": "2", "CAMSERVE_THREADS": "2", "CAMSERVE_DEVICE": "cpu"}
    settings = config.load(path, {"threads": "3", "drain_seconds": "90"}, environment)

    assert settings.max_queue_rows == 1
    assert settings.max_batch_rows == 2
    assert settings.threads == 3
    assert (settings.log_level, settings.device, settings.drain_seconds) == ("error", "cpu", 90.0)
    assert settings.stream_in_flight == FIELDS["stream_in_flight"].default


def test_flag_that_was_not_given_overrides_nothing():
    settings = config.load(flags={"threads": None}, environment={"CAMSERVE_THREADS": "2"})

    assert settings.threads == 2


def test_environment_of_the_process_is_read_when_the_server_starts(monkeypatch):
    monkeypatch.setenv("CAMSERVE_THREADS", "5")

    assert config.load().threads == 5


def test_unknown_environment_variables_are_ignored():
    assert config.load(environment={"CAMSERVE_VERSION": "1", "THREADS": "9"}) == config.Settings()


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_can_be_in_the_environment_and_in_the_file(name, toml):
    value = {
        "address": "0.0.0.0:1234",
        "models": "timm:resnet18",
        "device": "cuda:1",
        "isolation": "thread",
        "log_level": "debug",
        "log_format": "json",
        "tls_cert": "server.pem",
        "tls_key": "server.key",
        "tls_client_ca": "callers.pem",
        "tokens_file": "tokens",
        "model_folder": "weights",
        "insecure": True,
        "admin": True,
        "metrics_address": "127.0.0.1:7",
        "http_address": "127.0.0.1:8",
        "http_origins": "https://camserve.example.com",
        "traces": True,
        "access_log_share": 0.5,
    }.get(name, 7)
    from_environment = config.load(environment={f"CAMSERVE_{name.upper()}": str(value)})
    written = config.load(toml(f"{name} = {json.dumps(value)}"), environment={})

    assert getattr(from_environment, name) == ((value,) if name in ("models", "http_origins") else value)
    assert written == from_environment != config.Settings()


@pytest.mark.parametrize("written", ["timm:a torchvision:b", "timm:a,torchvision:b", " timm:a,\n torchvision:b , "])
def test_models_in_the_environment_are_separated_by_spaces_or_commas(written):
    assert config.load(environment={"CAMSERVE_MODELS": written}).models == ("timm:a", "torchvision:b")


def test_models_of_flags_replace_the_list_of_the_file(toml):
    path = toml("models = ['timm:a', 'cat=torchvision:b?weights=none']")

    assert config.load(path, environment={}).models == ("timm:a", "cat=torchvision:b?weights=none")
    assert config.load(path, {"models": ("timm:c",)}, {}).models == ("timm:c",)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_queue_row", "max_queue_rows"), ("adress", "address"), ("Threads", "threads"), ("zzz", None)],
)
def test_unknown_setting_is_reported_with_a_suggestion(name, hint, toml):
    message = complaint(path=toml(f"{name} = 1"))

    assert message == f'unknown setting "{name}"' + (f' (did you mean "{hint}"?)' if hint else "")


def test_table_in_the_file_is_an_unknown_setting_too(toml):
    assert complaint(path=toml("[server]\nthreads = 1")) == 'unknown setting "server"'


OUT_OF_RANGE = [
    ("threads", -1, "greater than or equal to 0"),
    ("threads", 1025, "less than or equal to 1024"),
    ("max_batch_rows", 4097, "less than or equal to 4096"),
    ("max_queue_rows", 0, "greater than or equal to 1"),
    ("max_queue_rows", 1_000_001, "less than or equal to 1000000"),
    ("max_queue_delay_ms", -0.5, "greater than or equal to 0"),
    ("max_queue_delay_ms", math.nan, "equal to"),
    ("max_request_rows", 0, "greater than or equal to 1"),
    ("max_message_mib", 0, "greater than or equal to 1"),
    ("max_message_mib", 1025, "less than or equal to 1024"),
    ("max_pixels", 0, "greater than or equal to 1"),
    ("max_side", 0, "greater than or equal to 1"),
    ("max_streams", 0, "greater than or equal to 1"),
    ("stream_in_flight", 0, "greater than or equal to 1"),
    ("stream_in_flight", 1025, "less than or equal to 1024"),
    ("drain_seconds", -1, "greater than or equal to 0"),
    ("drain_seconds", math.inf, "less than or equal to 3600"),
    ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ("log_format", "xml", "'text' or 'json'"),
    ("models", [], "name at least one"),
    ("threads", "many", "valid integer"),
    ("threads", 1.5, "valid integer"),
    ("drain_seconds", "soon", "valid number"),
    ("processes", 0, 'write a number from 1 to 64, or "auto"'),
    ("processes", 65, 'write a number from 1 to 64, or "auto"'),
    ("processes", "many", 'write a number from 1 to 64, or "auto"'),
    ("processes", True, 'write a number from 1 to 64, or "auto"'),
]


@pytest.mark.parametrize(("name", "value", "words"), OUT_OF_RANGE)
def test_invalid_value_is_reported_with_its_name_and_the_allowed_values(name, value, words):
    message = complaint(flags={name: value})

    assert message.startswith(f"{name} = {value!r}: ")
    assert words in message
    assert "\n" not in message
    assert "pydantic" not in message


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:http", ":50051x", ""])
def test_address_without_a_valid_port_is_refused(address):
    assert complaint(flags={"address": address}).startswith(f"address = {address!r}: ")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "0.0.0.0:65535", "localhost:50051", "[::1]:50051", "unix:/run/camserve"]
)
def test_address_is_a_host_and_port_or_a_unix_socket(address):
    assert config.load(flags={"address": address}, environment={}).address == address


@pytest.mark.parametrize(("written", "processes"), [("auto", "auto"), ("4", 4), (4, 4)])
def test_processes_are_a_number_or_auto(written, processes, toml):
    assert config.load(flags={"processes": written}, environment={}).processes == processes
    assert config.load(toml(f"processes = {json.dumps(written)}"), environment={}).processes == processes


def test_all_invalid_settings_are_reported_at_once():
    message = complaint(flags={"threads": -1, "log_level": "loud", "thread": 3})

    assert [part.split(" ")[0] for part in message.split("; ")] == ["threads", "log_level", "unknown"]


def test_unreadable_file_is_reported_with_its_path(tmp_path, toml):
    missing = tmp_path / "missing.toml"

    assert complaint(path=missing) == f"cannot read {missing}: No such file or directory"
    assert complaint(path=tmp_path).startswith(f"cannot read {tmp_path}: ")
    assert "is not valid TOML: " in complaint(path=toml("threads: 3"))
    assert "is not valid TOML: " in complaint(path=toml(b"address = '\xff'"))


def test_request_limits_follow_the_settings_and_the_queue_limits_the_chunk():
    settings = config.load(flags={"max_pixels": 100, "max_side": 20, "max_request_rows": 50}, environment={})
    small = config.load(flags={"max_request_rows": 50, "max_queue_rows": 8}, environment={})

    assert settings.limits == Limits(pixels=100, side=20, rows=50)
    assert (small.limits.rows, small.limits.chunk) == (50, 8)


def test_settings_are_immutable():
    with pytest.raises(ValueError, match="frozen"):
        config.Settings().threads = 3


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_description_and_a_flag_in_the_help(name, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    help_text = " ".join(CliRunner().invoke(commands.program, ["serve", "--help"], terminal_width=1000).output.split())
    flag = "--model" if name == "models" else f"--{name.replace('_', '-')}"
    description = FIELDS[name].description

    assert description
    assert description.endswith(".")
    value = "" if FIELDS[name].annotation is bool else r"\S+ "
    assert re.search(rf"{flag} {value}{re.escape(description)}", help_text)


def test_every_flag_sets_its_setting(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "path", sys.path[:])  # the command puts the current folder there
    monkeypatch.setattr(commands.config, "load", lambda path, flags: seen.append((path, flags)) or _stop())
    given = {name: "7" for name in FIELDS if name not in ("models", "insecure", "admin", "traces")}
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    arguments += ["--insecure", "--admin", "--traces"]
    CliRunner().invoke(commands.program, ["serve", "--config", "c.toml", "--model", "a", "--model", "b", *arguments])

    assert seen == [("c.toml", {**given, "models": ("a", "b"), "insecure": True, "admin": True, "traces": True})]


def _stop():
    raise ConfigError("far enough")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cat", ' (did you mean "tiger cat", "Persian cat", "Egyptian cat" or "cat bowl"?)'),
        ("Tiger", ' (did you mean "tiger cat"?)'),
        ("cat, tiger", ' (did you mean "tiger cat"?)'),
        ("crat", ' (did you mean "crate"?)'),
        ("(cat|dog)+", ""),
        ("?", ""),
        ("cat " * 60, ""),
    ],
)
def test_hint_prefers_names_with_the_same_words(name, hint):
    labels = ["crate", "tiger cat", "Persian cat", "Egyptian cat", "cat bowl", "scatter rug", "catamaran"]

    assert errors.did_you_mean(name, labels) == hint


NAMES_OF_A_CALLER = {
    "many": [f"label {number}" for number in range(21_000)],
    "alike": [f"{'label 2x' * 7}{number}" for number in range(1000)],
    "long": ["label 2x" * 40 + str(number) for number in range(1000)],
}


@pytest.mark.parametrize("known", NAMES_OF_A_CALLER.values(), ids=NAMES_OF_A_CALLER)
@pytest.mark.parametrize("name", ["label 2x", "label 2x" * 5, "label 2x" * 20])
def test_hint_compares_few_short_names_letter_by_letter(name, known, monkeypatch):
    """The texts of a request may be the labels of its model, and hints are made on the event loop."""
    compared, counted = [], []

    def compare(name, names, **_):
        compared.extend([name, *names])
        return []

    class Letters(difflib.SequenceMatcher):
        def quick_ratio(self):
            counted.append(len(self.a))
            return super().quick_ratio()

    monkeypatch.setattr(errors.difflib, "get_close_matches", compare)
    monkeypatch.setattr(errors.difflib, "SequenceMatcher", Letters)
    errors.did_you_mean(name, known)

    assert len(compared) <= 1 + errors.MANY_SPELLED
    assert max(map(len, compared), default=0) <= errors.LONGEST_SPELLED
    assert len(counted) <= errors.MANY_NAMES
    assert max(counted, default=0) <= errors.LONGEST_SPELLED
