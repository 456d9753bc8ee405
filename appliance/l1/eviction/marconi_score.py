"""Marconi's utility of a node: how lately it was used, and the FLOPs that a hit there saves for each byte it takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_EVEN_TOKENS = 200_000
"""Length at which attention scores cost as much as all the rest of the model.

With the paper's counts a layer costs 8LD² + 4L²D (attention), 12LD² (state space) and 16LD² (MLP). Its hybrid with 4, 24 and 28 of
them and D = 4096 comes to 197,000 tokens; Kimi K3 with 24, 69 and 93 and D = 7168 to 187,000.
"""

_TAKEN = 16
_MOST_SHARE = 16
_LEAST_SHARE = 256


def utility(
    alpha: float, used: Ints, end_tokens: Ints, gain_tokens: Ints, extents: Floats, saves: NDArray[np.bool_]
) -> Floats:
    """``recency + alpha * efficiency``, each from 0 to 1 over the nodes given.

    Efficiency is the FLOPs between the node before, ``gain_tokens`` earlier, and this one, for each of its extents; a node that
    does not ``save`` has none.
    """
    recency = normalized(used, 0.0)
    if not alpha:
        return recency
    saved = np.where(saves, _work(end_tokens) - _work(end_tokens - gain_tokens), 0.0)
    return recency + alpha * normalized(saved / extents, 0.0)


def normalized(values: Ints | Floats, constant: float) -> Floats:
    """From 0 for the least to 1 for the greatest; ``constant`` where all are the same."""
    least, greatest = values.min(), values.max()
    if least == greatest:
        return np.full(len(values), constant)
    scaled: Floats = (values - least) / (greatest - least)
    return scaled


def lowest(scores: Floats) -> NDArray[np.intp]:
    """The places of the lowest scores, in order: as many as go before nodes are ranked anew.

    Those are 16, but no more than a 16th of few nodes and no less than a 256th of many.
    """
    count = len(scores)
    taken = max(1, min(_TAKEN, count // _MOST_SHARE), count // _LEAST_SHARE)
    places = np.argpartition(scores, taken - 1)[:taken]
    in_order: NDArray[np.intp] = places[np.argsort(scores[places], kind="stable")]
    return in_order


def _work(tokens: Ints) -> Floats:
    """FLOPs of a prompt of so many tokens, in units of one token at the beginning."""
    work: Floats = tokens + tokens.astype(np.float64) ** 2 / _EVEN_TOKENS
    return work
