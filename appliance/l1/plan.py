"""What becomes of the segments when L1 is started with another size or another extent size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizePlan:
    """``keep`` segments stay, from the first on, and one of ``add_extents`` is added (0: none).

    ``refusal`` says in a sentence why the objects cannot be kept; empty if they can.
    """

    keep: int
    add_extents: int
    as_it_is: bool
    reason: str
    refusal: str = ""


def plan_size(
    extent_counts: Sequence[int], extent_bytes: int, wanted_extents: int, wanted_extent_bytes: int
) -> SizePlan:
    """What to do with segments of ``extent_counts`` extents of ``extent_bytes`` each."""
    have = sum(extent_counts)
    if extent_bytes != wanted_extent_bytes:
        refusal = (
            f"The extent size changed from {extent_bytes} to {wanted_extent_bytes} bytes; objects keep the extents "
            "they were stored in."
        )
        return SizePlan(0, 0, as_it_is=False, reason="", refusal=refusal)
    if have > wanted_extents:
        refusal = f"L1 was made smaller, from {have} to {wanted_extents} extents."
        return SizePlan(0, 0, as_it_is=False, reason="", refusal=refusal)
    if have == wanted_extents:
        return SizePlan(len(extent_counts), 0, as_it_is=True, reason="L1 has the size that is asked for.")
    return SizePlan(
        len(extent_counts),
        wanted_extents - have,
        as_it_is=False,
        reason=f"L1 was made larger, from {have} to {wanted_extents} extents: a segment is added.",
    )
