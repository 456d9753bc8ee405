"""Marconi's rule (Pan et al., MLSys 2025, arXiv 2411.19379), from the paper.

States are admitted at branch points and at the ends of prompts. The node with the least ``recency + alpha * FLOPs saved per
byte`` goes first, both scaled to 0..1 over the nodes; nodes with more than one child stay; evicting a node with one child frees
its state and leaves its attention to the child. FLOPs are those from the node before to this one.

Alpha is 0 until something must be evicted. Then, after ten times as many prompts as had come by that time, the prompts so far
are replayed with several values and the best one is taken. What is kept for that is bounded; where memory lasts for more
prompts than are remembered, alpha stays 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from appliance.l1.eviction.marconi_log import PromptLog, Weights
from appliance.l1.eviction.marconi_score import utility
from appliance.l1.eviction.marconi_search import AlphaSearch
from appliance.l1.eviction.policy import Entries, Prompt
from appliance.l1.eviction.scored import Nodes, ScoredNodes, extents_of
from appliance.l1.index import NamespaceIndex

_BOOTSTRAP = 10
_MOST_BOOTSTRAP = 2048
"""Prompts: the paper says 5 to 15 times those before the first eviction; a large cache need not wait for days."""
_STEPS = 16
"""Prompts that the search replays at each prompt: less than a millisecond."""


class Marconi(ScoredNodes):
    """Ranks states by recency and by the work they save per byte; ``alpha`` is searched for, or fixed where it is given."""

    name: ClassVar[str] = "MARCONI"
    most_children: ClassVar[int] = 1

    def __init__(self, alpha: float | None = None) -> None:
        super().__init__()
        self.alpha = alpha or 0.0
        self._log = PromptLog() if alpha is None else None
        self._search: AlphaSearch | None = None
        self._until = 0
        self._capacity = 0.0

    def asked(self, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
        """See :class:`EvictionPolicy`."""
        if self._search is not None:
            self._advance(self._search)
        elif self._log is not None and index.others and prompt.keys:
            self._remember(self._log, index, prompt)
        return super().asked(index, prompt)

    def candidates(self, extents: int) -> Iterator[tuple[int, Entries]]:
        """See :class:`EvictionPolicy`."""
        if self._log is not None and not self._until:
            self._until = len(self._log) + min(_MOST_BOOTSTRAP, _BOOTSTRAP * len(self._log))
            self._capacity = sum(t.extents for space in self._spaces for t in space.index.totals)
        return super().candidates(extents)

    def _scores(self, nodes: Nodes) -> NDArray[np.float64]:
        return utility(
            self.alpha, nodes.used, nodes.end_tokens, nodes.gain_tokens, nodes.extents, nodes.saves
        )

    # --- alpha ------------------------------------------------------------------------------------------------------

    def _remember(self, log: PromptLog, index: NamespaceIndex, prompt: Prompt) -> None:
        log.add(index.slot, prompt.keys)
        if log.is_full and not self._until:
            self._log = None
        elif self._until and (len(log) >= self._until or log.is_full):
            weights = {
                space.index.slot: Weights(
                    extents_of(space.index, space.index.attention),
                    extents_of(space.index, space.index.others),
                    space.index.chunk_tokens,
                )
                for space in self._spaces
            }
            self._search = AlphaSearch(log.segments(weights), self._capacity)
            self._log = None

    def _advance(self, search: AlphaSearch) -> None:
        search.advance(_STEPS)
        if search.is_done:
            self.alpha = search.best
            self._search = None
