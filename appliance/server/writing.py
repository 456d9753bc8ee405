"""Reserve, commit, abort: the write path."""

from __future__ import annotations

import numpy as np

from appliance.errors import InvalidField, ShuttingDown
from appliance.geometry import GroupKind
from appliance.hashing import split_keys
from appliance.l1.index import NamespaceIndex
from appliance.l1.store import Wanted
from appliance.protocol.messages import Abort, AbortResult, Commit, CommitResult, Reserve, ReserveResult
from appliance.reservations import Reservation, ReservationState
from appliance.server.answers import Answer
from appliance.server.core import Core, Phase
from appliance.server.reading import check_groups
from appliance.sessions import Session


def reserve(core: Core, session: Session, args: Reserve) -> Answer:
    """Memory for objects of the worker's own shards."""
    engine, attachment = core.attachment(session)
    index = core.settled(engine)
    if core.phase is Phase.DRAINING:
        raise ShuttingDown("The daemon is stopping and takes no new objects.")
    check_groups(index, args.groups)
    keys, parents = split_keys(args.keys), split_keys(args.parents)
    salt = args.salt.ljust(16, b"\0")
    ttl = core.ttls.get("write_ttl_seconds", index.namespace.hex())
    grants: list[int] = []
    granted: list[Reservation | None] = []
    for position, group in enumerate(args.groups):
        if not attachment.groups[group].held:
            raise InvalidField(
                f"This rank has no layer of group {group}, so it has nothing to store of it.", field="groups"
            )
        wanted = Wanted(
            key=keys[position],
            parent=parents[position],
            chunk_index=args.chunks[position],
            group=group,
            shard=attachment.groups[group].shard,
            length=args.lengths[position],
            salt=salt,
            attach_id=session.attach_id,
        )
        grant, reservation = core.reservations.reserve(
            session.session_id, engine.engine_id, index, wanted, ttl
        )
        grants.append(int(grant))
        granted.append(reservation)
        core.counters[f"reserve_{grant.name.lower()}"] += 1
    return Answer(_granted(grants, granted), undo=lambda: _undo(core, granted))


def _undo(core: Core, granted: list[Reservation | None]) -> None:
    for reservation in granted:
        if reservation is not None:
            core.reservations.end(reservation.reservation_id, ReservationState.UNDELIVERED)


def _granted(grants: list[int], granted: list[Reservation | None]) -> ReserveResult:
    ids, segments, words, run_counts = [], [], [], []
    runs: list[tuple[int, int]] = []
    for reservation in granted:
        if reservation is None:
            ids.append(0)
            segments.append(0)
            words.append(0)
            run_counts.append(0)
            continue
        placement = reservation.reserved.placement
        ids.append(reservation.reservation_id)
        segments.append(placement.segment)
        words.append(placement.generation << 1)
        run_counts.append(len(placement.runs))
        runs.extend(placement.runs)
    return ReserveResult(
        grants=grants,
        reservations=ids,
        segments=segments,
        words=words,
        run_counts=run_counts,
        runs=np.array(runs, dtype="<u4").tobytes(),
    )


def commit(core: Core, session: Session, args: Commit) -> Answer:
    """The bytes of these reservations are in place. One that has ended is refused; its writer has now stopped."""
    engine, _ = core.attachment(session)
    done: list[Reservation] = []
    refused: list[int] = []
    for reservation_id, checksum in zip(args.reservations, args.checksums, strict=True):
        reservation = core.reservations.commit(session.session_id, reservation_id, checksum)
        if reservation is None:
            core.reservations.stopped(session.attach_id, reservation_id)
            refused.append(reservation_id)
            continue
        done.append(reservation)
        engine.counts.bytes_stored += reservation.reserved.record.length
    engine.counts.objects_stored += len(done)
    core.counters["objects_stored"] += len(done)
    core.counters["bytes_stored"] += sum(each.reserved.record.length for each in done)
    core.counters["commits_refused"] += len(refused)
    _touch(core, done)
    return Answer(CommitResult(committed=len(done), refused=refused))


def _touch(core: Core, done: list[Reservation]) -> None:
    """What was just stored is recent, and so is the chain it stands on."""
    if not done:
        return
    index: NamespaceIndex = done[0].reserved.index
    fresh = [each for each in done if each.reserved.index is index]
    fresh.sort(key=lambda each: -each.reserved.record.chunk_index)
    others = [
        index.entry(each.reserved.row, each.reserved.record.group)
        for each in fresh
        if index.groups[each.reserved.record.group].kind is not GroupKind.ATTENTION
    ]
    rows = {each.reserved.row for each in fresh}
    tips = [row for row in rows if not any(child in rows for child in index.children(row))]
    for tip in tips:
        core.store.touch_chain(index, tip, np.array(sorted(set(others)), dtype=np.int64))


def abort(core: Core, session: Session, args: Abort) -> Answer:
    """The copies of these reservations have stopped and nothing will come of them."""
    core.attachment(session)
    aborted = 0
    for reservation_id in args.reservations:
        if core.reservations.owned_by(session.session_id, reservation_id):
            aborted += core.reservations.end(reservation_id, ReservationState.ABORTED)
        else:
            core.reservations.stopped(session.attach_id, reservation_id)
    return Answer(AbortResult(aborted=aborted))
