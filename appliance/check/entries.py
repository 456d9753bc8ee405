"""Rows and entries of each index against each other, the arena, and the eviction policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.check.findings import Findings, Kind, entry_name
from appliance.check.looks import Looks
from appliance.l1.index import NamespaceIndex
from appliance.l1.space import ExtentState, split_address
from appliance.l1.store import Store
from appliance.protocol import arena_layout as layout

OBJECTS_A_LOOK = 512


@dataclass(frozen=True, slots=True)
class _Objects:
    """What the arena and its file say of the addresses of some rows; columns of equal length."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    states: NDArray[np.uint8]
    words: NDArray[np.uint64]
    extent_counts: NDArray[np.uint32]
    records: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Some rows of one index at one moment. Entry columns are (rows, groups), addresses (rows, objects of a row)."""

    index: NamespaceIndex
    first: int
    keys: list[bytes]
    mapped: NDArray[np.bool_]
    found: NDArray[np.int64]
    chunk_index: NDArray[np.uint32]
    present: NDArray[np.uint64]
    pending: NDArray[np.uint64]
    doomed: NDArray[np.uint64]
    holds: NDArray[np.int32]
    extents: NDArray[np.uint32]
    evictable: NDArray[np.bool_]
    addresses: NDArray[np.int64]
    objects: _Objects

    def name(self, row: int, group: int) -> str:
        return entry_name(self.index.namespace, self.keys[row], group)


def check_entries(store: Store, looks: Looks, findings: Findings) -> None:
    """Every row of every namespace, a few at a time; rows made meanwhile are looked at too."""
    for index in looks.take(lambda: list(store.by_slot)):
        step = max(1, OBJECTS_A_LOOK // index.objects_per_row)
        first = 0
        while first < looks.take(lambda index=index: index.rows_made):  # type: ignore[misc]
            seen = looks.take(partial(_look, store, index, first, step))
            _compare_rows(seen, findings)
            _compare_masks(seen, findings)
            _compare_objects(seen, findings)
            first += step


def _look(store: Store, index: NamespaceIndex, first: int, step: int) -> _Seen:
    last = min(first + step, index.rows_made)
    groups = index.group_count
    some = slice(first * groups, last * groups)
    keys = [index.key_of(row) for row in range(first, last)]
    present = index.present.array[some].reshape(-1, groups).copy()
    entries = first * groups + np.flatnonzero(present)
    evictable = np.ones(present.shape, dtype=np.bool_)
    evictable.ravel()[entries - first * groups] = store.policy.covers(index, entries)
    addresses = index.addresses_of_rows(first, last)
    return _Seen(
        index=index,
        first=first,
        keys=keys,
        mapped=index.mapped_rows(first, last),
        found=np.array([index.find(key) for key in keys], dtype=np.int64),
        chunk_index=index.chunk_index.array[first:last].copy(),
        present=present,
        pending=index.pending.array[some].reshape(-1, groups).copy(),
        doomed=index.doomed.array[some].reshape(-1, groups).copy(),
        holds=index.holds.array[some].reshape(-1, groups).copy(),
        extents=index.extents.array[some].reshape(-1, groups).copy(),
        evictable=evictable,
        addresses=addresses,
        objects=_look_at_objects(store, addresses),
    )


def _look_at_objects(store: Store, addresses: NDArray[np.int64]) -> _Objects:
    rows, columns = np.nonzero(addresses >= 0)
    states, words, counts, raw = [], [], [], []
    for address in addresses[rows, columns].tolist():
        segment, extent = split_address(address)
        space = store.arena.spaces[segment]
        states.append(space.states[extent])
        words.append(store.arena.word_at(address))
        counts.append(space.extent_counts[extent])
        raw.append(space.segment.read_record(extent))
    return _Objects(
        rows=rows,
        columns=columns,
        states=np.array(states, dtype=np.uint8),
        words=np.array(words, dtype=np.uint64),
        extent_counts=np.array(counts, dtype=np.uint32),
        records=np.frombuffer(b"".join(raw), dtype=layout.RECORD),
    )


def _compare_rows(seen: _Seen, findings: Findings) -> None:
    findings.checked["chunks"] += int(np.count_nonzero(seen.mapped))
    for at in np.flatnonzero(seen.mapped & (seen.found != seen.first + np.arange(len(seen.keys)))).tolist():
        findings.add(
            Kind.ROW,
            f"Row {seen.first + at} of namespace {seen.index.namespace.hex()}",
            f"has the key {seen.keys[at].hex()[:16]}, which leads to row {int(seen.found[at])}",
        )
    unreachable = ~seen.mapped & ((seen.present | seen.pending).max(axis=1, initial=0) > 0)
    for at in np.flatnonzero(unreachable).tolist():
        findings.add(
            Kind.ROW,
            f"Row {seen.first + at} of namespace {seen.index.namespace.hex()}",
            "holds objects or reservations, but no key leads to it",
        )


def _compare_masks(seen: _Seen, findings: Findings) -> None:
    full = seen.index.full_masks[None, :]
    overlap = (seen.present & seen.pending) | (seen.present & seen.doomed) | (seen.pending & seen.doomed)
    stray = (seen.present | seen.pending | seen.doomed) & ~full
    for wrong, what in (
        (overlap != 0, "has a shard that is committed, reserved or draining at the same time"),
        (stray != 0, "has a shard that its group does not have"),
        (
            (seen.doomed != 0) & (seen.holds <= 0),
            "left the cache and nobody holds it, yet its memory is not free",
        ),
        (seen.holds < 0, "is held by fewer than no leases"),
    ):
        for row, group in np.argwhere(wrong).tolist():
            findings.add(Kind.ENTRY, seen.name(row, group), what)
    for row, group in np.argwhere(~seen.evictable).tolist():
        findings.add(
            Kind.EVICTION, seen.name(row, group), "is cached, but the eviction policy can never offer it"
        )


def _bits(seen: _Seen, masks: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(rows, groups) masks as (rows, objects of a row)."""
    groups, shards = seen.index.object_columns
    bits: NDArray[np.bool_] = (masks[:, groups] >> shards.astype(np.uint64)) & np.uint64(1) == 1
    return bits


def _compare_objects(seen: _Seen, findings: Findings) -> None:
    groups, _ = seen.index.object_columns
    present, doomed = _bits(seen, seen.present), _bits(seen, seen.doomed)
    has = seen.addresses >= 0
    for row, column in np.argwhere((present | doomed) & ~has).tolist():
        findings.add(Kind.ENTRY, seen.name(row, int(groups[column])), "is there, but has no address")
    for row, column in np.argwhere(has & ~(present | doomed)).tolist():
        findings.add(Kind.ENTRY, seen.name(row, int(groups[column])), "has an address, but nothing is there")
    _compare_arena(seen, present, doomed, findings)
    _compare_extents(seen, present, findings)


def _compare_arena(
    seen: _Seen, present: NDArray[np.bool_], doomed: NDArray[np.bool_], findings: Findings
) -> None:
    objects = seen.objects
    if not len(objects.rows):
        return
    groups, shards = seen.index.object_columns
    rows, columns = objects.rows, objects.columns
    keys = np.frombuffer(b"".join(seen.keys), dtype="V32")
    is_present, is_doomed = present[rows, columns], doomed[rows, columns]
    records = objects.records
    namespace = np.frombuffer(seen.index.namespace, dtype="V16")[0]
    checks: tuple[tuple[Any, str], ...] = (
        (is_present & (objects.states != ExtentState.OCCUPIED), "is offered, but its memory is {state}"),
        (is_doomed & (objects.states != ExtentState.DRAINING), "is draining, but its memory is {state}"),
        (is_present & (records["commit_word"] & 1 == 0), "is offered, but was never committed in the file"),
        (records["commit_word"] != objects.words, "has another generation in the file than in memory"),
        (records["key"] != keys[rows], "lies where the file has another chunk"),
        (records["namespace"] != namespace, "lies where the file has another namespace's object"),
        (records["group"] != groups[columns], "lies where the file has another group's object"),
        (records["shard"] != shards[columns], "lies where the file has another shard"),
        (
            is_present & (records["chunk_index"] != seen.chunk_index[rows]),
            "has another position in its prompt in the file",
        ),
    )
    for wrong, what in checks:
        for at in np.flatnonzero(wrong).tolist():
            group, shard = int(groups[columns[at]]), int(shards[columns[at]])
            sentence = what.format(state=ExtentState(objects.states[at]).name)
            findings.add(Kind.OBJECT, f"{seen.name(int(rows[at]), group)}, shard {shard}", sentence)


def _compare_extents(seen: _Seen, present: NDArray[np.bool_], findings: Findings) -> None:
    objects = seen.objects
    groups, _ = seen.index.object_columns
    counted = np.zeros(seen.extents.shape, dtype=np.int64)
    mine = present[objects.rows, objects.columns]
    np.add.at(
        counted,
        (objects.rows[mine], groups[objects.columns[mine]]),
        objects.extent_counts[mine].astype(np.int64),
    )
    for row, group in np.argwhere(counted != seen.extents).tolist():
        findings.add(
            Kind.ENTRY,
            seen.name(row, group),
            f"is said to take {int(seen.extents[row, group])} extents, but its objects take {int(counted[row, group])}",
        )
