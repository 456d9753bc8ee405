"""The bounded queues: coalescing, shedding, order, flushing."""

from __future__ import annotations

import threading
import time

import pytest

from appliance.catalog.backlog import Backlog, ControlItem
from appliance.catalog.events import EngineEnded, ObjectsForgotten, ObjectsUsed, UsedObject
from tests.unit.catalog.samples import (
    NAMESPACE,
    chunk_key,
    clear,
    engine,
    fingerprint,
    lease_end,
    restart,
    stored_batch,
)


@pytest.fixture
def backlog():
    return Backlog(history_capacity=10, control_capacity=2, batch_rows=4, batch_seconds=60.0)


def test_the_latest_sighting_of_an_engine_wins_and_keeps_the_first_time(backlog):
    assert backlog.put(engine(at=1.0))
    assert backlog.put(engine("engine-2", at=2.0))
    assert backlog.put(engine(at=3.0, state="suspect"))
    first, second = backlog.take_history()
    assert (first.first_seen_unix, first.last_seen_unix, first.state) == (1.0, 3.0, "suspect")
    assert second.engine_id == "engine-2"
    assert backlog.coalesced == 1


def test_a_sighting_after_an_end_is_not_folded_into_one_before_it(backlog):
    ended = EngineEnded("engine-1", "s1", "bye", 2.0)
    for event in (engine(at=1.0), ended, engine(at=3.0), engine(at=4.0)):
        assert backlog.put(event)
    assert backlog.take_history() == [engine(at=1.0), ended, engine(at=4.0, first_seen_unix=3.0)]


def test_events_already_taken_are_not_changed_any_more(backlog):
    backlog.put(engine(at=1.0))
    taken = backlog.take_history()
    backlog.put(engine(at=2.0))
    assert taken == [engine(at=1.0)]
    assert backlog.take_history() == [engine(at=2.0)]


def test_fingerprints_and_restarts_coalesce_and_lease_ends_never(backlog):
    for event in (fingerprint(at=1.0), fingerprint(at=2.0), restart(), restart(), lease_end(1), lease_end(1)):
        assert backlog.put(event)
    assert backlog.take_history() == [fingerprint(at=2.0), restart(), lease_end(1), lease_end(1)]


def test_beyond_the_capacity_history_is_dropped_and_counted_in_rows(backlog):
    assert backlog.put(stored_batch(*range(8)))
    assert not backlog.put(stored_batch(8, 9, 10))
    assert backlog.put(stored_batch(8, 9))
    assert not backlog.put(lease_end(1))
    assert (backlog.queued_rows(), backlog.dropped, backlog.objects_stale) == (10, 4, True)


def test_taken_rows_keep_their_place_until_they_are_done(backlog):
    backlog.put(stored_batch(*range(10)))
    backlog.take_history()
    assert not backlog.put(lease_end(1))
    backlog.history_done(10)
    assert backlog.put(lease_end(1))


def test_uses_are_dropped_first_and_do_not_make_the_projection_stale(backlog):
    use = ObjectsUsed((UsedObject(NAMESPACE, chunk_key(1), 0, 5.0),))
    backlog.put(stored_batch(*range(4)))
    assert backlog.put(use)
    assert not backlog.put(use)
    assert backlog.put(lease_end(1))
    assert (backlog.dropped, backlog.objects_stale) == (1, False)


def test_projecting_anew_clears_the_stale_mark(backlog):
    backlog.put(stored_batch(*range(10)))
    backlog.put(stored_batch(11))
    backlog.take_history()
    backlog.history_done(10)
    assert backlog.objects_stale
    backlog.put(ObjectsForgotten(NAMESPACE))
    assert backlog.objects_stale, "one namespace is not the whole projection"
    backlog.put(ObjectsForgotten())
    assert not backlog.objects_stale


def test_a_batch_is_about_batch_rows_in_order(backlog):
    events = [lease_end(number) for number in range(6)]
    for event in events:
        backlog.put(event)
    assert backlog.take_history() == events[:4]
    assert backlog.take_history() == events[4:]


def test_control_rows_are_bounded_and_overdue_ones_leave(backlog):
    late, early = ControlItem(1, clear(1), deadline=5.0), ControlItem(2, clear(2), deadline=3.0)
    assert backlog.put_control(late)
    assert backlog.put_control(early)
    assert not backlog.put_control(ControlItem(3, clear(3), 9.0))
    assert backlog.take_overdue(now=4.0) == [early]
    assert backlog.take_control() == [late]
    assert backlog.take_overdue(now=9.0) == [], "a row that is being written cannot be refused"
    backlog.control_done([late], retry=True)
    assert backlog.take_overdue(now=9.0) == [late]
    assert backlog.control_waiting() == 0


def test_a_control_row_put_back_goes_before_newer_ones():
    backlog = Backlog(history_capacity=1, control_capacity=9, batch_rows=1, batch_seconds=1.0)
    first, second = ControlItem(1, clear(1), 9.0), ControlItem(2, clear(2), 9.0)
    backlog.put_control(first)
    taken = backlog.take_control()
    backlog.put_control(second)
    backlog.control_done(taken, retry=True)
    assert backlog.take_control() == [first, second]


def test_a_flush_waits_for_what_was_there_and_not_for_what_comes_later(backlog):
    backlog.put(lease_end(1))
    done = threading.Event()

    def flush():
        assert backlog.wait_until_written(30.0)
        done.set()

    thread = threading.Thread(target=flush)
    thread.start()
    backlog.wait_for_work(not_before=0.0, at_most_seconds=30.0)  # returns at once: the flush makes it urgent
    taken = backlog.take_history()
    backlog.put(lease_end(2))
    assert not done.is_set()
    backlog.history_done(len(taken))
    thread.join(30.0)
    assert done.is_set()
    assert backlog.queued_rows() == 1


def test_a_flush_that_takes_too_long_says_so(backlog):
    backlog.put(lease_end(1))
    assert not backlog.wait_until_written(0.01)


def test_closed_queues_take_nothing(backlog):
    backlog.put(lease_end(1))
    backlog.close()
    assert not backlog.put(lease_end(2))
    assert not backlog.put_control(ControlItem(1, clear(1), 9.0))
    assert backlog.abandon_history() == 1
    assert backlog.dropped == 2


def test_waiting_ends_with_a_control_rows_deadline_even_while_backing_off(backlog):
    deadline = time.monotonic() + 0.05
    backlog.put_control(ControlItem(1, clear(1), deadline))
    backlog.wait_for_work(not_before=deadline + 600.0, at_most_seconds=600.0)
    assert [item.token for item in backlog.take_overdue(time.monotonic())] == [1]
