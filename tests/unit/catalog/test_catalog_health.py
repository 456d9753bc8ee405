"""The state machine of the catalog's health, and what failures mean."""

from __future__ import annotations

import sqlite3

import pytest

from appliance.catalog.failures import FailureKind, diagnose
from appliance.catalog.health import TRANSITIONS, CatalogState, HealthMonitor, Signal
from appliance.errors import CatalogUnreadable


def test_every_state_answers_every_signal():
    assert set(TRANSITIONS) == {(state, signal) for state in CatalogState for signal in Signal}


def test_only_a_commit_leads_to_ok_and_only_a_commit_leaves_down():
    for (state, signal), after in TRANSITIONS.items():
        if after is CatalogState.OK and state is not CatalogState.OK:
            assert signal is Signal.COMMITTED
        if state is CatalogState.DOWN and after is not CatalogState.DOWN:
            assert signal in {Signal.STARTED, Signal.COMMITTED, Signal.BEHIND}


def test_dropping_history_does_not_hide_the_fault_behind_it():
    monitor = HealthMonitor()
    monitor.committed(0.0, behind=False)
    monitor.signal(Signal.SHED, "dropping")
    assert (monitor.state, monitor.reason) == (CatalogState.DEGRADED, "dropping")
    monitor.failed(1.0, "full", lasting=True, patience_seconds=5.0)
    monitor.signal(Signal.SHED, "dropping")
    assert (monitor.state, monitor.reason) == (CatalogState.DOWN, "full")


def test_a_passing_failure_becomes_down_once_it_outlasts_the_patience():
    monitor = HealthMonitor()
    monitor.committed(0.0, behind=False)
    monitor.failed(10.0, "locked", lasting=False, patience_seconds=5.0)
    assert (monitor.state, monitor.reason) == (CatalogState.DEGRADED, "locked")
    monitor.failed(14.9, "locked", lasting=False, patience_seconds=5.0)
    assert monitor.state is CatalogState.DEGRADED
    monitor.failed(15.0, "still locked", lasting=False, patience_seconds=5.0)
    assert (monitor.state, monitor.reason) == (CatalogState.DOWN, "still locked")
    monitor.committed(16.0, behind=True)
    assert monitor.state is CatalogState.DEGRADED
    monitor.committed(17.0, behind=False)
    assert (monitor.state, monitor.reason) == (CatalogState.OK, "")
    monitor.failed(18.0, "locked", lasting=False, patience_seconds=5.0)
    assert monitor.state is CatalogState.DEGRADED, "the patience starts anew after a commit"


def _sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("synthetic")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        (_sqlite_error(sqlite3.SQLITE_BUSY), FailureKind.TRANSIENT, "lock"),
        (_sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), FailureKind.TRANSIENT, "lock"),
        (_sqlite_error(sqlite3.SQLITE_FULL), FailureKind.LASTING, "full"),
        (_sqlite_error(sqlite3.SQLITE_READONLY_DBMOVED), FailureKind.LASTING, "written"),
        (_sqlite_error(sqlite3.SQLITE_NOTADB), FailureKind.LASTING, "no SQLite database"),
        (_sqlite_error(sqlite3.SQLITE_CORRUPT_INDEX), FailureKind.LASTING, "damaged"),
        (_sqlite_error(sqlite3.SQLITE_IOERR_FSYNC), FailureKind.LASTING, "disk"),
        (_sqlite_error(sqlite3.SQLITE_CONSTRAINT_CHECK), FailureKind.DATA, "refused a row"),
        (TypeError("no JSON"), FailureKind.DATA, "TypeError"),
        (PermissionError(13, "Permission denied"), FailureKind.LASTING, "Permission denied"),
        (CatalogUnreadable("It is so.", remedy="Do this."), FailureKind.LASTING, "It is so."),
    ],
)
def test_a_failure_is_told_by_its_code(error, kind, word):
    failure = diagnose(error)
    assert failure.kind is kind
    assert word in failure.sentence


def test_a_start_that_met_a_lock_is_passing():
    error = CatalogUnreadable("Locked.")
    error.__cause__ = _sqlite_error(sqlite3.SQLITE_BUSY)
    assert diagnose(error).kind is FailureKind.TRANSIENT
