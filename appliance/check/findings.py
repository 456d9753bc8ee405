"""What a check found: one sentence each, naming the object."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from appliance.protocol.messages import CheckFinding

MAX_SHOWN = 500
MAX_NOTES = 100


class Kind(StrEnum):
    """What does not add up."""

    RECORD = "record"
    """A head record in the file says other than the daemon's memory."""
    LINKS = "links"
    """A chain of extent runs in the file says other than memory."""
    OWNERSHIP = "ownership"
    """An extent belongs to nobody, to two, or to one and is free."""
    ACCOUNTING = "accounting"
    """Bytes by state are not what the extents say."""
    UNINDEXED = "unindexed"
    """A committed object that no key leads to: its memory would never come back."""
    ROW = "row"
    """A row of the index, its key and its place do not fit together."""
    OBJECT = "object"
    """The index offers an object that is not there, or is another one."""
    ENTRY = "entry"
    """The masks, extents or addresses of one (chunk, group) contradict each other."""
    TOTALS = "totals"
    """The totals of a group are not the sum of its entries."""
    HOLDS = "holds"
    """Holds on an entry are not those of the live leases."""
    RESERVATION = "reservation"
    """A reservation, its pending mark and its extents do not fit together."""
    LIMBO = "limbo"
    """Memory in limbo that no writer is known for, or a writer with limbo that is not there."""
    SESSION = "session"
    """A lease or reservation of a session that has ended."""
    EVICTION = "eviction"
    """An object that the eviction policy has lost sight of: it would stay for ever."""
    CLEARED = "cleared"
    """An object from before an acknowledged clear."""


@dataclass(slots=True)
class Findings:
    """All that one check found, bounded; ``checked`` counts what was looked at."""

    shown: list[CheckFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    total: int = 0
    checked: Counter[str] = field(default_factory=Counter)

    def add(self, kind: Kind, subject: str, what: str) -> None:
        """Something is wrong with ``subject``; the sentence is both together."""
        self.total += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(CheckFinding(kind=kind.value, subject=subject, sentence=f"{subject} {what}."))

    def note(self, sentence: str) -> None:
        """Something worth knowing that is no fault."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(sentence)


def extent_name(segment: int, extent: int) -> str:
    """How a finding names an extent."""
    return f"Extent {extent} of segment {segment}"


def entry_name(namespace: bytes, key: bytes, group: int) -> str:
    """How a finding names a (chunk, group)."""
    return f"Chunk {key.hex()[:16]}, group {group} of namespace {namespace.hex()}"
