"""Dashboards, alerts and log queries of the recorded release still work."""

import pytest

from compatibility import comparing, servers, storage

pytestmark = pytest.mark.slow
RECORDED = storage.read("telemetry")


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    return servers.observe(tmp_path_factory.mktemp("exporter"))


@pytest.mark.parametrize("when", ["at rest", "after a request"])
def test_metrics_have_every_recorded_name_type_and_label(when, observed):
    assert comparing.lost(RECORDED[when], observed[when]) == []


def test_spans_have_every_recorded_name_and_attribute(observed):
    assert comparing.lost(RECORDED["spans"], observed["spans"]) == []


def test_log_line_of_a_request_has_every_recorded_field(observed):
    assert comparing.lost(RECORDED["log"], observed["log"]) == []
