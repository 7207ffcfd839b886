"""The log has one line for each event, as text or JSON, and callers cannot add lines to it."""

import asyncio
import io
import json
import logging
import re

import numpy as np
import pytest

from camserve_server.core import logs

LOG = logging.getLogger("camserve_server.anything")


@pytest.fixture(autouse=True)
def house():
    """Restore the loggers after a test."""
    logger = logging.getLogger("camserve_server")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def lines(monkeypatch):
    """Configure the log in a format; return a function that reads its lines."""
    written = io.StringIO()

    def configure(form, level="info", process=None):
        monkeypatch.setattr(logs.sys, "stderr", written)
        logs.configure(level, form, process)
        return lambda: written.getvalue().split("\n")[:-1]

    return configure


@pytest.fixture
def request_id():
    def put(value):
        tokens.append(logs.REQUEST_ID.set(value))

    tokens = []
    yield put
    for token in reversed(tokens):
        logs.REQUEST_ID.reset(token)


def test_text_line_has_time_level_message_and_named_fields(lines):
    read = lines("text")
    LOG.info("model %s is warm", "net", extra=logs.fields(layer="features", ms=1.5))

    assert len(read()) == 1
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO model net is warm layer=features ms=1\.5", read()[0]
    )


def test_process_among_several_is_a_field_of_every_line(lines, monkeypatch):
    monkeypatch.setattr(logs, "_process", None)
    read = lines("text", process=3)
    LOG.info("one")
    logs.configure("info", "json")  # a worker, which inherits the number
    LOG.info("two")
    LOG.info("of another", extra=logs.fields(process=0))

    assert read()[0].endswith("INFO one process=3")
    assert [json.loads(line)["process"] for line in read()[1:]] == [3, 0]


def test_json_line_is_one_object_with_the_same_fields(lines):
    read = lines("json")
    LOG.warning("model %s is warm", "netж", extra=logs.fields(layer="features", ms=1.5))
    LOG.info("serving")
    first, second = map(json.loads, read())

    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", first.pop("time"))
    assert first == {"level": "warning", "message": "model netж is warm", "layer": "features", "ms": 1.5}
    assert second.keys() == {"time", "level", "message"}


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_line_has_only_the_id_of_its_own_request(form, lines, request_id):
    read = lines(form)
    request_id("call-7")
    LOG.info("Explain", extra=logs.fields(ms=1))
    request_id("")
    LOG.info("serving")
    about, other = read()

    assert json.loads(about)["request_id"] == "call-7" if form == "json" else about.endswith("ms=1 request_id=call-7")
    assert "request_id" not in other


async def test_concurrent_requests_keep_their_ids_apart(lines):
    read = lines("json")

    async def call(name):
        logs.REQUEST_ID.set(name)
        await asyncio.sleep(0)
        LOG.info(name)

    await asyncio.gather(*(call(f"call-{i}") for i in range(20)))
    entries = [json.loads(line) for line in read()]

    assert len(entries) == 20
    assert all(entry["message"] == entry["request_id"] for entry in entries)


def fail(message="one\ntwo"):
    error = ValueError(message).with_traceback(None)
    LOG.error("an RPC failed", exc_info=error, extra=logs.fields(rpc="Explain"))


def test_json_line_contains_the_exception(lines):
    read = lines("json")
    fail()
    (entry,) = map(json.loads, read())

    assert entry["message"] == "an RPC failed"
    assert entry["rpc"] == "Explain"
    assert entry["exception"] == "ValueError: one\ntwo"


def test_text_log_has_the_fields_before_the_exception(lines):
    read = lines("text")
    fail()

    assert read()[0].endswith("ERROR an RPC failed rpc=Explain")
    assert [line.strip() for line in read()[1:]] == ["ValueError: one", "two"]


def test_lines_of_an_exception_cannot_look_like_log_lines(lines):
    read = lines("text")
    fail("\n2026-01-01 00:00:00,000 INFO Explain code=OK")

    assert all(line.startswith(" ") for line in read()[1:])


def test_escape_sequences_in_an_exception_are_not_printed(lines):
    read = lines("text")
    fail("\x1b[2J\x1b]0;owned\x07")

    assert all(line.isprintable() for line in read())


def test_records_below_the_level_are_not_written(lines):
    read = lines("text", "warning")
    LOG.info("no")
    LOG.warning("yes")

    assert [line.rsplit(" ", 1)[1] for line in read()] == ["yes"]


def test_configuring_twice_adds_no_handler_and_keeps_other_loggers(lines):
    lines("text")
    read = lines("json")
    LOG.info("once")
    logging.getLogger("elsewhere").info("not ours")

    assert len(read()) == 1


def test_field_that_json_cannot_encode_is_written_as_text(lines):
    read = lines("json")
    LOG.info("Explain", extra=logs.fields(rows=np.int64(3), path=logging))

    assert [json.loads(line)["message"] for line in read()] == ["Explain"]


# A caller chooses names of models, labels and layers, and ids of requests; errors repeat them, and the log the errors.
FORGED = [
    "x\n2026-01-01 00:00:00,000 INFO Explain code=OK",
    "x\r\n2026-01-01 00:00:00,000 INFO Explain code=OK",
    "x\r2026-01-01 00:00:00,000 INFO Explain code=OK",
    "x\x0b2026\x0c-01\x1c-01\x85 INFO\u2028Explain\u2029code=OK",
]


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("form", ["text", "json"])
def test_value_from_a_caller_cannot_add_a_log_line(form, forged, lines):
    read = lines(form)
    LOG.info("Explain", extra=logs.fields(code="NOT_FOUND", error=f'unknown model "{forged}"'))
    LOG.info("model %s is unknown", forged)

    assert len(read()) == 2
    assert form == "json" or "".join(read()).isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_request_id_cannot_add_a_log_line(form, lines, request_id):
    read = lines(form)
    request_id(FORGED[0])
    LOG.info("Explain")

    assert len(read()) == 1


def test_escape_sequences_from_a_caller_are_not_printed(lines):
    read = lines("text")
    LOG.info("Explain", extra=logs.fields(error='unknown model "\x1b[2J\x1b]0;owned\x07"'))

    assert read()[0].isprintable()


def test_value_from_a_caller_cannot_imitate_another_field(lines):
    read = lines("text")
    LOG.info("Explain", extra=logs.fields(code="NOT_FOUND", error="unknown model x code=OK", ms=3))

    assert re.search(r""" error=(["'])unknown model x code=OK\1 ms=3$""", read()[0])
