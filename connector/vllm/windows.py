"""Pages that a sliding window leaves before their chunk is complete.

vLLM gives a block back as soon as its window has passed it. Where the window is shorter than a chunk, that happens in the
middle of a chunk, in generated text always; without those blocks the chunk could not be stored, and no prompt could be
resumed at its end. So they are pinned when the window passes them, until their chunk is ordered or the request ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from appliance.geometry import GroupKind, ObjectGroup
from connector.vllm.plans import NULL_BLOCK, BlockTables

if TYPE_CHECKING:
    from connector.client import SaveItem
    from connector.vllm.ledger import SaveLedger
    from connector.vllm.requests import TrackedRequest


class LeftBlocks:
    """Keeps `TrackedRequest.left_blocks`. Belongs to the scheduler's thread."""

    def __init__(self, groups: Sequence[ObjectGroup], ledger: SaveLedger) -> None:
        self._groups = tuple(group for group in groups if group.kind is GroupKind.SLIDING)
        self._ledger = ledger

    def keep(self, tracked: TrackedRequest, tables: BlockTables, computed_tokens: int) -> None:
        """Pin what windows have passed in the chunk under way, once `computed_tokens` are computed."""
        chunk_begin = computed_tokens // tracked.chunk_tokens * tracked.chunk_tokens
        for group in self._groups:
            table = tables[group.index]
            passed = max(0, computed_tokens - group.window_tokens + 1) // group.unit_tokens
            for place in range(chunk_begin // group.unit_tokens, min(passed, len(table))):
                block_id, known = table[place], (group.index, place)
                if block_id == NULL_BLOCK or known in tracked.left_blocks:
                    continue
                if not self._ledger.pin([block_id]):
                    return
                tracked.left_blocks[known] = block_id

    def complete(self, tracked: TrackedRequest, tables: BlockTables) -> BlockTables:
        """`tables` with the kept blocks where vLLM has null blocks by now."""
        if not tracked.left_blocks:
            return tables
        filled = [list(table) for table in tables]
        for (group, place), block_id in tracked.left_blocks.items():
            if filled[group][place] == NULL_BLOCK:
                filled[group][place] = block_id
        return filled

    def unpinned(self, tracked: TrackedRequest, items: Iterable[SaveItem]) -> list[int]:
        """The blocks of `items` that are not pinned yet."""
        kept = set(tracked.left_blocks.values())
        return [block_id for item in items for block_id in item.block_ids if block_id not in kept]

    def ordered(self, tracked: TrackedRequest, items: Iterable[SaveItem], end_tokens: int) -> None:
        """The chunk that ends at `end_tokens` is ordered: its pins are the save's now; what it did not take goes back."""
        taken = {block_id for item in items for block_id in item.block_ids}
        units = {group.index: group.unit_tokens for group in self._groups}
        for (group, place), block_id in list(tracked.left_blocks.items()):
            if (place + 1) * units[group] <= end_tokens:
                del tracked.left_blocks[group, place]
                if block_id not in taken:
                    self._ledger.unpin([block_id])

    def drop(self, tracked: TrackedRequest) -> None:
        """Give everything back: the request ends or starts over."""
        self._ledger.unpin(list(tracked.left_blocks.values()))
        tracked.left_blocks.clear()
