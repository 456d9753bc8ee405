"""Population: give extents their memory before they are handed out, so that a write can never fail for want of it."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from appliance.l1.space import SegmentSpace
from appliance.server.background import Mailbox

_log = structlog.get_logger(__name__)

STEP_BYTES = 64 * 1024 * 1024
RETRY_SECONDS = 1.0
IDLE_SECONDS = 1.0
LOW_SHARE = 0.125


@dataclass(slots=True)
class Progress:
    """How far population is. ``wanted`` grows up to ``total`` when memory runs low."""

    done_bytes: int
    wanted_bytes: int
    init_bytes: int
    total_bytes: int
    blocked: str = ""

    @property
    def initial_done(self) -> bool:
        """Whether everything that readiness waits for is populated."""
        return self.done_bytes >= self.init_bytes

    @property
    def sentence(self) -> str:
        """For people."""
        share = 100 * self.done_bytes // max(1, self.init_bytes)
        text = f"{min(100, share)} % of {self.init_bytes / (1 << 30):.2f} GiB is populated"
        return f"{text}; {self.blocked}" if self.blocked else f"{text}."


def _enter(space: SegmentSpace, first: int, count: int) -> None:
    assert first == space.entered_extents, "extents would enter the pool twice"
    space.add_populated(count)


class Populator:
    """Populates segments one after another, step by step, on a background thread; extents enter the pool on the loop
    thread.
    """

    def __init__(self, spaces: Sequence[SegmentSpace], init_bytes: int, mailbox: Mailbox) -> None:
        extent_bytes = spaces[0].segment.shape.extent_bytes
        total = sum(space.segment.shape.extent_count for space in spaces) * extent_bytes
        self.progress = Progress(0, min(init_bytes, total), min(init_bytes, total), total)
        self._spaces = deque(spaces)
        self._all = tuple(spaces)
        self._mailbox = mailbox
        self._extent_bytes = extent_bytes
        self._next_extent = 0  # of the first of the segments that are left
        self._told = -1

    def tick(self) -> float:
        """One step; see :class:`BackgroundLoop`."""
        progress = self.progress
        self._want_more_if_low()
        if progress.done_bytes >= progress.wanted_bytes or not self._spaces:
            return IDLE_SECONDS
        space, first = self._spaces[0], self._next_extent
        count = min(max(1, STEP_BYTES // self._extent_bytes), space.segment.shape.extent_count - first)
        try:
            space.segment.populate(first, count)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            progress.blocked = (
                f"the mount of {space.segment.path.parent} is full: free memory there, or wait until engines "
                "let go of an earlier arena."
            )
            return RETRY_SECONDS
        progress.blocked = ""
        self._next_extent += count
        if self._next_extent == space.segment.shape.extent_count:
            self._spaces.popleft()
            self._next_extent = 0
        self._mailbox.post(lambda: _enter(space, first, count))
        progress.done_bytes += count * self._extent_bytes
        self._tell()
        return 0.0

    def _want_more_if_low(self) -> None:
        """Beyond the initial size, memory is populated when less than an eighth of it is free."""
        progress = self.progress
        if sum(space.entered_extents for space in self._all) * self._extent_bytes < progress.done_bytes:
            return  # what was populated last has not entered the pool yet, so the pool looks emptier than it is
        free = sum(space.allocator.free_extents for space in self._all) * self._extent_bytes
        if progress.done_bytes >= progress.wanted_bytes and free < LOW_SHARE * progress.done_bytes:
            progress.wanted_bytes = min(progress.total_bytes, progress.done_bytes + STEP_BYTES)

    def _tell(self) -> None:
        tenth = 10 * self.progress.done_bytes // max(1, self.progress.init_bytes)
        if tenth != self._told and tenth <= 10:
            self._told = tenth
            _log.info("populating L1", percent=10 * tenth, populated_bytes=self.progress.done_bytes)
