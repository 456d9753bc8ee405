"""Taking a walked segment into an arena: with its objects, or empty; what may still be written goes to limbo either way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.l1.arena import Arena
from appliance.l1.recency import Recency
from appliance.l1.space import ExtentState, address_of
from appliance.l1.walk import WalkedSegment
from appliance.protocol import arena_layout as layout
from appliance.protocol.liveness import is_inline


@dataclass(frozen=True, slots=True)
class Taken:
    """Objects of one segment that were taken back, in columns.

    ``heads`` are their first extents, ``records`` theirs alone, ``idle_seconds`` how long ago they were used (or NaN).
    """

    segment: int
    heads: NDArray[np.int64]
    records: NDArray[np.void]
    idle_seconds: NDArray[np.float64]


def objects_of(walked: WalkedSegment, recency: Recency) -> Taken:
    """What a walked segment holds, whether it is taken over or moved."""
    heads = walked.objects.heads
    idle = recency.idle_seconds(walked.segment.index, heads)
    return Taken(walked.segment.index, heads, walked.records[heads], idle)


def take_over(arena: Arena, walked: WalkedSegment) -> int:
    """Take a segment in with its objects; returns what went to limbo.

    What is dropped has its next generation in the file before its memory can be handed out.
    """
    words = walked.records["commit_word"].copy()
    words[walked.dropped] = _next_words(words[walked.dropped])
    for head in walked.dropped.tolist():
        walked.segment.write_freed(head, int(words[head]) >> 1, was_writing=False)
    space = arena.add_segment(walked.segment)
    space.adopt_generations(words)
    space.adopt(walked.objects, walked.records, ExtentState.OCCUPIED)
    return _to_limbo(arena, walked)


def take_empty(arena: Arena, walked: WalkedSegment) -> int:
    """Take a segment in without its objects; returns what went to limbo.

    Every generation is raised: cheaper than finding those in use, and no reader can be missed.
    """
    # Byte for byte: a copy of records leaves out what lies between their fields.
    records = np.frombuffer(bytearray(walked.records.tobytes()), dtype=layout.RECORD)
    records["commit_word"] = _next_words(records["commit_word"])
    keep = np.zeros(len(records), dtype=np.bool_)
    keep[walked.writing.heads] = True
    records["state"][~keep] = layout.STATE_FREE
    walked.segment.write_words(records)
    space = arena.add_segment(walked.segment)
    space.adopt_generations(records["commit_word"])
    return _to_limbo(arena, walked)


def _next_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Uncommitted words of the next generation."""
    following: NDArray[np.uint64] = ((words >> np.uint64(1)) + np.uint64(1)) << np.uint64(1)
    return following


def _to_limbo(arena: Arena, walked: WalkedSegment) -> int:
    """Fence what was being written: it stays out until its writer attaches again, acknowledges, or is dead.

    An inline client writes through the daemon, which is the one that died.
    """
    number = walked.segment.index
    space = arena.spaces[number]
    attach_ids = walked.records["attach_id"][walked.writing.heads].tolist()
    fenced = np.array([not is_inline(each) for each in attach_ids], dtype=np.bool_)
    for head in walked.writing.heads[~fenced].tolist():
        space.generations[head] += 1
        walked.segment.write_freed(head, space.generations[head], was_writing=True)
    chains = walked.writing.of(fenced)
    space.adopt(chains, walked.records, ExtentState.LIMBO)
    for head in chains.heads.tolist():
        attach_id = int(walked.records["attach_id"][head])
        arena.limbo_by_attach.setdefault(attach_id, set()).add(address_of(number, head))
    return len(chains.heads)
