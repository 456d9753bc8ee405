"""The bounded queues between the daemon's loop and the catalog's writer thread.

The loop only ever takes a short lock around list operations; nothing here waits for a disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.catalog.events import ObjectsForgotten, ObjectsRemoved, ObjectsStored, ObjectsUsed

if TYPE_CHECKING:
    from collections.abc import Hashable

    from appliance.catalog.events import ControlRow, HistoryEvent

_PROJECTION_EVENTS = (ObjectsStored, ObjectsRemoved, ObjectsUsed, ObjectsForgotten)


@dataclass(slots=True)
class _Waiting:
    """One queued history event; a newer one of the same identity may take its place."""

    event: HistoryEvent
    since: float


@dataclass(frozen=True, slots=True)
class ControlItem:
    """One control row that waits to be durable; ``deadline`` is in monotonic seconds."""

    token: int
    row: ControlRow
    deadline: float


class Backlog:
    """What waits to be written. Capacity is in table rows for history and in rows for control.

    Rows handed to the writer count against the capacity until :meth:`history_done`, so a writer that cannot write
    does not make room for more.
    """

    def __init__(
        self, *, history_capacity: int, control_capacity: int, batch_rows: int, batch_seconds: float
    ) -> None:
        self._history_capacity = history_capacity
        self._control_capacity = control_capacity
        self._batch_rows = batch_rows
        self._batch_seconds = batch_seconds
        self._lock = threading.Condition()
        self._history: deque[_Waiting] = deque()
        self._latest: dict[Hashable, _Waiting] = {}
        self._waiting_rows = 0
        self._taken_rows = 0
        self._control: deque[ControlItem] = deque()
        self._control_taken = 0
        self._submitted = 0
        self._settled = 0
        self._control_submitted = 0
        self._control_settled = 0
        self._urgent = False
        self._closed = False
        self.dropped = 0
        self.coalesced = 0
        self.objects_stale = False

    # --- the daemon's side ---

    def put(self, event: HistoryEvent) -> bool:
        """Queue a history event; ``False`` if it had to be dropped. Never waits."""
        identity = event.identity
        rows = event.rows
        if not rows:
            return True
        with self._lock:
            if identity is not None and self._coalesce(identity, event):
                return True
            limit = self._history_capacity // 2 if event.sheddable else self._history_capacity
            if self._closed or self._waiting_rows + self._taken_rows + rows > limit:
                self.dropped += rows
                self.objects_stale |= isinstance(event, _PROJECTION_EVENTS) and not event.sheddable
                return False
            waiting = _Waiting(event, time.monotonic())
            if identity is not None:
                self._latest[identity] = waiting
            wake = not self._history or self._waiting_rows < self._batch_rows <= self._waiting_rows + rows
            self._history.append(waiting)
            self._waiting_rows += rows
            self._submitted += rows
            if isinstance(event, ObjectsForgotten) and event.namespace is None:
                self.objects_stale = False
            if wake:
                self._lock.notify_all()
            return True

    def _coalesce(self, identity: Hashable, event: HistoryEvent) -> bool:
        waiting = self._latest.get(identity)
        merged = None if waiting is None else event.coalesced_with(waiting.event)
        if waiting is None or merged is None:
            return False
        waiting.event = merged
        self.coalesced += 1
        return True

    def put_control(self, item: ControlItem) -> bool:
        """Queue a control row; ``False`` if too many wait already or the writer is stopped. Never waits."""
        with self._lock:
            if self._closed or len(self._control) + self._control_taken >= self._control_capacity:
                return False
            self._control.append(item)
            self._control_submitted += 1
            self._lock.notify_all()
            return True

    def take_overdue(self, now: float) -> list[ControlItem]:
        """Remove and return the control rows whose deadline has passed and that are not being written."""
        with self._lock:
            overdue = [item for item in self._control if item.deadline <= now]
            if overdue:
                self._control = deque(item for item in self._control if item.deadline > now)
                self._control_settled += len(overdue)
                self._lock.notify_all()
            return overdue

    def queued_rows(self) -> int:
        """History rows that wait or are being written."""
        return self._waiting_rows + self._taken_rows

    def crowded(self) -> bool:
        """Whether more than half of the history's capacity is taken."""
        return self.queued_rows() > self._history_capacity // 2

    def control_waiting(self) -> int:
        """Control rows that wait or are being written."""
        return len(self._control) + self._control_taken

    def wait_until_written(self, timeout_seconds: float) -> bool:
        """Have all that was submitted so far written at once; ``False`` if it took too long."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            history, control = self._submitted, self._control_submitted
            while self._settled < history or self._control_settled < control:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._urgent = True
                self._lock.notify_all()
                self._lock.wait(remaining)
            return True

    def mark_objects_stale(self) -> None:
        """The objects table was lost; only projecting the arena again mends it."""
        with self._lock:
            self.objects_stale = True

    @property
    def closed(self) -> bool:
        """Whether the writer is stopping or stopped."""
        return self._closed

    def close(self) -> None:
        """Refuse everything from now on and wake the writer."""
        with self._lock:
            self._closed = True
            self._urgent = True
            self._lock.notify_all()

    # --- the writer's side ---

    def wait_for_work(self, *, not_before: float, at_most_seconds: float) -> None:
        """Sleep until a batch is due, but not before ``not_before`` (monotonic) and no longer than given.

        A control row's deadline and :meth:`close` end the sleep too.
        """
        until = time.monotonic() + at_most_seconds
        with self._lock:
            was_closed = self._closed
            while True:
                now = time.monotonic()
                due = now if self._closed and not was_closed else max(self._due(now), not_before)
                if self._control:
                    due = min(due, *(item.deadline for item in self._control))
                pause = min(due, until) - now
                if pause <= 0:
                    return
                self._lock.wait(pause)

    def _due(self, now: float) -> float:
        if self._control or (self._history and (self._urgent or self._waiting_rows >= self._batch_rows)):
            return now
        return self._history[0].since + self._batch_seconds if self._history else float("inf")

    def take_control(self) -> list[ControlItem]:
        """All waiting control rows; they count as waiting until :meth:`control_done`."""
        with self._lock:
            taken = list(self._control)
            self._control.clear()
            self._control_taken += len(taken)
            return taken

    def control_done(self, items: list[ControlItem], *, retry: bool) -> None:
        """The rows were settled, or go back to the front of the queue to be tried again."""
        with self._lock:
            self._control_taken -= len(items)
            if retry:
                self._control.extendleft(reversed(items))
            else:
                self._control_settled += len(items)
            self._lock.notify_all()

    def take_history(self) -> list[HistoryEvent]:
        """The oldest events, about one batch of rows; they count as queued until :meth:`history_done`."""
        taken: list[HistoryEvent] = []
        with self._lock:
            rows = 0
            while self._history and rows < self._batch_rows:
                waiting = self._history.popleft()
                identity = waiting.event.identity
                if identity is not None and self._latest.get(identity) is waiting:
                    del self._latest[identity]
                rows += waiting.event.rows
                taken.append(waiting.event)
            self._waiting_rows -= rows
            self._taken_rows += rows
        return taken

    def history_done(self, rows: int) -> None:
        """``rows`` taken rows were written or given up."""
        with self._lock:
            self._taken_rows -= rows
            self._settled += rows
            if not self._history:
                self._urgent = self._closed
            self._lock.notify_all()

    def abandon_history(self) -> int:
        """Drop all that waits, counted; returns the rows."""
        with self._lock:
            rows = self._waiting_rows + self._taken_rows
            self.dropped += rows
            self._history.clear()
            self._latest.clear()
            self._waiting_rows = self._taken_rows = 0
            self._settled = self._submitted
            self._lock.notify_all()
            return rows
