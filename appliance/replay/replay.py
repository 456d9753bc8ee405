"""One trace through one policy in so much memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from appliance.l1.eviction import POLICIES, EvictionPolicy, make_policy
from appliance.l1.keys_only import KeysOnlyCache
from appliance.replay.clairvoyant import Clairvoyant
from appliance.replay.layouts import Layout
from appliance.replay.trace import CHUNK_TOKENS, Trace

REFERENCE = Clairvoyant.name
REPLAYED = (*POLICIES, REFERENCE)
"""Every policy that a trace can be replayed through: those of the daemon, and the one that knows the future."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a policy made of a trace; chunks, and seconds of processor time."""

    hit_chunks: int
    asked_chunks: int
    requests: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Chunks up to the deepest boundary that could be served, over all chunks asked."""
        return self.hit_chunks / self.asked_chunks

    @property
    def requests_per_second(self) -> float:
        """Lookups, stores and evictions of so many prompts in a second."""
        return self.requests / self.seconds


class _Clock:
    """The trace's own time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replay(trace: Trace, policy: str, layout: Layout, capacity_units: int) -> Replayed:
    """Look up, compute and store every prompt in order, in a cache of so many units."""
    clock = _Clock()
    known = _policy(policy, trace, clock)
    cache = KeysOnlyCache(
        known, layout.groups, CHUNK_TOKENS, capacity_extents=capacity_units, entry_extents=layout.sizes
    )
    hits = 0
    began = time.process_time()
    for request in trace.requests:
        if request.keys:
            clock.now = request.at_seconds
            hits += cache.serve(request.keys, request.at_seconds)
    return Replayed(hits, trace.asked_chunks, len(trace.requests), time.process_time() - began)


def _policy(name: str, trace: Trace, clock: Callable[[], float]) -> EvictionPolicy:
    if name == REFERENCE:
        return Clairvoyant([request.keys for request in trace.requests if request.keys])
    return make_policy(name, clock)
