"""Saves under way: their blocks stay pinned in vLLM's pool until every rank has reported them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connector.vllm.orders import SaveOrder

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from connector.client import SaveItem

PINNED_SHARE = 4
"""At most one block in this many may be pinned: an engine short of blocks computes, it does not wait for a cache."""


@dataclass
class _Save:
    block_ids: list[int]
    ranks_left: int


class SaveLedger:
    """Hands out save orders and gives their blocks back. Belongs to the scheduler's thread."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pool: BlockPool | None = None
        self._next_job = 1
        self._queued: list[SaveOrder] = []
        self._saves: dict[int, _Save] = {}
        self._pinned = 0

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's block pool; before that nothing can be pinned."""
        self._pool = pool

    @property
    def pending(self) -> bool:
        """Whether an order waits to be sent or to be reported."""
        return bool(self._saves)

    def is_free_and_retained(self, block_id: int, tokens: int) -> bool:
        """Whether nobody holds the block and vLLM still keeps it for the prefix of `tokens` tokens that it was kept for.

        A block that has been given to another request is held by it and has lost its hash.
        """
        assert self._pool is not None, "without a block pool nothing can be known about a block"
        block = self._pool.blocks[block_id]
        return block.ref_cnt == 0 and block.block_hash is not None and block.block_hash_num_tokens == tokens

    def pin(self, block_ids: Sequence[int]) -> bool:
        """Keep the blocks from being reused; False, and nothing is pinned, where too many are pinned already."""
        assert self._pool is not None, "a save without a block pool would read blocks that vLLM reuses"
        if self._pinned + len(block_ids) > self._pool.num_gpu_blocks // PINNED_SHARE:
            return False
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pinned += len(block_ids)
        return True

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give pinned blocks back, last first, so that vLLM evicts the deepest of a prefix before its start."""
        assert self._pool is not None, "nothing can have been pinned without a block pool"
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
        self._pinned -= len(block_ids)

    def order(self, items: Sequence[SaveItem], salt: bytes) -> None:
        """Queue a save whose blocks are pinned."""
        job_id, self._next_job = self._next_job, self._next_job + 1
        self._queued.append(SaveOrder(job_id, tuple(items), salt))
        block_ids = [block_id for item in items for block_id in item.block_ids]
        self._saves[job_id] = _Save(block_ids, self._world_size)

    def take_orders(self) -> tuple[SaveOrder, ...]:
        """The orders to send with this step."""
        queued, self._queued = tuple(self._queued), []
        return queued

    def reported(self, job_id: int, ranks: int) -> None:
        """Some ranks have finished a job; its blocks go back when all have."""
        save = self._saves.get(job_id)
        if save is None:
            return
        save.ranks_left -= ranks
        if save.ranks_left <= 0:
            del self._saves[job_id]
            self.unpin(save.block_ids)
