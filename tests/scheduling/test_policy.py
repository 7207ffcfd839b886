"""Rules of the batching policy, each as a direct test of its pure function."""

import math

import pytest

from camserve_server.scheduling import policy
from camserve_server.scheduling.policy import TurnOrder

NOW = 1000.0


def urgency(**changed):
    """Sort key of a pass that has just arrived, with one short request and no deadline, unless changed."""
    values = {"oldest_arrival": NOW, "last_turn": 0.0, "nearest_deadline": math.inf, "only_long": False}
    return policy.pass_urgency(NOW, **(values | changed))


# --- callers ---


def test_callers_take_turns():
    turns, order = TurnOrder(), []
    for _ in range(6):
        order.append(turns.next(["a", "b", "c"]))
        turns.record_turn(order[-1])

    assert order == ["a", "b", "c", "a", "b", "c"]


def test_new_caller_goes_first():
    turns = TurnOrder()
    for caller in ("a", "b"):
        turns.record_turn(caller)

    assert turns.next(["a", "b", "new"]) == "new"


def test_caller_whose_last_turn_was_longest_ago_goes_first():
    turns = TurnOrder()
    for caller in ("a", "b", "c", "a"):
        turns.record_turn(caller)

    assert turns.next(["c", "a", "b"]) == "b"
    assert turns.next(["c", "a"]) == "c"


def test_number_of_remembered_callers_is_limited():
    turns = TurnOrder()
    for number in range(policy.MAX_REMEMBERED_CALLERS + 1):
        turns.record_turn(str(number))

    assert turns.last("0") == 0
    assert turns.last("1") == 2


# --- passes of one caller ---


def test_pass_with_the_oldest_request_goes_first():
    assert urgency(oldest_arrival=NOW - 0.5) < urgency(oldest_arrival=NOW - 0.1)


def test_pass_that_was_served_longest_ago_goes_first():
    early = NOW - 10
    assert urgency(oldest_arrival=early, last_turn=NOW - 3) < urgency(oldest_arrival=early, last_turn=NOW - 2)


def test_pass_with_a_near_deadline_goes_first():
    assert urgency(nearest_deadline=NOW + 0.5) < urgency()
    assert urgency(nearest_deadline=NOW + 0.1) < urgency(nearest_deadline=NOW + 0.2)


def test_far_deadline_changes_nothing():
    assert urgency(nearest_deadline=NOW + 30) == urgency()


def test_pass_with_short_requests_goes_before_an_older_one_with_only_long():
    assert urgency() < urgency(oldest_arrival=NOW - 0.9, only_long=True)


def test_pass_with_only_long_requests_is_put_off_for_a_second_at_most():
    assert urgency(oldest_arrival=NOW - policy.PASS_TIMEOUT, only_long=True) < urgency()
    assert urgency(oldest_arrival=NOW - 10, last_turn=NOW - policy.PASS_TIMEOUT, only_long=True) < urgency()
    assert urgency(oldest_arrival=NOW - 10, last_turn=NOW - 0.5, only_long=True) > urgency()


def test_long_request_with_a_near_deadline_is_not_put_off():
    assert urgency(nearest_deadline=NOW + policy.DEADLINE_MARGIN, only_long=True) <= urgency(oldest_arrival=NOW)
    assert urgency(nearest_deadline=NOW + 2 * policy.DEADLINE_MARGIN, only_long=True) > urgency()


# --- requests of one pass ---


def test_request_with_the_fewest_rows_left_goes_first():
    few, many = (policy.request_urgency(NOW, deadline=math.inf, waiting_rows=rows) for rows in (3, 4))
    assert few < many


def test_request_with_a_near_deadline_goes_before_a_shorter_one():
    near = policy.request_urgency(NOW, deadline=NOW + policy.DEADLINE_MARGIN, waiting_rows=100)
    far = policy.request_urgency(NOW, deadline=NOW + 2, waiting_rows=1)
    assert near < far


def test_each_caller_adds_one_request_in_turn():
    assert policy.take_turns([["a1", "a2", "a3"], ["b1"], ["c1", "c2"]]) == ["a1", "b1", "c1", "a2", "c2", "a3"]


# --- long requests ---


@pytest.mark.parametrize(
    ("rows", "max_batch_inputs", "long"), [(8, 8, False), (9, 8, True), (32, 64, False), (33, 64, True)]
)
def test_request_is_long_if_it_fills_more_than_a_batch_or_32_rows(rows, max_batch_inputs, long):
    assert policy.is_long(rows, max_batch_inputs) == long


def test_short_request_is_expected_for_ten_seconds_after_the_last_one():
    assert policy.expects_short_request(NOW - 9.9, NOW)
    assert not policy.expects_short_request(NOW - 10, NOW)
    assert not policy.expects_short_request(-math.inf, NOW)


@pytest.mark.parametrize(("batch_inputs", "oldest"), [(4, 1), (8, 2), (64, 16)])
def test_quarter_of_every_batch_belongs_to_the_oldest_request(batch_inputs, oldest):
    assert [policy.inputs_for_oldest(batch_inputs, batches) for batches in range(4)] == [oldest] * 4


@pytest.mark.parametrize("batch_inputs", [1, 2, 3])
def test_every_fourth_small_batch_starts_with_the_oldest_request(batch_inputs):
    assert [policy.inputs_for_oldest(batch_inputs, batches) for batches in range(8)] == [0, 1, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(("batch_inputs", "long"), [(1, 1), (3, 1), (8, 2), (64, 16)])
def test_long_request_gets_a_quarter_while_a_short_one_is_expected(batch_inputs, long):
    assert policy.inputs_for_long(batch_inputs, short_expected=True) == long
    assert policy.inputs_for_long(batch_inputs, short_expected=False) == batch_inputs


# --- two batches at once on one worker ---


@pytest.mark.parametrize(
    ("collects", "has_long", "short_expected", "only_full"),
    [
        (False, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, True, True, True),  # a short request must not wait for a long one's partition
        (True, False, False, True),  # rows are held back until a batch is full
    ],
)
def test_only_full_batches_share_a_worker(collects, has_long, short_expected, only_full):
    shares = policy.only_full_batches_share(collects=collects, has_long=has_long, short_expected=short_expected)
    assert shares == only_full


@pytest.mark.parametrize(
    ("waiting", "other", "inputs"), [(1, 0, 1), (2, 0, 1), (3, 0, 2), (1, 3, 2), (16, 0, 8), (100, 8, 8)]
)
def test_partitions_get_equal_parts_up_to_a_full_batch(waiting, other, inputs):
    assert policy.partition_inputs(waiting, other, 8) == inputs


def test_batch_gets_the_whole_worker_if_no_other_could_share_it():
    assert policy.gets_whole_worker(0, 8, only_full=False)
    assert not policy.gets_whole_worker(1, 8, only_full=False)
    assert policy.gets_whole_worker(7, 8, only_full=True)
    assert not policy.gets_whole_worker(8, 8, only_full=True)


# --- refusals ---


@pytest.mark.parametrize(
    ("rows", "row_seconds", "workers", "seconds"),
    [(100, 0.01, 1, 0.5), (100, 0.01, 2, 0.25), (1, 0.001, 1, 0.05), (1024, 1.0, 1, 5.0)],
)
def test_retry_after_is_half_of_the_expected_time_within_limits(rows, row_seconds, workers, seconds):
    assert policy.retry_after(rows, row_seconds, workers) == pytest.approx(seconds)
