"""What an engine's cache looks like to the appliance: object groups, shards, replicas, chunk size.

An *object group* is one KV cache group of the model. Its kind decides which of its objects a hit needs:

=========== =====================================================================
attention   every chunk from the first to the boundary
sliding     the last ``window_chunks`` chunks before the boundary
recurrent   only the state at the boundary itself
=========== =====================================================================

An object is the bytes of one (chunk, group, shard). Ranks that hold the same bytes of a group are *replicas* of
one shard and take turns by chunk; ranks that hold different bytes are different shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.errors import UnsupportedGeometry

MAX_SHARDS = 64
"""Shards of one group are the bits of one 64-bit mask."""

MAX_GROUPS = 64
MAX_CHUNK_TOKENS = 1 << 24


class GroupKind(StrEnum):
    """Which objects of a group a hit needs."""

    ATTENTION = "attention"
    SLIDING = "sliding"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class ObjectGroup:
    """One cache group as the engine describes it.

    ``block_tokens`` is the group's block size per rank; ``context_shards`` is the decode-context-parallel size where
    the group is sharded over it, else 1, so one manager block covers ``block_tokens * context_shards`` tokens.
    ``window_tokens`` is the sliding window, 0 for other kinds. ``absent_shards`` are numbers that no rank holds: those of
    pipeline stages without a layer of the group.
    """

    index: int
    name: str
    kind: GroupKind
    block_tokens: int
    shards: int
    replicas: int
    context_shards: int = 1
    window_tokens: int = 0
    absent_shards: tuple[int, ...] = ()

    @property
    def full_mask(self) -> int:
        """The shards that exist, as bits: all of them make a complete object set."""
        return (1 << self.shards) - 1 & ~sum(1 << shard for shard in self.absent_shards)

    @property
    def unit_tokens(self) -> int:
        """Tokens covered by one manager block over all context-parallel ranks."""
        return self.block_tokens * self.context_shards

    def window_chunks(self, chunk_tokens: int) -> int:
        """Chunks before a boundary that a hit needs: 0 means all of them, 1 means the boundary's own.

        A window of W tokens at boundary b is read from token ``b - W + 1`` on (the next token attends to itself and
        to W - 1 earlier ones), so ``ceil((W - 1) / chunk_tokens)`` chunks are enough.
        """
        if self.kind is GroupKind.ATTENTION:
            return 0
        if self.kind is GroupKind.RECURRENT:
            return 1
        return max(1, math.ceil((self.window_tokens - 1) / chunk_tokens))

    def blocks_per_object(self, chunk_tokens: int) -> int:
        """Manager blocks whose bytes make one object: one for a state, the whole chunk's otherwise."""
        return 1 if self.kind is GroupKind.RECURRENT else chunk_tokens // self.unit_tokens


def check_groups(groups: Sequence[ObjectGroup]) -> None:
    """Refuse cache groups that cannot be served.

    Raises:
        UnsupportedGeometry: naming the group and the value.
    """
    if not groups:
        raise UnsupportedGeometry(
            "The engine described no cache group.", remedy="Register every KV cache group."
        )
    if len(groups) > MAX_GROUPS:
        raise UnsupportedGeometry(
            f"The engine has {len(groups)} cache groups; at most {MAX_GROUPS} are served."
        )
    for position, group in enumerate(groups):
        if group.index != position:
            raise UnsupportedGeometry(
                f"Group {group.index} stands at position {position}; list groups in order."
            )
        if group.block_tokens < 1 or group.context_shards < 1 or group.replicas < 1:
            raise UnsupportedGeometry(
                f"Group {group.index} has block_tokens={group.block_tokens}, context_shards={group.context_shards}, "
                f"replicas={group.replicas}; each must be at least 1."
            )
        if not 1 <= group.shards <= MAX_SHARDS:
            raise UnsupportedGeometry(
                f"Group {group.index} has {group.shards} shards; 1 to {MAX_SHARDS} are served."
            )
        if (group.kind is GroupKind.SLIDING) != (group.window_tokens > 0):
            raise UnsupportedGeometry(
                f"Group {group.index} is {group.kind} with window_tokens={group.window_tokens}; "
                "exactly the sliding groups have a window."
            )


def negotiate_chunk_tokens(minimum_tokens: int, groups: Iterable[ObjectGroup]) -> int:
    """The smallest multiple of every group's unit that is at least ``minimum_tokens``.

    Raises:
        UnsupportedGeometry: if the groups' units have no common multiple of a usable size.
    """
    unit = math.lcm(*(group.unit_tokens for group in groups))
    chunk_tokens = unit * max(1, math.ceil(minimum_tokens / unit))
    if chunk_tokens > MAX_CHUNK_TOKENS:
        raise UnsupportedGeometry(
            f"The cache groups' block sizes meet only every {unit} tokens; chunks over {MAX_CHUNK_TOKENS} "
            "tokens are not served."
        )
    return chunk_tokens


def last_usable_chunk(prompt_tokens: int, chunk_tokens: int) -> int:
    """Chunks of a prompt that a hit may cover: at least one token is always left to compute."""
    return max(0, prompt_tokens - 1) // chunk_tokens


def writes_chunk(replica: int, replicas: int, chunk_index: int) -> bool:
    """Whether this replica is the one that stores the chunk: replicas take turns by chunk."""
    return chunk_index % replicas == replica
