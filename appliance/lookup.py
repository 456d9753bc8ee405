"""How much of a prompt can be loaded: the longest prefix that every group and shard can serve at one boundary.

The fold itself is a pure function of presence, so that it can be tested against a brute-force oracle; finding the one
reason for a shortfall is the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import GroupKind, last_usable_chunk
from appliance.l1.index import NamespaceIndex, Rows
from appliance.l1.removals import Ghosts, Removal
from appliance.protocol.base import MissReason

Presence = NDArray[np.bool_]
"""``presence[i, g]``: every shard of group g is committed for chunk i."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The hit and how far attention alone would reach, both in chunks from the start."""

    hit: int
    attention: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a lookup found, before any lease is taken. ``rows`` are those of the prompt's usable chunks."""

    reach: Reach
    rows: Rows
    reason: MissReason | None
    detail: str


def fold(presence: Presence, kinds: Sequence[GroupKind], windows: Sequence[int]) -> Reach:
    """The largest k such that all of 1..k (attention), the last w (sliding) and k itself (recurrent) are present."""
    chunks = presence.shape[0]
    attention = [g for g, kind in enumerate(kinds) if kind is GroupKind.ATTENTION]
    complete = presence[:, attention].all(axis=1)
    reach = chunks if complete.all() else int(np.argmin(complete))
    servable = np.ones(reach, dtype=np.bool_)
    for group, kind in enumerate(kinds):
        if kind is GroupKind.RECURRENT:
            servable &= presence[:reach, group]
        elif kind is GroupKind.SLIDING:
            servable &= _window_complete(presence[:reach, group], windows[group])
    boundaries = np.flatnonzero(servable)
    return Reach(hit=int(boundaries[-1]) + 1 if len(boundaries) else 0, attention=reach)


def _window_complete(present: NDArray[np.bool_], window: int) -> NDArray[np.bool_]:
    """For each boundary, whether its last ``window`` chunks (fewer near the start) are all present."""
    missing = np.concatenate(([0], np.cumsum(~present)))
    ends = np.arange(1, len(present) + 1)
    result: NDArray[np.bool_] = missing[ends] == missing[np.maximum(0, ends - window)]
    return result


def find(
    index: NamespaceIndex,
    ghosts: Ghosts,
    keys: Sequence[bytes],
    prompt_tokens: int,
    refused: Sequence[int] = (),
) -> Outcome:
    """Fold presence over the prompt's usable chunks; ``refused`` are chunks that failed to load for this request."""
    usable = min(len(keys), last_usable_chunk(prompt_tokens, index.chunk_tokens))
    rows = index.rows_of(keys[:usable])
    presence = presence_of(index, rows)
    for chunk in refused:
        if chunk < usable:
            presence[chunk, :] = False
    kinds = [group.kind for group in index.groups]
    reach = fold(presence, kinds, index.windows)
    if usable == 0:
        return Outcome(
            reach, rows, MissReason.TOO_SHORT, "The prompt has no whole chunk before its last token."
        )
    if reach.hit == usable:
        return Outcome(reach, rows, None, "")
    reason, detail = _shortfall(index, ghosts, keys, rows, presence, reach, refused)
    return Outcome(reach, rows, reason, detail)


def presence_of(index: NamespaceIndex, rows: Rows) -> Presence:
    """Which groups are complete for each row; a row of -1 has nothing."""
    safe = np.maximum(rows, 0)
    masks = index.present.array.reshape(-1, index.group_count)[safe]
    complete: Presence = masks == index.full_masks
    complete[rows < 0] = False
    return complete


def entries_of(index: NamespaceIndex, rows: Rows, hit: int) -> Rows:
    """Exactly the entries a hit of ``hit`` chunks needs, the first to be evicted first (deep before shallow)."""
    wanted = []
    for group, kind in enumerate(g.kind for g in index.groups):
        count = hit if kind is GroupKind.ATTENTION else min(hit, index.windows[group])
        needed = rows[hit - count : hit] * index.group_count + group
        wanted.append((kind is GroupKind.ATTENTION, needed[::-1]))
    states = [entries for is_attention, entries in wanted if not is_attention]
    attention = [entries for is_attention, entries in wanted if is_attention]
    if attention:
        states.append(np.stack(attention, axis=1).ravel())
    return np.concatenate(states) if states else np.empty(0, dtype=np.int64)


def _shortfall(
    index: NamespaceIndex,
    ghosts: Ghosts,
    keys: Sequence[bytes],
    rows: Rows,
    presence: Presence,
    reach: Reach,
    refused: Sequence[int],
) -> tuple[MissReason, str]:
    """Why the hit is no longer: looked at where a longer one stops, one reason only."""
    chunk, group = _first_missing(index, presence, reach)
    row = int(rows[chunk])
    where = f"chunk {chunk + 1}, group {group} ({index.groups[group].name})"
    if row < 0:
        return _gone(ghosts.cause(index.slot, keys[chunk]), f"chunk {chunk + 1}")
    if chunk in refused and index.is_full(row, group):
        return MissReason.QUARANTINED, f"chunk {chunk + 1} failed to load for this request."
    entry = index.entry(row, group)
    present = index.present.view[entry]
    if present and present != int(index.full_masks[group]):
        absent = int(index.full_masks[group]) & ~present
        missing = [s for s in range(index.groups[group].shards) if absent >> s & 1]
        return MissReason.RANK_MISSING, f"{where}: shards {missing} are not stored."
    if index.pending.view[entry]:
        return MissReason.NEVER_STORED, f"{where} is being stored."
    removal = Removal(index.removal.view[entry])
    if removal is Removal.NONE and index.groups[group].kind is GroupKind.RECURRENT:
        return MissReason.RECURRENT_MISSING, f"{where}: no snapshot was stored at this boundary."
    return _gone(removal, where)


def _first_missing(index: NamespaceIndex, presence: Presence, reach: Reach) -> tuple[int, int]:
    """The chunk and group that stop a longer hit: a state or window at attention's end, else attention itself."""
    if reach.attention == reach.hit:
        return reach.hit, next(g for g in index.attention if not presence[reach.hit, g])
    boundary = reach.attention - 1
    for group in index.others:
        first = max(0, reach.attention - index.windows[group])
        for chunk in range(boundary, first - 1, -1):
            if not presence[chunk, group]:
                return chunk, group
    raise AssertionError("a boundary that every group serves was passed over: hits would be too short")


def _gone(removal: Removal, where: str) -> tuple[MissReason, str]:
    reasons = {
        Removal.NONE: (MissReason.NEVER_STORED, f"{where} was never stored."),
        Removal.EVICTED: (MissReason.EVICTED, f"{where} was evicted."),
        Removal.STRANDED: (MissReason.EVICTED, f"{where} was reclaimed: a shard was never committed."),
        Removal.CLEARED: (MissReason.EVICTED, f"{where} was cleared."),
        Removal.WRITE_EXPIRED: (MissReason.WRITE_EXPIRED, f"{where}: its writer did not commit in time."),
        Removal.QUARANTINED: (MissReason.QUARANTINED, f"{where} failed its checksum and was taken out."),
    }
    return reasons[removal]
