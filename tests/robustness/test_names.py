"""Names in requests are looked up in tables: no path is opened, no address asked, whatever they look like."""

import pytest

from robustness import watched

TINY = "tiny=torchvision:squeezenet1_1?weights=none&size=64"
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"}


@pytest.fixture(scope="module")
def answers():
    return watched.run("name_them", TINY)


@pytest.fixture(scope="module")
def hostile(answers):
    return {field: answer for field, answer in answers.items() if field not in ("sound", "control")}


def test_200_hostile_names_open_nothing_and_reach_nobody(hostile):
    assert len(hostile) >= 200
    assert {field: answer["heard"] for field, answer in hostile.items() if answer["heard"]} == {}


def test_each_is_refused_as_what_it_is(hostile):
    assert {field: answer["code"] for field, answer in hostile.items() if answer["code"] not in REFUSALS} == {}


def test_refusals_are_short_and_tell_nothing_of_the_server(hostile):
    assert {field: answer["wrong"] for field, answer in hostile.items() if answer["wrong"]} == {}


def test_the_ears_hear_a_file_opened_and_an_address_asked(answers):
    heard = {event for event, _ in answers["control"]["heard"]}
    assert {"open", "socket.connect"} <= heard


def test_a_sound_request_is_answered_among_them(answers):
    assert answers["sound"]["code"] == "OK"
