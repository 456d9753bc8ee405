"""Every extent has exactly one owner, or is free; bytes by state; reservations and limbo against the extents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from appliance.check.findings import Findings, Kind, extent_name
from appliance.check.looks import Looks
from appliance.l1.space import ExtentState, SegmentSpace, split_address
from appliance.l1.store import Store
from appliance.protocol.arena_layout import NO_LINK
from appliance.reservations import ReservationTable


@dataclass(frozen=True, slots=True)
class _Seen:
    """One segment's allocations at one moment. Addresses by what must be in that state."""

    segment: int
    states: NDArray[np.uint8]
    extent_counts: NDArray[np.uint32]
    run_counts: NDArray[np.uint32]
    run_nexts: NDArray[np.uint32]
    free: NDArray[np.bool_]
    links: NDArray[np.void]
    by_state: list[int]
    free_extents: int
    populated: int
    entered: int
    reserved_heads: set[int]
    limbo_heads: set[int]
    revoked_heads: set[int]
    draining_heads: set[int]


def check_ownership(store: Store, reservations: ReservationTable, looks: Looks, findings: Findings) -> None:
    """Each segment in one look: its columns are copied, and judged afterwards."""
    for space in store.arena.spaces:
        seen = looks.take(partial(_look, store, reservations, space))
        owned, starts = _walk(seen, findings)
        _compare_owners(seen, owned, findings)
        _compare_links(seen, starts, findings)
        _compare_sums(seen, findings)
        _compare_heads(seen, findings)


def _look(store: Store, reservations: ReservationTable, space: SegmentSpace) -> _Seen:
    counts, nexts = space.run_columns()
    limbo = {a for addresses in store.arena.limbo_by_attach.values() for a in addresses}
    live = {r.reserved.placement.address for r in reservations.live.values()}
    revoked = {r.reserved.placement.address for each in reservations.revoked.values() for r in each.values()}
    draining = {address for index in store.by_slot for address in index.doomed_addresses()}
    segment = space.segment.index
    return _Seen(
        segment=segment,
        states=np.array(space.states, dtype=np.uint8),
        extent_counts=np.array(space.extent_counts, dtype=np.uint32),
        run_counts=counts.copy(),
        run_nexts=nexts.copy(),
        free=space.allocator.free_mask.copy(),
        links=space.segment.read_links(),
        by_state=list(space.extents_by_state),
        free_extents=space.allocator.free_extents,
        populated=space.populated_extents,
        entered=space.entered_extents,
        reserved_heads=_heads(live, segment),
        limbo_heads=_heads(limbo, segment),
        revoked_heads=_heads(revoked, segment),
        draining_heads=_heads(draining, segment),
    )


def _heads(addresses: set[int], segment: int) -> set[int]:
    return {extent for each in addresses for at, extent in (split_address(each),) if at == segment}


def _walk(seen: _Seen, findings: Findings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Follow every chain at once: how often each extent is owned, and the extents that start a run."""
    total = len(seen.states)
    owned = np.zeros(total, dtype=np.int64)
    heads = np.flatnonzero(seen.states != ExtentState.FREE)
    covered = np.zeros(len(heads), dtype=np.int64)
    chains, firsts = np.arange(len(heads)), heads
    starts = [firsts]
    while len(firsts):
        counts = seen.run_counts[firsts].astype(np.int64)
        broken = (counts == 0) | (firsts + counts > total)
        for chain in chains[broken].tolist():
            findings.add(
                Kind.OWNERSHIP,
                extent_name(seen.segment, int(heads[chain])),
                "begins a chain that leads to an extent where no run starts",
            )
        chains, firsts, counts = chains[~broken], firsts[~broken], counts[~broken]
        owned += np.bincount(_expand(firsts, counts), minlength=total)
        covered[chains] += counts
        following = seen.run_nexts[firsts].astype(np.int64)
        # A chain that has all its extents and still goes on may go round in a circle.
        going = (following != NO_LINK) & (covered[chains] < seen.extent_counts[heads[chains]])
        going &= following < total
        chains, firsts = chains[going], following[going]
        starts.append(firsts)
    for chain in np.flatnonzero(covered != seen.extent_counts[heads]).tolist():
        findings.add(
            Kind.OWNERSHIP,
            extent_name(seen.segment, int(heads[chain])),
            f"has {int(seen.extent_counts[heads[chain]])} extents, but its runs cover {int(covered[chain])}",
        )
    return owned, np.concatenate(starts)


def _expand(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """All extents of runs, one after another."""
    ends = np.cumsum(counts)
    steps = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    expanded: NDArray[np.int64] = steps + np.repeat(firsts - (ends - counts), counts)
    return expanded


def _compare_owners(seen: _Seen, owned: NDArray[np.int64], findings: Findings) -> None:
    entered = np.arange(len(owned)) < seen.entered
    for what, wrong in (
        ("is free and belongs to an object at the same time", seen.free & (owned > 0)),
        ("belongs to two objects", owned > 1),
        ("belongs to nobody and is not free", entered & ~seen.free & (owned == 0)),
    ):
        for extent in np.flatnonzero(wrong).tolist():
            findings.add(Kind.OWNERSHIP, extent_name(seen.segment, extent), what)


def _compare_links(seen: _Seen, starts: NDArray[np.int64], findings: Findings) -> None:
    adopted = seen.limbo_heads - seen.revoked_heads
    wrong = (seen.links["count"][starts] != seen.run_counts[starts]) | (
        seen.links["next"][starts] != seen.run_nexts[starts]
    )
    for extent in sorted(set(starts[wrong].tolist()) - adopted):
        findings.add(
            Kind.LINKS,
            extent_name(seen.segment, extent),
            f"starts a run of {int(seen.links['count'][extent])} extents in the file and of "
            f"{int(seen.run_counts[extent])} in memory, or goes on elsewhere",
        )


def _compare_sums(seen: _Seen, findings: Findings) -> None:
    subject = f"Segment {seen.segment}"
    for state in ExtentState:
        counted = (
            int(np.count_nonzero(seen.free))
            if state is ExtentState.FREE
            else int(seen.extent_counts[seen.states == state].sum())
        )
        if counted != seen.by_state[state]:
            findings.add(
                Kind.ACCOUNTING,
                subject,
                f"accounts {seen.by_state[state]} extents as {state.name}, but {counted} are",
            )
    if sum(seen.by_state) != seen.populated:
        findings.add(
            Kind.ACCOUNTING,
            subject,
            f"has {seen.populated} populated extents, but {sum(seen.by_state)} are accounted for",
        )
    if seen.free_extents != seen.by_state[ExtentState.FREE]:
        findings.add(
            Kind.ACCOUNTING,
            subject,
            f"can hand out {seen.free_extents} extents, but {seen.by_state[ExtentState.FREE]} are accounted as free",
        )


def _compare_heads(seen: _Seen, findings: Findings) -> None:
    """What reservations, limbo and doomed entries name must be the extents in those states, no more and no less."""
    for kind, state, named, whose in (
        (Kind.RESERVATION, ExtentState.RESERVED, seen.reserved_heads, "live reservation"),
        (Kind.LIMBO, ExtentState.LIMBO, seen.limbo_heads, "writer"),
        (Kind.ENTRY, ExtentState.DRAINING, seen.draining_heads, "entry that a lease still reads"),
    ):
        found = set(np.flatnonzero(seen.states == state).tolist())
        for extent in sorted(found - named):
            findings.add(kind, extent_name(seen.segment, extent), f"is {state.name}, but no {whose} has it")
        for extent in sorted(named - found):
            findings.add(
                kind,
                extent_name(seen.segment, extent),
                f"is named by a {whose}, but is {ExtentState(seen.states[extent]).name}",
            )
    for extent in sorted(seen.revoked_heads - seen.limbo_heads):
        findings.add(
            Kind.LIMBO,
            extent_name(seen.segment, extent),
            "belongs to a revoked reservation, but is not in its writer's limbo",
        )
