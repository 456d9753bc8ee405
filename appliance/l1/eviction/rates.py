"""How soon prompts come back to a boundary: learned from the traffic, by class of boundary and by age.

A *life* of a boundary begins when a prompt ends or forks there and ends when another prompt comes back to it. Of each class
of boundaries the table counts returns and the time waited for them, by age, so that ``returns / waited`` is the rate of
return at that age (the hazard rate of survival analysis: occurrence over exposure).

What a byte is worth is the largest ratio, over all times T to keep it, of the probability of a return within T to the
expected time until the return or T: the Gittins index of stopping (J. Gittins, 1979), as hit density is for a cache (LHD,
Beckmann et al., NSDI 2018). A boundary whose return is due, because users take minutes to answer, is therefore worth more
than one that was stored just now, which order by recency cannot say.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BUCKETS = 40
"""Half octaves of age from 0.7 s: the last begins after a week."""
_EDGES = np.concatenate(([0.0], 2.0 ** (np.arange(1, BUCKETS + 1) / 2 - 1)))
_WIDTHS = np.diff(_EDGES)
_MIDDLES = np.maximum(1.0, (_EDGES[:-1] + _EDGES[1:]) / 2)

_PRIOR_RETURNS = 1.0
"""How many returns of its own a class needs to be believed as much as what is assumed of it."""
_PRIOR_RATE = 0.1
"""Assumed of everything before anything was seen: a rate of 0.1 / age, which orders by recency."""


def bucket_of(ages_seconds: Floats) -> NDArray[np.int64]:
    """The bucket of each age."""
    halves = np.floor(2.0 * np.log2(np.maximum(ages_seconds, 0.5)) + 2.0)
    return np.minimum(halves, BUCKETS - 1).astype(np.int64)


class ReturnRates:
    """Returns and waiting times of ``classes`` classes of boundaries, and what keeping one of them is worth."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._returns: Floats = np.zeros((classes, BUCKETS))
        self._waited: Floats = np.zeros((classes, BUCKETS))
        self.worth: Floats = np.zeros((classes, BUCKETS))
        """Expected returns per second of keeping, by class and bucket of age."""
        self.chance: Floats = np.zeros(classes)
        """The probability that a boundary of the class is ever come back to."""
        self.learn(np.empty(0, dtype=np.int64), np.empty(0))

    def count(self, classes: NDArray[np.int64], ages_seconds: Floats, *, returned: bool) -> None:
        """These lives ended: with a return, or forgotten."""
        if returned:
            np.add.at(self._returns, (classes, bucket_of(ages_seconds)), 1.0)
        self._waited += self._exposure(classes, ages_seconds)

    def forget_half(self) -> None:
        """Old traffic counts half as much from now on."""
        self._returns *= 0.5
        self._waited *= 0.5

    def learn(self, classes: NDArray[np.int64], ages_seconds: Floats) -> None:
        """Work out what boundaries are worth; given are the lives that have not ended yet."""
        waited = self._waited + self._exposure(classes, ages_seconds)
        rates = self._rates(waited)
        self.worth = _gittins(rates)
        self.chance = 1.0 - np.exp(-(rates * _WIDTHS).sum(axis=1))

    def _rates(self, waited: Floats) -> Floats:
        """Each class drawn towards the shape over age that all classes share, scaled to its own number of returns."""
        prior = _PRIOR_RATE / _MIDDLES
        shape = (self._returns.sum(axis=0) + _PRIOR_RETURNS) / (waited.sum(axis=0) + _PRIOR_RETURNS / prior)
        expected: Floats = np.einsum("ca,a->c", waited, shape)
        scale = (self._returns.sum(axis=1) + _PRIOR_RETURNS) / (expected + _PRIOR_RETURNS)
        assumed = shape[None, :] * scale[:, None]
        rates: Floats = (self._returns + _PRIOR_RETURNS) / (waited + _PRIOR_RETURNS / assumed)
        return rates

    def _exposure(self, classes: NDArray[np.int64], ages_seconds: Floats) -> Floats:
        """Seconds that lives of these ages spent in each bucket; (classes, buckets)."""
        if not len(classes):
            return np.zeros((self._classes, BUCKETS))
        reached = bucket_of(ages_seconds)
        flat = classes * BUCKETS + reached
        size = self._classes * BUCKETS
        ended = np.bincount(flat, minlength=size).reshape(self._classes, BUCKETS)
        within = ages_seconds - _EDGES[reached]
        partial = np.bincount(flat, weights=within, minlength=size).astype(np.float64)
        passed = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended
        spent: Floats = passed * _WIDTHS + partial.reshape(self._classes, BUCKETS)
        return spent


def _gittins(rates: Floats) -> Floats:
    """``worth[c, j]``: the best ratio of P(return) to E[time] over every stop at the end of a bucket >= j."""
    survival = np.exp(-rates * _WIDTHS)
    lost = 1.0 - survival
    spent = lost / np.maximum(rates, 1e-15)
    worth = np.empty_like(rates)
    for first in range(rates.shape[1]):
        before = np.cumprod(survival[:, first:], axis=1)
        alive = np.concatenate((np.ones((len(rates), 1)), before[:, :-1]), axis=1)
        chance = np.cumsum(alive * lost[:, first:], axis=1)
        seconds = np.cumsum(alive * spent[:, first:], axis=1)
        worth[:, first] = (chance / seconds).max(axis=1)
    return worth
