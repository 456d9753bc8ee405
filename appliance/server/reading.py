"""Lookup, locate, release, loads: the read path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from appliance.engines import Engine
from appliance.errors import InvalidField, LeaseEnded, UnknownLease
from appliance.hashing import split_keys
from appliance.l1.eviction import Prompt
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Removal
from appliance.leases import LeaseState
from appliance.lookup import Outcome, entries_of, find, presence_of
from appliance.protocol.base import LoadFailure, MissReason, Role, Transport
from appliance.protocol.messages import (
    Done,
    Loads,
    Locate,
    LocateResult,
    Lookup,
    LookupResult,
    Release,
    ReleaseResult,
)
from appliance.server.answers import Answer
from appliance.server.core import Core, Phase, require_role
from appliance.sessions import Session
from appliance.tickets import ReadTicket


def lookup(core: Core, session: Session, args: Lookup) -> Answer:
    """The longest hit of a prompt, and a lease on exactly its objects."""
    require_role(session, Role.SCHEDULER)
    engine = core.engine_of(session)
    engine.counts.lookups += 1
    engine.counts.asked_tokens += args.prompt_tokens
    index = engine.index
    if index is None or core.phase is Phase.DRAINING:
        reason = MissReason.REGISTERING
        core.miss_reasons[reason.value] += 1
        detail = "The daemon is stopping." if index is not None else engine.reason
        return Answer(LookupResult(hit_chunks=0, reason=reason, detail=detail, settled=False))
    keys = split_keys(args.keys)
    found = find(index, core.store.ghosts, keys, args.prompt_tokens, args.refused_chunks)
    found = _refused_elsewhere(core, engine, index, keys, found)
    if found.reason is not None:
        core.miss_reasons[found.reason.value] += 1
    hit, attention = found.reach.hit, found.reach.attention
    entries = entries_of(index, found.rows, hit)
    touched = _touch_order(index, found, entries)
    core.store.touch(index, touched)
    lease = 0
    if hit * index.chunk_tokens > args.local_tokens:
        engine.counts.hit_tokens += hit * index.chunk_tokens - args.local_tokens
        ttl = core.ttls.get("read_lease_ttl_seconds", index.namespace.hex())
        lease = core.leases.grant(
            session.session_id, engine.engine_id, args.request, index, hit, entries, ttl
        ).lease_id
        core.retention.read(index, entries)
    prompt = Prompt(keys, found.rows, hit, attention)
    wishes = core.asked.wishes(session.session_id, args.request, lambda: _came(core, index, prompt))
    result = LookupResult(
        hit_chunks=hit,
        attention_chunks=attention,
        lease=lease,
        snapshots=sorted({boundary for boundary in wishes if boundary > hit}),
        reason=found.reason,
        detail=found.detail,
    )
    return Answer(result, undo=lambda: _undo_lease(core, lease))


def _came(core: Core, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
    """A prompt is seen for the first time: whoever learns from prompts is told."""
    core.retention.asked(index, core.store.ghosts, prompt)
    core.shadows.came(index, prompt.keys)
    return core.store.policy.asked(index, prompt)


def _undo_lease(core: Core, lease: int) -> None:
    if lease:
        core.leases.end(lease, LeaseState.UNDELIVERED)


def _touch_order(index: NamespaceIndex, found: Outcome, entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """What the lookup used, deep before shallow: the hit's entries, and attention as far as it reaches."""
    if found.reach.attention == found.reach.hit or not index.attention:
        return entries
    beyond = found.rows[found.reach.hit : found.reach.attention][::-1, None] * index.group_count
    deeper: NDArray[np.int64] = (beyond + np.array(index.attention, dtype=np.int64)[None, :]).ravel()
    return np.concatenate((deeper, entries))


def _refused_elsewhere(
    core: Core, engine: Engine, index: NamespaceIndex, keys: list[bytes], found: Outcome
) -> Outcome:
    """If what is missing here lies in another namespace of the model, say so: that is the cost of the refusal."""
    if found.reason is not MissReason.NEVER_STORED or engine.fingerprint is None:
        return found
    missing = keys[min(found.reach.attention, len(found.rows) - 1)]
    for other in core.store.by_slot:
        if other is index or other.model != index.model or other.chunk_tokens != index.chunk_tokens:
            continue
        row = other.find(missing)
        if row < 0 or not any(other.is_full(row, group) for group in range(other.group_count)):
            continue
        namespace, theirs = index.namespace.hex(), other.namespace.hex()
        record = core.refusals.get((namespace, theirs)) or core.refusals.get((theirs, namespace))
        if record is not None:
            record.lookups += 1
        fields = [
            d.field for d in core.engines.differences(engine.fingerprint, core.engines.fingerprints[theirs])
        ]
        engines = ", ".join(core.engines.engines_of(theirs)) or "an engine that has gone"
        return Outcome(
            found.reach,
            found.rows,
            MissReason.REFUSED_FINGERPRINT,
            f"Stored by {engines} in namespace {theirs}, which differs in {', '.join(fields)}.",
        )
    return found


def locate(core: Core, session: Session, args: Locate) -> Answer:
    """Where the objects of a worker's own shards lie, under a lease that is held, or held again."""
    engine, attachment = core.attachment(session)
    index = core.settled(engine)
    check_groups(index, args.groups)
    keys = split_keys(args.keys)
    rows = index.rows_of(keys)
    groups = np.array(args.groups, dtype=np.int64)
    chunks = np.array(args.chunks, dtype=np.int64)
    wanted_rows = rows[chunks]
    entries = wanted_rows * index.group_count + groups
    complete = presence_of(index, wanted_rows)[np.arange(len(groups)), groups]
    shards = [attachment.groups[group].shard for group in args.groups]
    lease = core.leases.live.get(args.lease)
    if lease is not None and lease.engine_id != engine.engine_id:
        raise UnknownLease(f"Lease {args.lease} is not of engine '{engine.engine_id}'.")
    if lease is not None and lease.index is not index:
        lease = None  # of the engine's former namespace: it holds nothing here
    if lease is not None:
        complete &= np.isin(entries, lease.entries)
    _check_words(core, index, args, wanted_rows, shards, complete)
    lost = sorted({int(chunk) for chunk in chunks[~complete]})
    if lost:
        raise LeaseEnded(
            f"Of lease {args.lease} the chunks {lost[:16]} are gone; recompute from the deepest local hit.",
            lease=args.lease,
            chunks=lost,
        )
    lease_id, undo = args.lease, lambda: None
    if lease is None:
        ttl = core.ttls.get("read_lease_ttl_seconds", index.namespace.hex())
        restored = core.leases.grant(
            session.session_id,
            engine.engine_id,
            args.request,
            index,
            args.hit_chunks,
            np.unique(entries),
            ttl,
        )
        core.counters["leases_restored"] += 1
        lease_id = restored.lease_id
        undo = lambda: _undo_lease(core, lease_id)  # noqa: E731
    core.located.add(lease_id)
    result = _positions(core, index, wanted_rows, args.groups, shards, lease_id)
    if session.transport is Transport.INLINE:
        _grant_reads(core, session, args, result)
    return Answer(result, undo=undo)


def _grant_reads(core: Core, session: Session, args: Locate, result: LocateResult) -> None:
    """The bulk thread may send these objects to the session, as long as the lease is held."""
    tickets = {}
    pairs = iter(np.frombuffer(result.runs, dtype="<u4").reshape(-1, 2).tolist())
    for position, (group, chunk) in enumerate(zip(args.groups, args.chunks, strict=True)):
        tickets[group, chunk] = ReadTicket(
            segment=core.arena.spaces[result.segments[position]].segment,
            runs=tuple((first, count) for first, count in islice(pairs, result.run_counts[position])),
            length=result.lengths[position],
            word=result.words[position],
        )
    core.tickets.grant_reads(session.session_id, result.lease, tickets)


def check_groups(index: NamespaceIndex, groups: list[int]) -> None:
    """Refuse a group that the engine does not have.

    Raises:
        InvalidField: naming it.
    """
    if groups and max(groups) >= index.group_count:
        raise InvalidField(
            f"Group {max(groups)} does not exist; the engine has {index.group_count}.", field="groups"
        )


def _check_words(
    core: Core,
    index: NamespaceIndex,
    args: Locate,
    rows: NDArray[np.int64],
    shards: list[int],
    complete: NDArray[np.bool_],
) -> None:
    """Objects whose commit word is another than the caller remembers count as lost."""
    for position, word in enumerate(args.words):
        if complete[position] and word:
            address = index.address(int(rows[position]), args.groups[position], shards[position])
            complete[position] = core.arena.word_at(address) == word


def _positions(
    core: Core,
    index: NamespaceIndex,
    rows: NDArray[np.int64],
    groups: list[int],
    shards: list[int],
    lease: int,
) -> LocateResult:
    segments, words, lengths, checksums, run_counts = [], [], [], [], []
    runs: list[tuple[int, int]] = []
    for row, group, shard in zip(rows.tolist(), groups, shards, strict=True):
        segment, word, length, checksum, found = core.arena.describe(index.address(row, group, shard))
        segments.append(segment)
        words.append(word)
        lengths.append(length)
        checksums.append(checksum)
        run_counts.append(len(found))
        runs.extend(found)
    packed = np.array(runs, dtype="<u4").tobytes()
    return LocateResult(
        lease=lease,
        segments=segments,
        words=words,
        lengths=lengths,
        checksums=checksums,
        run_counts=run_counts,
        runs=packed,
    )


def release(core: Core, session: Session, args: Release) -> Answer:
    """End leases of this session; twice harms nobody."""
    released = 0
    for lease_id in args.leases:
        lease = core.leases.live.get(lease_id)
        if lease is not None and lease.session == session.session_id:
            released += core.leases.end(lease_id, LeaseState.RELEASED)
            core.located.discard(lease_id)
    return Answer(ReleaseResult(released=released))


def loads(core: Core, session: Session, args: Loads) -> Answer:
    """A worker's account of one load."""
    engine, attachment = core.attachment(session)
    if engine.index is not None:
        check_groups(engine.index, [failed.group for failed in args.failed])
    core.located.discard(args.lease)
    core.tickets.withdraw_reads(session.session_id, args.lease)
    engine.counts.loads += 1
    engine.counts.bytes_loaded += args.bytes_loaded
    core.counters["objects_loaded"] += args.objects
    core.counters["bytes_loaded"] += args.bytes_loaded
    if args.failed:
        engine.counts.load_failures += 1
    for failed in args.failed:
        core.counters[f"load_failures_{failed.cause.value}"] += 1
        if failed.cause is LoadFailure.CHECKSUM and engine.index is not None:
            shard = attachment.groups[failed.group].shard
            _quarantine(core, engine.index, failed.key, failed.group, shard, failed.word)
    return Answer(Done())


def _quarantine(core: Core, index: NamespaceIndex, key: bytes, group: int, shard: int, word: int) -> None:
    """Take an object out whose bytes are not what was stored, if it is still that very object."""
    row = index.find(key)
    address = index.address(row, group, shard) if row >= 0 else -1
    if address >= 0 and core.arena.word_at(address) == word:
        core.store.remove(index, row, group, Removal.QUARANTINED)
        core.counters["quarantined"] += 1
