"""The benchmark beside other programs: its ratios, and one measurement of each kind in its smallest form."""

import dataclasses

import pytest
from benchmarks import contention, serving
from benchmarks.contention import DEFAULT, PASSIVE, QUIET, Sample, Subject
from benchmarks.scale import TINY

import benchmark_programs

pytestmark = pytest.mark.slow
IN_PROCESS, SERVED = contention.WAYS
SPEC = "timm:test_resnet?weights=none&size=64"


def sampled(monkeypatch, seconds):
    """Replace measurements by `seconds` for a checkout (None for this one) and a policy; return the environments."""
    environments = []

    def sample(subject, _calls, environment, _prefix=(), **_rate):
        environments.append(environment)
        p50 = seconds[subject.tree, PASSIVE if environment else DEFAULT]
        return Sample(ready=100 * p50, p50=p50, rate=1 / p50)

    monkeypatch.setattr(Subject, "sample", sample)
    return environments


def test_ratios_are_to_a_quiet_machine_and_to_passive_threads(monkeypatch):
    monkeypatch.setattr(contention, "PROGRAMS", {QUIET: 0, "one program": 1})
    environments = sampled(monkeypatch, {(None, DEFAULT): 0.04, (None, PASSIVE): 0.02})
    part = contention.measure(TINY, say=[].append)

    assert environments == [{}, {"OMP_WAIT_POLICY": "PASSIVE"}] * 4
    quiet, beside = part.tables[0].rows[:2]
    assert quiet == ("mobilenet_v3_small, in-process", "quiet", "4.0", "2.0", "40.0", "20.0", "1.00", "2.00")
    assert beside[1] == "one program"
    assert [bar.met for bar in part.bars[:4]] == [False, True, True, False]


def test_other_checkout_is_compared_by_speed(monkeypatch, tmp_path):
    sampled(monkeypatch, {(None, DEFAULT): 0.04, (tmp_path, DEFAULT): 0.02})
    part = contention.measure(dataclasses.replace(TINY, against=tmp_path, rounds=2), say=[].append)

    assert [row[2:] for row in part.tables[0].rows] == [("0.500", "0.50 0.50")] * 4
    assert not any(bar.met for bar in part.bars)


def test_explainer_is_measured_in_a_process_of_its_own(monkeypatch):
    benchmark_programs.fork(monkeypatch, contention)
    sample = Subject(IN_PROCESS, SPEC).sample(1, {"OMP_NUM_THREADS": "1"}, rate=True)

    assert min(dataclasses.astuple(sample)) > 0


def test_server_is_measured_too(monkeypatch):
    benchmark_programs.fork(monkeypatch, serving)
    sample = contention._sample(SERVED, SPEC, 1)

    assert min(sample.ready, sample.p50) > 0
    assert sample.rate == 0


def test_quota_that_cannot_be_set_is_left_out(monkeypatch):
    def refuse(*_args):
        raise PermissionError

    monkeypatch.setattr(contention.Path, "mkdir", refuse)
    with contention._quota(wanted=True) as prefix:
        assert prefix is None
