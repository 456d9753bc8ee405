"""Token budgets, the size of L1, and the extent size that wastes little of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.geometry import GroupKind
from appliance.planning.groups import CacheGroup
from appliance.planning.request import PlanRequest

GIB = 1 << 30
WATERMARK = 0.95
"""The daemon's default: above this share of L1 it evicts."""

THROUGHPUT_TOKENS = 8192
"""A prefill step that keeps a GPU busy; vLLM's own default for servers."""

LARGEST_EXTENT_KIB, SMALLEST_EXTENT_KIB = 256, 16
MOST_WASTE = 0.05


@dataclass(frozen=True, slots=True)
class Budgets:
    """``--max-num-batched-tokens`` for the two regimes; both leave room for decodes beside a prefill block."""

    fine: int
    throughput: int


@dataclass(frozen=True, slots=True)
class L1Size:
    """What the users' conversations take, in whole extents, and the L1 that holds them below the watermark."""

    extent_kib: int
    chunks: int
    bytes_per_user: int
    bytes_total: int
    size_gb: int


def budgets_of(block_tokens: int, *, hybrid: bool) -> Budgets:
    """``2N - 1``: one block a step with N - 1 tokens to spare; and as many blocks as make a large step, with the same."""
    if not hybrid:
        return Budgets(THROUGHPUT_TOKENS, THROUGHPUT_TOKENS)
    blocks = max(2, round(THROUGHPUT_TOKENS / block_tokens))
    return Budgets(2 * block_tokens - 1, (blocks + 1) * block_tokens - 1)


def l1_size(request: PlanRequest, groups: Sequence[CacheGroup], chunk_tokens: int) -> L1Size:
    """Whole chunks of each conversation in every group, of recurrent groups the snapshots that are kept."""
    chunks = max(1, request.context // chunk_tokens)
    extent_kib = _extent_kib(groups, chunk_tokens)
    per_user = sum(
        each.chunk_bytes(chunk_tokens, extent_kib * 1024)
        * (min(chunks, request.snapshots) if each.group.kind is GroupKind.RECURRENT else chunks)
        for each in groups
    )
    total = per_user * request.users
    return L1Size(extent_kib, chunks, per_user, total, max(1, math.ceil(total / WATERMARK / GIB)))


def _extent_kib(groups: Sequence[CacheGroup], chunk_tokens: int) -> int:
    """The largest extent that rounding up wastes little in: fewer extents are less work."""
    exact = sum(each.chunk_bytes(chunk_tokens) for each in groups)
    extent_kib = LARGEST_EXTENT_KIB
    while extent_kib > SMALLEST_EXTENT_KIB:
        taken = sum(each.chunk_bytes(chunk_tokens, extent_kib * 1024) for each in groups)
        if taken - exact <= MOST_WASTE * exact:
            break
        extent_kib //= 2
    return extent_kib
