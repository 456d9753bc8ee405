"""The simple rule: a state is kept at a prompt's last whole chunk and where the prompt stopped matching; the rest is LRU.

Every other state is the first to go. It is what most of the gain over LRU on hybrids comes from, and what any cleverer policy
has to beat.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from appliance.geometry import GroupKind
from appliance.l1.eviction.lru import LeastRecentlyUsed
from appliance.l1.eviction.policy import Prompt
from appliance.l1.index import NamespaceIndex

_REMEMBERED = 65_536
"""Boundaries that deserve their state, until it is stored: more than there are prompts under way."""


class SimpleRule(LeastRecentlyUsed):
    """LRU over entries of all namespaces, with states at two boundaries of a prompt and no others."""

    name: ClassVar[str] = "SIMPLE"

    def __init__(self) -> None:
        super().__init__()
        self._deserving: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._spare: dict[int, NDArray[np.bool_]] = {}
        self._is_state: dict[int, NDArray[np.bool_]] = {}

    def add_namespace(self, index: NamespaceIndex) -> None:
        """See :class:`EvictionPolicy`."""
        super().add_namespace(index)
        self._spare[index.slot] = np.zeros(len(index.present.array), dtype=np.bool_)
        self._is_state[index.slot] = np.array([g.kind is GroupKind.RECURRENT for g in index.groups])

    def asked(self, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
        """See :class:`EvictionPolicy`. Where the prompt stopped matching, if its state is missing there."""
        is_state = self._is_state[index.slot]
        if not is_state.any() or not prompt.keys:
            return ()
        for boundary in {prompt.attention, len(prompt.keys)} - {0}:
            self._deserve(index.slot, prompt.keys[boundary - 1])
            row = int(prompt.rows[boundary - 1])
            if row >= 0:
                begin = row * index.group_count
                self._spare[index.slot][begin : begin + index.group_count] = False
        return (prompt.attention,) if prompt.attention > prompt.hit else ()

    def _deserve(self, slot: int, key: bytes) -> None:
        self._deserving[slot, key] = None
        self._deserving.move_to_end((slot, key))
        if len(self._deserving) > _REMEMBERED:
            self._deserving.popitem(last=False)

    def stored(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`."""
        states = entries[self._is_state[index.slot][entries % index.group_count]]
        for entry, key in zip(states.tolist(), index.keys_of(states // index.group_count), strict=True):
            self._spare[index.slot][entry] = (index.slot, key) not in self._deserving

    def touched(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`. A spare state stays the first to go, however often its chunk is used."""
        super().touched(index, entries)
        spare = entries[self._spare[index.slot][entries]]
        if len(spare):
            self.demoted(index, spare)

    def removed(self, index: NamespaceIndex, entries: NDArray[np.int64]) -> None:
        """See :class:`EvictionPolicy`."""
        super().removed(index, entries)
        self._spare[index.slot][entries] = False
