"""What Marconi's and SegLen's rules share: a radix tree's nodes, ranked by recency and by what a state there saves.

A node is a boundary with a state, with the attention of the chunks back to the node before. Both rules admit states at two
boundaries of a prompt only: where it parts from what is cached, and at its end. Both refresh the one node that served a hit,
not the nodes before it: their states were not read. A model with attention only has a node for every chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import GroupKind
from appliance.l1.columns import Column
from appliance.l1.eviction.marconi_score import lowest
from appliance.l1.eviction.policy import Prompt
from appliance.l1.eviction.radix import RadixNodes
from appliance.l1.index import NamespaceIndex

Entries = NDArray[np.int64]
Floats = NDArray[np.float64]

_LOOKS = 4096
_SLOT_SHIFT = 40


class Nodes(NamedTuple):
    """Every node that could go, as columns of one length.

    ``used`` counts prompts; ``extents`` are those of the node's state and edge; a node that does not ``save`` serves no hit.
    """

    slot: NDArray[np.int64]
    row: NDArray[np.int64]
    used: NDArray[np.int64]
    end_tokens: NDArray[np.int64]
    gain_tokens: NDArray[np.int64]
    extents: Floats
    saves: NDArray[np.bool_]


@dataclass(slots=True)
class _Space:
    """What is known of one namespace. ``version`` of a row changes with whatever is done to it."""

    index: NamespaceIndex
    nodes: RadixNodes
    used: Column
    version: Column
    has_states: bool


class ScoredNodes(ABC):
    """Evicts the node with the lowest score, over all namespaces."""

    most_children: ClassVar[int]
    """Nodes that more nodes continue stay until they have fewer."""

    def __init__(self) -> None:
        self._spaces: list[_Space] = []
        self._prompts = 0
        self._ranked: deque[tuple[int, int, int]] = deque()
        self._offered: set[int] = set()
        self._next: deque[tuple[int, Entries, NDArray[np.int64]]] = deque()

    @abstractmethod
    def _scores(self, nodes: Nodes) -> Floats:
        """Of each node; the lowest goes first."""

    def add_namespace(self, index: NamespaceIndex) -> None:
        """See :class:`EvictionPolicy`."""
        rows = len(index.chunk_index.array)
        has_states = any(group.kind is GroupKind.RECURRENT for group in index.groups)
        space = _Space(index, RadixNodes(index), Column(rows, np.int64), Column(rows, np.int64), has_states)
        self._spaces.append(space)
        present = np.array(sorted(index.rows(), key=index.chunk_index.view.__getitem__), dtype=np.int64)
        entries = (present[:, None] * index.group_count + np.arange(index.group_count)).ravel()
        self.stored(index, entries[index.present.array[entries] != 0])

    # --- what happens -----------------------------------------------------------------------------------------------

    def asked(self, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
        """See :class:`EvictionPolicy`. Where the prompt parts from what is cached: there a branch begins."""
        self._prompts += 1
        space = self._spaces[index.slot]
        if prompt.hit:
            served = prompt.rows[prompt.hit - 1 if space.has_states else 0 : prompt.hit]
            space.used.array[served] = self._prompts
            space.version.array[served] += 1
        return (prompt.attention,) if space.has_states and prompt.attention > prompt.hit else ()

    def touched(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`. It only takes back what was about to go."""
        self._spaces[index.slot].version.array[entries // index.group_count] += 1

    def stored(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`."""
        space = self._spaces[index.slot]
        rows = entries // index.group_count
        space.used.array[rows] = self._prompts
        space.version.array[rows] += 1
        space.nodes.stored(entries)

    def demoted(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`."""
        if len(entries):
            version = self._spaces[index.slot].version.array
            self._next.appendleft((index.slot, entries, version[entries // index.group_count]))

    def removed(self, index: NamespaceIndex, entries: Entries) -> None:
        """See :class:`EvictionPolicy`."""
        self._spaces[index.slot].nodes.removed(entries)
        if self._offered:
            rows = (entries // index.group_count) | (index.slot << _SLOT_SHIFT)
            self._offered.difference_update(rows.tolist())

    def covers(self, index: NamespaceIndex, entries: Entries) -> NDArray[np.bool_]:
        """See :class:`EvictionPolicy`. What others continue comes up when they have gone."""
        nodes = self._spaces[index.slot].nodes
        rows = entries // index.group_count
        covered: NDArray[np.bool_] = (nodes.place.array[rows] != 0) | (nodes.continued.array[rows] != 0)
        return covered

    # --- ranking ----------------------------------------------------------------------------------------------------

    def candidates(self, extents: int) -> Iterator[tuple[int, Entries]]:
        """See :class:`EvictionPolicy`. A node that the consumer left is not offered again before the next call."""
        self._offered.clear()
        looks = 0
        while looks < _LOOKS:
            batch = self._take_next()
            if batch is None:
                if not self._offer(extents):
                    self._rank()
                    if not self._ranked:
                        return
                continue
            looks += len(batch[1])
            try:
                yield batch
            finally:
                self._keep_rest(*batch)

    def _take_next(self) -> tuple[int, Entries] | None:
        """What is to go next and was not used since that was decided."""
        while self._next:
            slot, entries, version = self._next.popleft()
            space = self._spaces[slot]
            index = space.index
            same = space.version.array[entries // index.group_count] == version
            entries = entries[same & (index.present.array[entries] != 0)]
            if len(entries):
                return slot, entries
        return None

    def _keep_rest(self, slot: int, entries: Entries) -> None:
        """Entries behind the last one that the consumer evicted are next; the ones before were held."""
        space = self._spaces[slot]
        index = space.index
        gone = np.flatnonzero(index.present.array[entries] == 0)
        rest = entries[int(gone[-1]) + 1 :] if len(gone) else entries[:0]
        if len(rest):
            self._next.appendleft((slot, rest, space.version.array[rest // index.group_count]))

    def _offer(self, extents: int) -> bool:
        """Ranked nodes of one namespace are next, until they free so much; false if none is left."""
        found: list[int] = []
        of_slot = -1
        while self._ranked and extents > 0:
            slot, row, version = self._ranked[0]
            if of_slot not in (-1, slot):
                break
            self._ranked.popleft()
            space = self._spaces[slot]
            if space.version.view[row] == version and space.nodes.place.view[row]:
                of_slot = slot
                self._offered.add((slot << _SLOT_SHIFT) | row)
                entries = space.nodes.entries_of(row)
                found += entries
                extents -= sum(space.index.extents.view[entry] for entry in entries)
        if not found:
            return False
        space = self._spaces[of_slot]
        array = np.array(found, dtype=np.int64)
        self._next.append((of_slot, array, space.version.array[array // space.index.group_count]))
        return True

    def _rank(self) -> None:
        """The lowest of all nodes, in order."""
        self._ranked.clear()
        nodes = self._nodes()
        if nodes is None:
            return
        first = lowest(self._scores(nodes))
        for slot, row in zip(nodes.slot[first].tolist(), nodes.row[first].tolist(), strict=True):
            self._ranked.append((slot, row, self._spaces[slot].version.view[row]))

    def _nodes(self) -> Nodes | None:
        """Every node that may go now: nobody holds it, few enough continue it, and it was not offered before."""
        parts = [self._nodes_of(space) for space in self._spaces if len(space.nodes)]
        if not sum(len(part.row) for part in parts):
            return None
        return Nodes(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _nodes_of(self, space: _Space) -> Nodes:
        index, nodes = space.index, space.nodes
        rows = nodes.rows[nodes.continued.array[nodes.rows] <= self.most_children]
        if self._offered:
            rows = rows[~np.isin(rows | (index.slot << _SLOT_SHIFT), list(self._offered))]
        rows = rows[self._has_free_entry(space, rows)]
        gain: NDArray[np.int64] = nodes.gain.array[rows].astype(np.int64)
        edges: Floats = gain.astype(np.float64) * extents_of(index, index.attention)
        return Nodes(
            slot=np.full(len(rows), index.slot, dtype=np.int64),
            row=rows,
            used=space.used.array[rows],
            end_tokens=(index.chunk_index.array[rows].astype(np.int64) + 1) * index.chunk_tokens,
            gain_tokens=gain * index.chunk_tokens,
            extents=edges + extents_of(index, index.others),
            saves=nodes.has_state.array[rows] != 0 if index.others else np.ones(len(rows), dtype=np.bool_),
        )

    @staticmethod
    def _has_free_entry(space: _Space, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether something would go with each node that no lease and no pin holds."""
        index = space.index
        shape = (-1, index.group_count)
        free = (index.present.array.reshape(shape)[rows] != 0) & (index.holds.array.reshape(shape)[rows] == 0)
        if index.any_pins:
            free &= index.pins.array.reshape(shape)[rows] == 0
        free[:, index.attention] &= space.nodes.continued.array[rows, None] == 0
        found: NDArray[np.bool_] = free.any(axis=1)
        return found


def extents_of(index: NamespaceIndex, groups: Sequence[int]) -> float:
    """Extents of a chunk's entries of these groups, on average; at least one each."""
    extents = 0.0
    for group in groups:
        totals = index.totals[group]
        shards = int(index.full_masks[group]).bit_count()
        extents += max(1.0, totals.extents / max(1, totals.objects) * shards)
    return extents
