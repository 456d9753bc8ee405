"""The one thread that writes the catalog.

The daemon's loop calls :meth:`CatalogWriter.submit` and :meth:`CatalogWriter.submit_control`, which only queue. The
thread writes control rows at once, in one durable transaction for all that wait, and history in batches. Whatever goes
wrong is counted, shown in :meth:`CatalogWriter.health` and tried again with back-off.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from appliance.catalog.backlog import Backlog, ControlItem
from appliance.catalog.failures import FailureKind, diagnose
from appliance.catalog.health import CatalogHealth, CatalogState, HealthMonitor, Signal
from appliance.catalog.store import CatalogStore
from appliance.errors import CatalogUnavailable, PagewardenError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.catalog.events import ControlRow, HistoryEvent

    OnDurable = Callable[[int, PagewardenError | None], None]

BATCH_ROWS = 2_000
BATCH_SECONDS = 0.2
IDLE_CHECK_SECONDS = 1.0
FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = {FailureKind.TRANSIENT: 0.5, FailureKind.DATA: 0.5, FailureKind.LASTING: 5.0}
CONTROL_CAPACITY = 1_024
STALL_SECONDS = 10.0
"""A single step of writing that takes longer is shown as a disk that hangs."""

_log = structlog.get_logger(__name__)


def _tell(level: str, event: str, **facts: Any) -> None:
    """Log, whatever becomes of it: a closed pipe behind the log must not end the thread."""
    with suppress(Exception):
        getattr(_log, level)(event, **facts)


class CatalogWriter:
    """Writes the catalog at ``path`` from a thread of its own.

    Args:
        path: the catalog file; made, migrated and re-made as needed.
        on_durable: called in the writer thread, or in the thread that calls :meth:`refuse_overdue`, once for each
            accepted control row: ``(token, None)`` when the row is durable, ``(token, error)`` when it was refused.
        history_capacity: rows of history that may wait; beyond it they are dropped and counted.
        busy_timeout_seconds: how long one try waits for another process's lock; must be well under
            ``control_deadline_seconds``.
        control_deadline_seconds: how long a control row may wait before it is refused.
        history_rows_kept: the newest lease ends and evictions kept on disk, each.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_durable: OnDurable,
        history_capacity: int = 200_000,
        busy_timeout_seconds: float = 0.5,
        control_deadline_seconds: float = 5.0,
        history_rows_kept: int = 500_000,
    ) -> None:
        self._path = path
        self._on_durable = on_durable
        self._control_deadline_seconds = control_deadline_seconds
        self._history_rows_kept = history_rows_kept
        self._backlog = Backlog(
            history_capacity=history_capacity,
            control_capacity=CONTROL_CAPACITY,
            batch_rows=BATCH_ROWS,
            batch_seconds=BATCH_SECONDS,
        )
        self._store = CatalogStore(path, busy_timeout_seconds=busy_timeout_seconds)
        self._monitor = HealthMonitor()
        self._monitor_lock = threading.Lock()
        self._batch: list[HistoryEvent] = []
        self._rows_since_prune = 0
        self._attempt_since: float | None = None
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._stop_at: float | None = None
        self._left_behind = 0
        self._thread = threading.Thread(target=self._run, name="catalog-writer", daemon=True)

    # --- the daemon's side: none of these touches the disk ---

    def start(self) -> None:
        """Start the thread; it opens the file."""
        with self._monitor_lock:
            self._monitor.signal(Signal.STARTED, "The catalog is being opened.")
        self._thread.start()

    def submit(self, event: HistoryEvent) -> bool:
        """Queue a history event; ``False`` if the queue is full and the event was dropped and counted."""
        if self._backlog.put(event):
            return True
        if not event.sheddable:
            with self._monitor_lock:
                self._monitor.signal(
                    Signal.SHED, "History is being dropped: it comes faster than it can be written."
                )
        return False

    def submit_control(self, token: int, row: ControlRow) -> None:
        """Queue a control row; ``on_durable`` gets ``token`` exactly once afterwards.

        Raises:
            CatalogUnavailable: if the catalog is down; ``on_durable`` is then not called.
        """
        health = self.health()
        if health.state is CatalogState.DOWN:
            raise CatalogUnavailable(health.reason)
        deadline = time.monotonic() + self._control_deadline_seconds
        if not self._backlog.put_control(ControlItem(token, row, deadline)):
            if self._backlog.closed:
                raise CatalogUnavailable("The daemon is stopping.")
            raise CatalogUnavailable("Too many changes wait to be recorded.", remedy="Try again in a moment.")

    def refuse_overdue(self) -> int:
        """Refuse the control rows that waited too long, through ``on_durable``; returns how many.

        The writer thread does this itself. A loop may also do it, for the case that the thread hangs in the kernel.
        """
        overdue = self._backlog.take_overdue(time.monotonic())
        for item in overdue:
            reason = self._monitor.reason or "The catalog is too slow."
            self._settle(item, CatalogUnavailable(f"The change could not be recorded in time. {reason}"))
        return len(overdue)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was submitted is written or refused; ``False`` if that took too long.

        Waits, so it is not for the loop thread.
        """
        return self._backlog.wait_until_written(timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Write what waits, within the time given, and end the thread; ``True`` if nothing was left behind.

        Waits, so it is not for the loop thread.
        """
        self._stop_at = time.monotonic() + timeout_seconds
        self._backlog.close()
        if self._thread.ident is None:
            self._shut_down()
        else:
            self._thread.join(timeout_seconds + 1.0)
        return not self._thread.is_alive() and self._left_behind == 0

    def health(self) -> CatalogHealth:
        """The writer as of now."""
        now = time.monotonic()
        monitor, backlog = self._monitor, self._backlog
        with self._monitor_lock:
            state, reason = monitor.state, monitor.reason
            last_commit = monitor.last_commit
        attempt_since = self._attempt_since
        if attempt_since is not None and now - attempt_since > STALL_SECONDS:
            state = CatalogState.DOWN
            reason = (
                f"A write to the catalog has not returned for {now - attempt_since:.0f} s; its disk hangs."
            )
        return CatalogHealth(
            state=state,
            reason=reason,
            queued=backlog.queued_rows(),
            written=monitor.written,
            dropped=backlog.dropped,
            rejected=monitor.rejected,
            coalesced=backlog.coalesced,
            control_waiting=backlog.control_waiting(),
            last_commit_age_seconds=None if last_commit is None else now - last_commit,
            errors=monitor.errors,
            recreated=monitor.recreated,
            objects_stale=backlog.objects_stale,
        )

    # --- the thread's side ---

    def _run(self) -> None:
        while not self._finished():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - the thread outlives any failure
                self._note_failure(error)
            finally:
                self._attempt_since = None
        self._shut_down()

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        nothing_left = not (self._batch or self._backlog.queued_rows() or self._backlog.control_waiting())
        return nothing_left or time.monotonic() >= self._stop_at

    def _turn(self) -> None:
        """Wait for work and try to write it once."""
        pause = IDLE_CHECK_SECONDS if self._stop_at is None else max(0.0, self._stop_at - time.monotonic())
        self._backlog.wait_for_work(not_before=self._retry_at, at_most_seconds=pause)
        self.refuse_overdue()
        if time.monotonic() < self._retry_at:
            return
        self._attempt_since = time.monotonic()
        if self._store.ensure_open():
            self._note_new_file()
        self._attempt_since = time.monotonic()
        wrote = self._write_control()
        self._attempt_since = time.monotonic()
        wrote |= self._write_history()
        unproven = self._monitor.last_commit is None or self._monitor.failing_since is not None
        if unproven and not wrote:
            self._store.probe()
            self._note_commit()

    def _write_control(self) -> bool:
        items = self._backlog.take_control()
        if not items:
            return False
        try:
            outcomes = self._store.write_control([item.row for item in items])
        except BaseException:
            self._backlog.control_done(items, retry=True)
            raise
        self._note_commit()
        self._backlog.control_done(items, retry=False)
        for item, outcome in zip(items, outcomes, strict=True):
            self._monitor.written += outcome is None
            self._monitor.rejected += outcome is not None
            self._settle(item, outcome)
        return True

    def _write_history(self) -> bool:
        self._batch = self._batch or self._backlog.take_history()
        if not self._batch:
            return False
        rows = sum(event.rows for event in self._batch)
        rejected = self._store.write_history(self._batch)
        self._batch = []
        self._backlog.history_done(rows)
        self._monitor.written += rows - rejected
        self._monitor.rejected += rejected
        self._note_commit()
        self._rows_since_prune += rows
        if self._rows_since_prune >= max(1_000, self._history_rows_kept // 20):
            self._rows_since_prune = 0
            self._store.prune(self._history_rows_kept)
        return True

    def _settle(self, item: ControlItem, error: PagewardenError | None) -> None:
        try:
            self._on_durable(item.token, error)
        except Exception as failure:  # noqa: BLE001 - one requester's failure is not the others'
            self._monitor.errors += 1
            _tell("error", "catalog_acknowledgement_failed", token=item.token, error=str(failure))

    def _note_commit(self) -> None:
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        with self._monitor_lock:
            before = self._monitor.state
            self._monitor.committed(time.monotonic(), behind=self._backlog.crowded())
            after = self._monitor.state
        if after is not before:
            _tell("info", "catalog_" + after, path=str(self._path))

    def _note_new_file(self) -> None:
        self._monitor.recreated += 1
        self._backlog.mark_objects_stale()
        _tell("warning", "catalog_recreated", path=str(self._path))

    def _note_failure(self, error: Exception) -> None:
        now = time.monotonic()
        failure = diagnose(error)
        lasting = failure.kind is FailureKind.LASTING
        self._retry_at = now + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, LONGEST_RETRY_SECONDS[failure.kind])
        reason = f"{failure.sentence} {failure.remedy}".strip()
        with self._monitor_lock:
            before = self._monitor.state
            self._monitor.failed(
                now, reason, lasting=lasting, patience_seconds=self._control_deadline_seconds
            )
            changed = self._monitor.state is not before
        if changed:
            _tell("warning", "catalog_" + self._monitor.state, reason=reason, path=str(self._path))
        if failure.kind is FailureKind.DATA:
            self._give_up_batch()
        if failure.reopen:
            self._close_quietly()

    def _give_up_batch(self) -> None:
        """Leave out a batch that broke the code itself, so that what comes after it is written."""
        rows = sum(event.rows for event in self._batch)
        self._batch = []
        self._backlog.history_done(rows)
        self._monitor.rejected += rows

    def _close_quietly(self) -> None:
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 - closing a broken file may fail in any way
            _tell("warning", "catalog_close_failed", error=str(error))

    def _shut_down(self) -> None:
        items = self._backlog.take_control()
        self._backlog.control_done(items, retry=False)
        for item in items:
            self._settle(item, CatalogUnavailable("The daemon stopped before the change could be recorded."))
        self._batch = []
        self._left_behind = len(items) + self._backlog.abandon_history()
        self._close_quietly()
        with self._monitor_lock:
            self._monitor.signal(Signal.STOPPED, "The catalog's writer was stopped.")
