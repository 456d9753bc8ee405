"""The cells of a replay's tables: a policy, so much memory, a chunk of a certain weight, and what was hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.l1.eviction import DEFAULT_POLICY
from appliance.l1.eviction.lru import LeastRecentlyUsed
from appliance.replay.layouts import GeometryLayouts, Layout, layout_of_ratio
from appliance.replay.replay import replay
from appliance.replay.trace import Trace

EVERY_RANK_PADDED = "LRU-PADDED"
"""LRU where every rank stores all it holds: replicated groups as often as there are ranks, states with their padding."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure. ``capacity`` is a share of all bytes ever stored; ``l1_gb`` and ``geometry`` where the size was given."""

    trace: str
    policy: str
    capacity: float
    state_ratio: float
    hit_rate: float
    no_limit_hit_rate: float
    requests_per_second: float
    l1_gb: float | None = None
    geometry: str | None = None

    def as_row(self) -> dict[str, str | float | bool]:
        """As ``--json`` has it."""
        row: dict[str, str | float | bool] = {
            "trace": self.trace,
            "policy": self.policy,
            "default": self.policy == DEFAULT_POLICY,
            "capacity": self.capacity,
            "state_ratio": self.state_ratio,
            "hit_rate": round(self.hit_rate, 6),
            "no_limit_hit_rate": round(self.no_limit_hit_rate, 6),
            "requests_per_second": round(self.requests_per_second),
        }
        if self.l1_gb is not None and self.geometry is not None:
            row |= {"l1_gb": self.l1_gb, "geometry": self.geometry}
        return row


def cells_of_shares(
    trace: Trace, policies: Sequence[str], state_ratios: Sequence[float], capacities: Sequence[float]
) -> Iterator[Cell]:
    """Every policy at every share of all bytes ever stored: each unique chunk once, with a state."""
    for ratio in state_ratios:
        layout = layout_of_ratio(ratio)
        everything = trace.unique_chunks * layout.chunk_units
        for capacity in capacities:
            for policy in policies:
                yield _cell(trace, policy, layout, int(capacity * everything), capacity, ratio)


def cells_of_sizes(
    trace: Trace, policies: Sequence[str], geometry: GeometryLayouts, sizes_gb: Sequence[float]
) -> Iterator[Cell]:
    """Every policy at every size of L1; with LRU also what it does where nothing is stored once or without padding."""
    everything = trace.unique_chunks * geometry.once.chunk_units
    ratio = round(geometry.once.state_ratio, 3)
    for gb in sizes_gb:
        units = geometry.units_of_gb(gb)
        share = round(units / everything, 6)
        where = gb, geometry.name
        if LeastRecentlyUsed.name in policies:
            yield _cell(trace, EVERY_RANK_PADDED, geometry.padded, units, share, ratio, where)
        for policy in policies:
            yield _cell(trace, policy, geometry.once, units, share, ratio, where)


def _cell(
    trace: Trace,
    policy: str,
    layout: Layout,
    capacity_units: int,
    capacity: float,
    state_ratio: float,
    where: tuple[float | None, str | None] = (None, None),
) -> Cell:
    replayed = replay(
        trace, LeastRecentlyUsed.name if policy == EVERY_RANK_PADDED else policy, layout, capacity_units
    )
    return Cell(
        trace=trace.name,
        policy=policy,
        capacity=capacity,
        state_ratio=state_ratio,
        hit_rate=replayed.hit_rate,
        no_limit_hit_rate=trace.seen_chunks / trace.asked_chunks,
        requests_per_second=replayed.requests_per_second,
        l1_gb=where[0],
        geometry=where[1],
    )
