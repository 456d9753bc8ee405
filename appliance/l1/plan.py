"""What becomes of the segments when L1 is started with another size or another extent size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.protocol.arena_layout import SegmentLayout


class SizeChange(StrEnum):
    """What is done to the segments."""

    NONE = "none"
    GROW = "grow"
    """All stay, and one of the missing extents is added."""
    DROP = "drop"
    """The first ones have the size asked for; what fits of the others moves into them."""
    MOVE = "move"
    """A new segment replaces them all, and what fits moves into it."""


@dataclass(frozen=True, slots=True)
class SizePlan:
    """``keep`` segments stay, from the first on; ``new_extents`` are those of a new one (0: none).

    ``refusal`` says in a sentence why the objects cannot be kept; empty if they can.
    """

    change: SizeChange
    keep: int
    new_extents: int
    reason: str
    refusal: str = ""


def plan_size(
    extent_counts: Sequence[int],
    extent_bytes: int,
    wanted: SegmentLayout,
    *,
    object_bytes: int,
    spare_bytes: int,
) -> SizePlan:
    """What to do with segments of ``extent_counts`` extents of ``extent_bytes`` each.

    ``object_bytes`` are held in them; ``spare_bytes`` of memory are there for a second copy of what is moved.
    """
    have = sum(extent_counts)
    if extent_bytes == wanted.extent_bytes:
        if have == wanted.extent_count:
            return SizePlan(SizeChange.NONE, len(extent_counts), 0, "L1 has the size that is asked for.")
        if have < wanted.extent_count:
            return SizePlan(
                SizeChange.GROW,
                len(extent_counts),
                wanted.extent_count - have,
                f"L1 was made larger, from {have} to {wanted.extent_count} extents: a segment is added.",
            )
        kept = 0
        for keep, count in enumerate(extent_counts):
            kept += count
            if kept == wanted.extent_count:
                reason = f"L1 was made smaller, from {have} to {kept} extents: what fits moves into {keep + 1} segments."
                return SizePlan(SizeChange.DROP, keep + 1, 0, reason)
        changed = f"L1 was made smaller, from {have} to {wanted.extent_count} extents"
    else:
        changed = f"The extent size changed from {extent_bytes} to {wanted.extent_bytes} bytes"
    return _move(changed, wanted, object_bytes, spare_bytes)


def _move(changed: str, wanted: SegmentLayout, object_bytes: int, spare_bytes: int) -> SizePlan:
    data = wanted.extent_count * wanted.extent_bytes
    needed = wanted.data_offset + min(object_bytes, data)
    reason = f"{changed}: what fits moves into a new segment."
    refusal = ""
    if needed > spare_bytes:
        refusal = (
            f"{changed}, and there is no room for both: {needed} bytes are needed while the earlier files are there, "
            f"{spare_bytes} are free."
        )
    return SizePlan(SizeChange.MOVE, 0, wanted.extent_count, reason, refusal)
