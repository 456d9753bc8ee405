"""SegLen's rule: Marconi's without FLOPs, bytes and tuning.

From the description of SGLang's pull request 22172 (``--radix-eviction-policy seglen``): candidates are ranked by the length
that would have to be computed again from the nearest state before, combined with recency; both scaled to 0..1 over the
candidates, 0.5 where all are equal, the length with weight 0.85. There, states and attention have pools of their own; here they
share one, so a node's state goes alone while others continue the node, and with its attention when none does.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from appliance.l1.eviction.marconi_score import normalized
from appliance.l1.eviction.scored import Nodes, ScoredNodes

_LENGTH_WEIGHT = 0.85
_MANY = 1 << 32


class SegmentLength(ScoredNodes):
    """Ranks states by the tokens back to the state before, and by recency."""

    name: ClassVar[str] = "SEGLEN"
    most_children: ClassVar[int] = _MANY

    def _scores(self, nodes: Nodes) -> NDArray[np.float64]:
        lengths = normalized(np.where(nodes.saves, nodes.gain_tokens, 0), 0.5)
        recency = normalized(nodes.used, 0.5)
        scores: NDArray[np.float64] = _LENGTH_WEIGHT * lengths + (1 - _LENGTH_WEIGHT) * recency
        return scores
