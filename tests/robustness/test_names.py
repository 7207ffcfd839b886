"""Names in requests are looked up in tables: they open no file and no connection."""

import pytest

from robustness import nets, process_audit

REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"}


@pytest.fixture(scope="module")
def answers():
    return process_audit.run_module("hostile_names", nets.TINY)


@pytest.fixture(scope="module")
def hostile(answers):
    return {field: answer for field, answer in answers.items() if field not in ("sound", "control")}


def test_200_hostile_names_open_no_file_and_no_connection(hostile):
    assert len(hostile) >= 200
    assert {field: answer["events"] for field, answer in hostile.items() if answer["events"]} == {}


def test_hostile_names_are_refused_as_client_errors(hostile):
    assert {field: answer["code"] for field, answer in hostile.items() if answer["code"] not in REFUSALS} == {}


def test_errors_are_short_and_reveal_no_internals(hostile):
    assert {field: answer["wrong"] for field, answer in hostile.items() if answer["wrong"]} == {}


def test_audit_records_an_opened_file_and_a_connection(answers):
    events = {event for event, _ in answers["control"]["events"]}
    assert {"open", "socket.connect"} <= events


def test_valid_request_among_hostile_names_is_answered(answers):
    assert answers["sound"]["code"] == "OK"
