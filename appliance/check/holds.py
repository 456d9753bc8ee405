"""Group totals, leases and reservations, counted again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from appliance.check.findings import Findings, Kind, entry_name
from appliance.check.looks import Looks
from appliance.l1.index import NamespaceIndex
from appliance.l1.store import Store
from appliance.leases import LeaseTable
from appliance.reservations import ReservationTable
from appliance.sessions import SessionTable


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a namespace stores at one moment; entry columns are (rows, groups)."""

    present: NDArray[np.uint64]
    extents: NDArray[np.uint32]
    objects: list[int]
    total_extents: list[int]
    mapped: NDArray[np.bool_]
    free_rows: list[int]
    lingering: int
    row_count: int
    key_count: int


@dataclass(frozen=True, slots=True)
class _Held:
    """What a namespace holds at one moment."""

    holds: NDArray[np.int32]
    pending: NDArray[np.uint64]
    extents: NDArray[np.uint32]
    leased: list[int]
    reserved: list[int]
    leases: list[NDArray[np.int64]]
    reservations: list[tuple[int, int, int, int, int]]


def check_totals(
    store: Store, leases: LeaseTable, reservations: ReservationTable, looks: Looks, findings: Findings
) -> None:
    """Two looks a namespace; what is counted again is counted on copies."""
    for index in looks.take(lambda: list(store.by_slot)):
        _compare_stored(index, looks.take(partial(_look_stored, index)), findings)
        _compare_held(index, looks.take(partial(_look_held, index, leases, reservations)), findings)


def _look_stored(index: NamespaceIndex) -> _Stored:
    made, groups = index.rows_made, index.group_count
    used = slice(0, made * groups)
    present = index.present.array[used].reshape(-1, groups).copy()
    mapped = index.mapped_rows(0, made)
    busy = (index.doomed.array[used] != 0) | (index.holds.array[used] != 0) | (index.pending.array[used] != 0)
    busy_rows = busy.reshape(-1, groups).any(axis=1) | (present != 0).any(axis=1)
    return _Stored(
        present=present,
        extents=index.extents.array[used].reshape(-1, groups).copy(),
        objects=[totals.objects for totals in index.totals],
        total_extents=[totals.extents for totals in index.totals],
        mapped=mapped,
        free_rows=index.free_rows(),
        lingering=int(np.count_nonzero(busy_rows & ~mapped)),
        row_count=index.row_count,
        key_count=index.key_count,
    )


def _compare_stored(index: NamespaceIndex, seen: _Stored, findings: Findings) -> None:
    for group, facts in enumerate(index.groups):
        column = seen.present[:, group]
        objects = sum(
            int(np.count_nonzero(column >> np.uint64(shard) & np.uint64(1))) for shard in range(facts.shards)
        )
        extents = int(seen.extents[:, group].sum())
        _differ(index, group, "objects", seen.objects[group], objects, findings)
        _differ(index, group, "extents", seen.total_extents[group], extents, findings)
    subject = f"Namespace {index.namespace.hex()}"
    mapped = int(np.count_nonzero(seen.mapped))
    if not mapped == seen.row_count == seen.key_count:
        findings.add(
            Kind.ROW,
            subject,
            f"counts {seen.row_count} chunks, has {seen.key_count} keys and {mapped} rows with a key",
        )
    free = set(seen.free_rows)
    if len(free) != len(seen.free_rows):
        findings.add(Kind.ROW, subject, "has a row that is free twice")
    for row in sorted(row for row in free if seen.mapped[row])[:16]:
        findings.add(
            Kind.ROW, f"Row {row} of namespace {index.namespace.hex()}", "is free, but a key leads to it"
        )
    accounted = mapped + len(free) + seen.lingering
    if accounted != len(seen.mapped):
        findings.add(
            Kind.ROW, subject, f"has made {len(seen.mapped)} rows, but {accounted} are in use or free"
        )


def _differ(
    index: NamespaceIndex, group: int, what: str, said: int, counted: int, findings: Findings
) -> None:
    if said != counted:
        subject = f"Group {group} ({index.groups[group].name}) of namespace {index.namespace.hex()}"
        findings.add(Kind.TOTALS, subject, f"says it has {said} {what}, but {counted} are there")


def _look_held(index: NamespaceIndex, leases: LeaseTable, reservations: ReservationTable) -> _Held:
    groups = index.group_count
    used = slice(0, index.rows_made * groups)
    return _Held(
        holds=index.holds.array[used].copy(),
        pending=index.pending.array[used].copy(),
        extents=index.extents.array[used].copy(),
        leased=[totals.leased_extents for totals in index.totals],
        reserved=[totals.reserved_extents for totals in index.totals],
        leases=[lease.entries for lease in leases.live.values() if lease.index is index],
        reservations=[
            (each.reservation_id, r.row, r.record.group, r.record.shard, r.extents)
            for each in reservations.live.values()
            if (r := each.reserved).index is index
        ],
    )


def _compare_held(index: NamespaceIndex, seen: _Held, findings: Findings) -> None:
    counted = np.zeros(len(seen.holds), dtype=np.int32)
    for entries in seen.leases:
        counted[entries] += 1  # the entries of one lease are distinct
    for entry in np.flatnonzero(counted != seen.holds).tolist():
        row, group = divmod(entry, index.group_count)
        findings.add(
            Kind.HOLDS,
            entry_name(index.namespace, index.key_of(row), group),
            f"is held {int(seen.holds[entry])} times, but {int(counted[entry])} live leases name it",
        )
    leased = np.where(seen.holds > 0, seen.extents, 0).reshape(-1, index.group_count)
    reserved: Counter[int] = Counter()
    pending = np.zeros(len(seen.pending), dtype=np.uint64)
    for _, row, group, shard, extents in seen.reservations:
        reserved[group] += extents
        pending[index.entry(row, group)] |= np.uint64(1 << shard)
    for group in range(index.group_count):
        _differ(index, group, "leased extents", seen.leased[group], int(leased[:, group].sum()), findings)
        _differ(index, group, "reserved extents", seen.reserved[group], reserved[group], findings)
    for entry in np.flatnonzero(pending != seen.pending).tolist():
        row, group = divmod(entry, index.group_count)
        findings.add(
            Kind.RESERVATION,
            entry_name(index.namespace, index.key_of(row), group),
            f"is marked as being written for shards {int(seen.pending[entry]):#b}, "
            f"but live reservations are for {int(pending[entry]):#b}",
        )


def check_sessions(
    leases: LeaseTable,
    reservations: ReservationTable,
    sessions: SessionTable,
    looks: Looks,
    findings: Findings,
) -> None:
    """Every hold is of a live session, and an engine's bytes in flight are the sum of its reservations."""
    for kind, subject, sentence in looks.take(partial(_look_sessions, leases, reservations, sessions)):
        findings.add(kind, subject, sentence)


def _look_sessions(
    leases: LeaseTable, reservations: ReservationTable, sessions: SessionTable
) -> list[tuple[Kind, str, str]]:
    found = []
    for name, live, by_session in (
        ("Lease", {each.lease_id: each.session for each in leases.live.values()}, leases.by_session),
        (
            "Reservation",
            {each.reservation_id: each.session for each in reservations.live.values()},
            reservations.by_session,
        ),
    ):
        for number, session in live.items():
            if sessions.get(session) is None:
                found.append(
                    (Kind.SESSION, f"{name} {number}", f"is of session {session.hex()}, which has ended")
                )
            if number not in by_session.get(session, ()):
                found.append((Kind.SESSION, f"{name} {number}", "is not among its session's own"))
        for session, numbers in by_session.items():
            found += [
                (Kind.SESSION, f"{name} {number}", f"is named by session {session.hex()}, but is not live")
                for number in numbers
                if number not in live
            ]
    revoked = [each for writer in reservations.revoked.values() for each in writer.values()]
    extent_bytes = reservations.store.arena.extent_bytes
    for what, said, those in (
        ("reserved", reservations.reserved_bytes, reservations.live.values()),
        ("in limbo", reservations.limbo_bytes, revoked),
    ):
        counted: Counter[str] = Counter()
        for each in those:
            counted[each.engine_id] += each.reserved.extents * extent_bytes
        found += [
            (
                Kind.RESERVATION,
                f"Engine '{engine}'",
                f"is said to have {said[engine]} bytes {what}, but its reservations have {counted[engine]}",
            )
            for engine in said.keys() | counted.keys()
            if said[engine] != counted[engine]
        ]
    return found
