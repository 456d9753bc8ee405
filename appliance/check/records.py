"""Head records of the files against the daemon's columns, and committed objects against the index."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.check.findings import Findings, Kind, extent_name
from appliance.check.looks import Looks
from appliance.l1.arena import Arena
from appliance.l1.index import NamespaceIndex
from appliance.l1.space import ExtentState, SegmentSpace, address_of
from appliance.l1.store import Store
from appliance.protocol import arena_layout as layout

EXTENTS_A_LOOK = 512
_NOT_INDEXED = -1
_WRITING = (ExtentState.RESERVED, ExtentState.LIMBO)
_COMMITTED = (ExtentState.OCCUPIED, ExtentState.DRAINING)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Extents ``first ..`` of one segment at one moment: columns, records of the file, and what the index says."""

    segment: int
    first: int
    states: NDArray[np.uint8]
    generations: NDArray[np.uint64]
    extent_counts: NDArray[np.uint32]
    lengths: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    records: NDArray[np.void]
    adopted: NDArray[np.bool_]
    indexed_at: NDArray[np.int64]
    clear_epochs: NDArray[np.int64]

    def name(self, position: int) -> str:
        return extent_name(self.segment, self.first + position)


def check_records(store: Store, looks: Looks, findings: Findings) -> None:
    """Every record of every segment, a few at a time."""
    for space in store.arena.spaces:
        for first in range(0, space.segment.shape.extent_count, EXTENTS_A_LOOK):
            seen = looks.take(partial(_look, store, space, first))
            _compare(seen, findings)


def _look(store: Store, space: SegmentSpace, first: int) -> _Seen:
    count = min(EXTENTS_A_LOOK, space.segment.shape.extent_count - first)
    some = slice(first, first + count)
    records = space.segment.read_records(first, count)
    states = np.array(space.states[some], dtype=np.uint8)
    lengths = np.array(space.lengths[some], dtype=np.uint64)
    indexed_at = np.full(count, _NOT_INDEXED, dtype=np.int64)
    epochs = np.zeros(count, dtype=np.int64)
    by_name = {index.namespace: index for index in store.by_slot}
    occupied = np.flatnonzero(states == ExtentState.OCCUPIED)
    for position, place in zip(occupied.tolist(), _places(records[occupied]), strict=True):
        indexed_at[position], epochs[position] = _find(store.arena, by_name, *place)
    return _Seen(
        segment=space.segment.index,
        first=first,
        states=states,
        generations=np.array(space.generations[some], dtype=np.uint64),
        extent_counts=np.array(space.extent_counts[some], dtype=np.uint32),
        lengths=lengths,
        checksums=np.array(space.checksums[some], dtype=np.uint64),
        records=records,
        # Limbo of an earlier boot: memory knows its extents only, its record is that of the earlier boot.
        adopted=(states == ExtentState.LIMBO) & (lengths == 0),
        indexed_at=indexed_at,
        clear_epochs=epochs,
    )


def _places(records: NDArray[np.void]) -> Iterator[tuple[bytes, bytes, int, int]]:
    """Namespace, key, group and shard of records; whole columns at once, since this runs on the loop."""
    namespaces, keys = records["namespace"].tobytes(), records["key"].tobytes()
    groups, shards = records["group"].tolist(), records["shard"].tolist()
    for at, (group, shard) in enumerate(zip(groups, shards, strict=True)):
        yield namespaces[at * 16 : at * 16 + 16], keys[at * 32 : at * 32 + 32], group, shard


def _find(
    arena: Arena,
    by_name: Mapping[bytes, NamespaceIndex],
    namespace: bytes,
    key: bytes,
    group: int,
    shard: int,
) -> tuple[int, int]:
    """Where the index has an object, and the clear epoch that it must have."""
    index = by_name.get(namespace)
    epoch = arena.clear_epoch_of(namespace)
    row = index.find(key) if index is not None else -1
    if index is None or row < 0 or group >= index.group_count or shard >= index.groups[group].shards:
        return _NOT_INDEXED, epoch
    if not index.present.view[index.entry(row, group)] >> shard & 1:
        return _NOT_INDEXED, epoch
    return index.address(row, group, shard), epoch


def _compare(seen: _Seen, findings: Findings) -> None:
    records, states = seen.records, seen.states
    findings.checked["extents"] += len(records)
    committed = np.isin(states, [int(state) for state in _COMMITTED])
    writing = np.isin(states, [int(state) for state in _WRITING])
    words = (seen.generations << np.uint64(1)) | committed.astype(np.uint64)
    for at in np.flatnonzero(records["commit_word"] != words).tolist():
        findings.add(
            Kind.RECORD,
            seen.name(at),
            f"is {ExtentState(states[at]).name} in memory but its commit word in the file is "
            f"{int(records['commit_word'][at]):#x} instead of {int(words[at]):#x}",
        )
    draining = states == ExtentState.DRAINING
    expected_states = np.where(committed, layout.STATE_COMMITTED, layout.STATE_WRITING)
    expected_states[draining] = layout.STATE_DOOMED
    wrong_state = (committed | writing) & (records["state"] != expected_states)
    wrong_state |= (states == ExtentState.FREE) & (records["state"] == layout.STATE_WRITING)
    for at in np.flatnonzero(wrong_state).tolist():
        findings.add(
            Kind.RECORD,
            seen.name(at),
            f"is {ExtentState(states[at]).name} in memory but its record has state {int(records['state'][at])}",
        )
    known = (committed | writing) & ~seen.adopted
    _compare_column(seen, known, "extent_count", seen.extent_counts, findings)
    _compare_column(seen, known, "length", seen.lengths, findings)
    _compare_column(seen, committed, "checksum", seen.checksums, findings)
    _compare_sums(seen, np.flatnonzero(known & ~draining).tolist(), findings)
    _compare_index(seen, findings)


def _compare_column(
    seen: _Seen, where: NDArray[np.bool_], field: str, expected: NDArray[Any], findings: Findings
) -> None:
    for at in np.flatnonzero(where & (seen.records[field] != expected)).tolist():
        findings.add(
            Kind.RECORD,
            seen.name(at),
            f"has {field} {int(seen.records[field][at])} in the file and {int(expected[at])} in memory",
        )


def _compare_sums(seen: _Seen, positions: list[int], findings: Findings) -> None:
    for at in positions:
        raw = seen.records[at].tobytes()
        if zlib.crc32(raw[layout.CRC_BEGIN : layout.CRC_END]) != int(seen.records["crc"][at]):
            findings.add(
                Kind.RECORD, seen.name(at), "has a record whose CRC does not fit: a restart would drop it"
            )


def _compare_index(seen: _Seen, findings: Findings) -> None:
    occupied = seen.states == ExtentState.OCCUPIED
    own = address_of(seen.segment, seen.first) + np.arange(len(seen.states))
    findings.checked["objects"] += int(np.count_nonzero(occupied))
    for at in np.flatnonzero(occupied & (seen.indexed_at != own)).tolist():
        record = seen.records[at]
        what = "no key of the index leads to it" if seen.indexed_at[at] < 0 else "the index has it elsewhere"
        findings.add(
            Kind.UNINDEXED,
            seen.name(at),
            f"holds chunk {record['key'].tobytes().hex()[:16]}, group {int(record['group'])}, "
            f"shard {int(record['shard'])}, but {what}",
        )
    for at in np.flatnonzero(occupied & (seen.records["clear_epoch"] < seen.clear_epochs)).tolist():
        findings.add(
            Kind.CLEARED,
            seen.name(at),
            f"holds an object of clear epoch {int(seen.records['clear_epoch'][at])}, but its namespace was cleared in "
            f"epoch {int(seen.clear_epochs[at])}",
        )
