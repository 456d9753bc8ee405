"""Which pages of a request are stored, and when: each chunk as it fills, each state that vLLM retained for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.geometry import GroupKind, ObjectGroup
from connector.client import SaveItem
from connector.vllm.plans import NULL_BLOCK, BlockTables, save_items
from connector.vllm.snapshots import prompt_boundaries
from connector.vllm.windows import LeftBlocks

if TYPE_CHECKING:
    from connector.client import SchedulerClient
    from connector.vllm.ledger import SaveLedger
    from connector.vllm.requests import TrackedRequest


@dataclass
class SaveCounters:
    """Objects handed to saves, chunks left for later since too many blocks were pinned, and states that were gone."""

    ordered: int = 0
    deferred: int = 0
    overtaken: int = 0


class SaveCollector:
    """Pins and orders what is worth storing. Belongs to the scheduler's thread."""

    def __init__(
        self,
        client: SchedulerClient,
        groups: Sequence[ObjectGroup],
        ledger: SaveLedger,
        *,
        store_generated: bool,
    ) -> None:
        self._client = client
        self._groups = tuple(groups)
        self._recurrent = frozenset(group.index for group in groups if group.kind is GroupKind.RECURRENT)
        self._ledger = ledger
        self._store_generated = store_generated
        self._left = LeftBlocks(groups, ledger)
        self.counters = SaveCounters()

    def collect(
        self,
        tracked: TrackedRequest,
        computed_tokens: int,
        tables: BlockTables | None,
        offers: Iterable[tuple[int, int, int]],
    ) -> None:
        """Order saves of what a step completes: chunks up to `computed_tokens`, and the states that vLLM offers.

        `offers` are (group, block id, boundary in tokens); `tables` hold block ids by group, None where vLLM has none.
        """
        if not self._ready(tracked):
            return
        items = self._pin_states(tracked, tables, offers)
        if tables is not None:
            items += self._pin_chunks(tracked, tables, computed_tokens)
            if self._store_generated or computed_tokens < tracked.request.num_prompt_tokens:
                self._left.keep(tracked, tables, computed_tokens)
        self._order(tracked, items)

    def collect_last(self, tracked: TrackedRequest, tables: BlockTables) -> None:
        """Order saves of what is left when a request ends: its last whole chunk, and the state there."""
        if self._ready(tracked):
            items = self._pin_chunks(tracked, tables, tracked.request.num_computed_tokens)
            self._order(tracked, items + self._last_states(tracked))

    def _order(self, tracked: TrackedRequest, items: list[SaveItem]) -> None:
        if items:
            self.counters.ordered += len(items)
            self._ledger.order(items, tracked.salt_label)

    def _storable_chunks(self, tracked: TrackedRequest, computed_tokens: int) -> int:
        """Whole chunks whose tokens are known and computed once this step has run."""
        request = tracked.request
        limit = request.num_tokens if self._store_generated else request.num_prompt_tokens
        return int(min(computed_tokens, limit) // tracked.chunk_tokens)

    def _ready(self, tracked: TrackedRequest) -> bool:
        """Whether anything of this request may be stored now."""
        chunk_tokens = self._client.chunk_tokens
        if chunk_tokens is None or tracked.identity is None:
            return False
        # Keys computed under another chunk size (the daemon was away and came back) start over.
        tracked.keys_for(chunk_tokens, 0)
        return True

    def _pin_chunks(
        self, tracked: TrackedRequest, tables: BlockTables, computed_tokens: int
    ) -> list[SaveItem]:
        """Attention pages of the chunks that this step completes, pinned."""
        chunk_tokens = tracked.chunk_tokens
        complete = self._storable_chunks(tracked, computed_tokens)
        if complete <= tracked.next_chunk:
            return []
        keys = tracked.keys_for(chunk_tokens, complete)
        assert tracked.hasher is not None, "keys come from a hasher"
        root = tracked.hasher.root
        tables = self._left.complete(tracked, tables)
        pinned: list[SaveItem] = []
        while tracked.next_chunk < complete:
            chunk = tracked.next_chunk
            items = list(
                save_items(
                    self._groups,
                    tables,
                    keys[: chunk + 1],
                    root,
                    chunk_tokens=chunk_tokens,
                    first_chunk=chunk,
                )
            )
            if not self._ledger.pin(self._left.unpinned(tracked, items)):
                # The request keeps its blocks, so the chunk can be stored in a later step.
                self.counters.deferred += 1
                break
            self._left.ordered(tracked, items, (chunk + 1) * chunk_tokens)
            pinned += items
            tracked.next_chunk += 1
        return pinned

    def _pin_states(
        self, tracked: TrackedRequest, tables: BlockTables | None, offers: Iterable[tuple[int, int, int]]
    ) -> list[SaveItem]:
        """States that vLLM retained and that are worth storing, pinned."""
        items: list[SaveItem] = []
        for group, block_id, boundary in offers:
            if boundary % tracked.chunk_tokens or group not in self._recurrent or block_id == NULL_BLOCK:
                continue
            if not self._still_there(tables, group, block_id, boundary):
                self.counters.overtaken += 1
                continue
            if boundary > tracked.request.num_prompt_tokens:
                self._hold_state(tracked, group, block_id, boundary)
            elif self._is_wanted(tracked, boundary):
                items += self._pin_state(tracked, group, block_id, boundary)
        return items

    def _still_there(self, tables: BlockTables | None, group: int, block_id: int, boundary: int) -> bool:
        """Whether an offered block still holds the offered state.

        An offer is made when a step's results are taken in and reaches us with the next step. In between vLLM may have
        freed the block and even given it to another request, whose bytes must not be stored under this one's key.
        """
        place = boundary // self._groups[group].unit_tokens - 1
        table = tables[group] if tables is not None else ()
        if place < len(table) and table[place] == block_id:
            return True
        return self._ledger.is_free_and_retained(block_id, boundary)

    def _is_wanted(self, tracked: TrackedRequest, boundary: int) -> bool:
        last = prompt_boundaries(tracked.request.num_prompt_tokens, tracked.chunk_tokens)
        return boundary in tracked.wanted or boundary in last

    def _pin_state(self, tracked: TrackedRequest, group: int, block_id: int, boundary: int) -> list[SaveItem]:
        item = self._state_item(tracked, group, block_id, boundary)
        if item is None or not self._ledger.pin([block_id]):
            return []
        return [item]

    def _state_item(
        self, tracked: TrackedRequest, group: int, block_id: int, boundary: int
    ) -> SaveItem | None:
        """The object of a state, or None if it was handed to a save before or its tokens are not all known."""
        chunk = boundary // tracked.chunk_tokens - 1
        keys = tracked.keys_for(tracked.chunk_tokens, chunk + 1)
        if len(keys) <= chunk or (group, chunk) in tracked.saved_states:
            return None
        assert tracked.hasher is not None, "keys come from a hasher"
        tracked.saved_states.add((group, chunk))
        return SaveItem(group, chunk, keys[chunk], tracked.hasher.parent(chunk), (block_id,))

    def _hold_state(self, tracked: TrackedRequest, group: int, block_id: int, boundary: int) -> None:
        """Keep the latest state of generated text: only the last one of a request is worth storing."""
        if not self._store_generated or not self._ledger.pin([block_id]):
            return
        earlier = tracked.held_states.get(group)
        if earlier is not None:
            self._ledger.unpin([earlier[1]])
        tracked.held_states[group] = (boundary, block_id)

    def _last_states(self, tracked: TrackedRequest) -> list[SaveItem]:
        """The held states of a request that ends, if every recurrent group has one at the same boundary."""
        held = tracked.held_states
        if held.keys() != self._recurrent or len({boundary for boundary, _ in held.values()}) != 1:
            return []
        items = []
        for group, (boundary, block_id) in sorted(held.items()):
            item = self._state_item(tracked, group, block_id, boundary)
            if item is not None:
                items.append(item)
        for item in items:
            del held[item.group]
        return items

    def drop_held(self, tracked: TrackedRequest) -> None:
        """Give back the states that were kept in case the request ended there, and what windows have left."""
        self._left.drop(tracked)
        for _, block_id in tracked.held_states.values():
            self._ledger.unpin([block_id])
        tracked.held_states.clear()
