"""Marconi's rule (Pan et al., MLSys 2025, arXiv 2411.19379), from the paper.

States are admitted at branch points and at the ends of prompts. The node with the least ``recency + alpha * FLOPs saved per
byte`` goes first, both scaled to 0..1 over the nodes; nodes with more than one child stay; evicting a node with one child frees
its state and leaves its attention to the child. FLOPs are those from the node before to this one.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from appliance.l1.eviction.scored import Nodes, ScoredNodes, normalized

_EVEN_TOKENS = 200_000
"""Length at which attention scores cost as much as all the rest of the model.

With the paper's counts a layer costs 8LD² + 4L²D (attention), 12LD² (state space) and 16LD² (MLP). Its hybrid with 4, 24 and 28 of
them and D = 4096 comes to 197,000 tokens; Kimi K3 with 24, 69 and 93 and D = 7168 to 187,000.
"""


class Marconi(ScoredNodes):
    """Ranks states by recency and by the work they save per byte; ``alpha`` of 0 is LRU over nodes."""

    name: ClassVar[str] = "MARCONI"
    most_children: ClassVar[int] = 1

    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        self.alpha = alpha

    def _scores(self, nodes: Nodes) -> NDArray[np.float64]:
        recency = normalized(nodes.used, 0.0)
        if not self.alpha:
            return recency
        begin_tokens = nodes.end_tokens - nodes.gain_tokens
        saved = np.where(nodes.saves, _work(nodes.end_tokens) - _work(begin_tokens), 0.0)
        return recency + self.alpha * normalized(saved / nodes.extents, 0.0)


def _work(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """FLOPs of a prompt of so many tokens, in units of one token at the beginning."""
    work: NDArray[np.float64] = tokens + tokens.astype(np.float64) ** 2 / _EVEN_TOKENS
    return work
