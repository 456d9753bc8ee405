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

    __slots__ = ("_capacity", "_gone")

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._gone: OrderedDict[tuple[int, bytes], tuple[Removal, int]] = OrderedDict()

    def remember(self, slot: int, key: bytes, cause: Removal, evicted_groups: int = 0) -> None:
        """A row of the namespace at ``slot`` is gone; ``evicted_groups`` is the mask of groups that were evicted."""
        self._gone.pop((slot, key), None)
        self._gone[slot, key] = cause, evicted_groups
        if len(self._gone) > self._capacity:
            self._gone.popitem(last=False)

    def cause(self, slot: int, key: bytes) -> Removal:
        """Why the chunk is gone, NONE if it was never there or that is forgotten."""
        return self._gone.get((slot, key), (Removal.NONE, 0))[0]

    def evicted_groups(self, slot: int, key: bytes) -> int:
        """The mask of groups of the chunk that were evicted, 0 if that is forgotten."""
        return self._gone.get((slot, key), (Removal.NONE, 0))[1]

    def __len__(self) -> int:
        return len(self._gone)
