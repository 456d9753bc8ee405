"""Why an object is not in the cache any more, and a bounded memory of it."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum


class Removal(IntEnum):
    """What took an entry out of the cache; the byte in the index's ``removal`` column."""

    NONE = 0
    EVICTED = 1
    WRITE_EXPIRED = 2
    QUARANTINED = 3
    CLEARED = 4
    STRANDED = 5


class Ghosts:
    """The last removals of chunks that have no row any more, so that a miss can tell *evicted* from *never stored*.

    Bounded: the oldest is forgotten first. Keys only, no bytes.
    """

    __slots__ = ("_capacity", "_causes")

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._causes: OrderedDict[tuple[int, bytes], Removal] = OrderedDict()

    def remember(self, slot: int, key: bytes, cause: Removal) -> None:
        """A row of the namespace at ``slot`` is gone."""
        self._causes.pop((slot, key), None)
        self._causes[slot, key] = cause
        if len(self._causes) > self._capacity:
            self._causes.popitem(last=False)

    def cause(self, slot: int, key: bytes) -> Removal:
        """Why the chunk is gone, NONE if it was never there or that is forgotten."""
        return self._causes.get((slot, key), Removal.NONE)

    def __len__(self) -> int:
        return len(self._causes)
