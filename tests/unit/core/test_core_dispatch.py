"""Requests on a real core: what a reply grants, what a retry gets, and what an odd moment must not break."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from appliance.errors import (
    BootChanged,
    CatalogUnavailable,
    LeaseEnded,
    MessageTooLarge,
    NamespaceMismatch,
    NotAttached,
    NotRegistered,
    PagewardenError,
    UnknownSession,
    WrongRole,
)
from appliance.hashing import join_keys
from appliance.protocol.base import Grant, MissReason, Role
from appliance.protocol.wire import Request, pack_request, unpack_reply
from appliance.server.dispatch import Outgoing, Waiting
from appliance.server.membership import end_session, process_died
from appliance.sessions import SessionEnd
from tests.support.core_lockholder import lock_holder
from tests.support.core_store import EXTENT, chain, scratch_directory
from tests.support.core_wire import (
    FACTS,
    Daemon,
    Peer,
    attach_args,
    lookup_args,
    register_args,
    reserve_args,
    store,
)

ATTACH, SECOND, THIRD = 51, 52, 53
KEYS = chain(1, 2, 3)


@pytest.fixture(scope="module")
def locked() -> Iterator[object]:
    directory = scratch_directory()
    with lock_holder(directory, ATTACH, SECOND, THIRD):
        yield directory
    import shutil

    shutil.rmtree(directory)


@pytest.fixture
def daemon(locked, monkeypatch) -> Iterator[Daemon]:
    made = Daemon(locked)
    monkeypatch.setattr("tests.support.core_wire.shutil.rmtree", lambda _: None)
    yield made
    made.close()


def locate_args(lease: int, keys: list[bytes], items: list[tuple[int, int]]) -> dict:
    return {
        "lease": lease,
        "request": "r",
        "hit_chunks": len(keys),
        "keys": join_keys(keys),
        "groups": [group for group, _ in items],
        "chunks": [chunk for _, chunk in items],
    }


ALL = [(0, 0), (0, 1), (0, 2), (1, 2)]


def test_store_look_up_locate_release(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    store(worker, KEYS)
    found = scheduler.ask("lookup", lookup_args(KEYS))
    assert (found["hit_chunks"], found["reason"], found["snapshots"]) == (3, None, [])
    assert daemon.core.leases.live[found["lease"]].bytes_held == 4 * EXTENT
    placed = worker.ask("locate", locate_args(found["lease"], KEYS, ALL))
    assert placed["lease"] == found["lease"]
    assert [word & 1 for word in placed["words"]] == [1] * 4
    runs = np.frombuffer(placed["runs"], dtype="<u4").reshape(-1, 2)
    assert placed["run_counts"] == [1] * 4
    assert len({int(first) for first, _ in runs}) == 4
    assert scheduler.ask("release", {"leases": [found["lease"]]}) == {"released": 1}
    assert scheduler.ask("release", {"leases": [found["lease"]]}) == {"released": 0}
    assert daemon.core.arena.account().occupied == 6 * EXTENT


def test_a_retry_gets_the_same_reply_and_grants_nothing_twice(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    body = worker.body("reserve", reserve_args(KEYS))
    first, second = daemon.reply(body), daemon.reply(body)
    assert first == second
    assert len(daemon.core.reservations.live) == 6
    mine = first.result["reservations"]
    commit = worker.body("commit", {"reservations": mine, "checksums": [0] * 6})
    assert daemon.reply(commit) == daemon.reply(commit)
    assert daemon.core.engines.engines["engine"].counts.objects_stored == 6
    look = scheduler.body("lookup", lookup_args(KEYS))
    assert daemon.reply(look) == daemon.reply(look)
    assert len(daemon.core.leases.live) == 1


def test_an_undelivered_grant_is_taken_back_and_a_retry_gets_no_stale_one(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    body = worker.body("reserve", reserve_args(KEYS))
    lost = daemon.handle(body)
    assert isinstance(lost, Outgoing)
    lost.undo()
    assert daemon.core.arena.account().reserved == 0
    again = daemon.reply(body)
    live = daemon.core.reservations.live
    assert set(again.result["reservations"]) == set(live), "the retry was told of memory that is free"
    daemon.core.reservations.end_session(worker.session)
    daemon.core.reservations.all_stopped(ATTACH)
    store(worker, KEYS)
    body = scheduler.body("lookup", lookup_args(KEYS))
    daemon.handle(body).undo()
    assert daemon.core.leases.live == {}
    assert {daemon.reply(body).result["lease"]} == set(daemon.core.leases.live)


def test_a_reply_too_large_to_send_grants_nothing(daemon):
    """A scattered object asked for again and again: the answer is over the bound of a message."""
    _, worker = daemon.engine(ATTACH)
    singles = [chain(100 + i) for i in range(16)]
    got = [worker.ask("reserve", reserve_args(each, groups=(0,)))["reservations"][0] for each in singles]
    worker.ask("abort", {"reservations": got[::2]})
    [big] = worker.ask("reserve", reserve_args(chain(1), groups=(0,), length=8 * EXTENT))["reservations"]
    worker.ask("commit", {"reservations": [big], "checksums": [0]})
    assert worker.ask("locate", locate_args(9, chain(1), [(0, 0)]))["run_counts"] == [8]
    before = daemon.counts()
    with pytest.raises(MessageTooLarge):
        worker.ask("locate", locate_args(8, chain(1), [(0, 0)] * 65536))
    assert daemon.counts() == before


def test_a_state_that_is_being_stored_at_the_last_boundary(daemon):
    """The lookup that comes between the commits of attention and state."""
    scheduler, worker = daemon.engine(ATTACH)
    store(worker, KEYS, groups=(0,))
    worker.ask("reserve", reserve_args(KEYS, groups=(1,)))
    found = scheduler.ask("lookup", lookup_args(KEYS))
    assert (found["hit_chunks"], found["attention_chunks"]) == (0, 3)
    assert found["reason"] == MissReason.NEVER_STORED
    assert "being stored" in found["detail"]
    assert daemon.core.counters["handler_errors"] == 0


def test_what_another_namespace_has_is_named_with_its_fields(daemon):
    _, worker = daemon.engine(ATTACH, "first")
    store(worker, KEYS)
    scheduler, _ = daemon.engine(
        SECOND, "second", facts={**FACTS, "cache": {"dtype": "fp8", "layout": "NHD"}}
    )
    found = scheduler.ask("lookup", lookup_args(KEYS))
    assert (found["hit_chunks"], found["lease"]) == (0, 0)
    assert found["reason"] == MissReason.REFUSED_FINGERPRINT
    assert "first" in found["detail"]
    assert "cache.dtype" in found["detail"]
    [refusal] = daemon.core.refusals.values()
    assert refusal.lookups == 1


def test_required_namespace(daemon):
    _, _ = daemon.engine(ATTACH, "first")
    wanted = daemon.core.store.by_slot[0].namespace.hex()
    with pytest.raises(NamespaceMismatch) as caught:
        daemon.engine(
            SECOND,
            "second",
            facts={**FACTS, "cache": {"dtype": "fp8", "layout": "HND"}},
            require_namespace=wanted,
        )
    assert caught.value.details["fields"] == ["cache.dtype", "cache.layout"]
    daemon.engine(THIRD, "third", require_namespace=wanted)
    assert daemon.core.engines.engines_of(wanted) == ["first", "third"]


def test_a_lease_that_ended_is_held_again_by_a_locate_if_nothing_was_lost(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    store(worker, KEYS)
    lease = scheduler.ask("lookup", lookup_args(KEYS))["lease"]
    scheduler.ask("release", {"leases": [lease]})
    again = worker.ask("locate", locate_args(lease, KEYS, ALL))
    assert again["lease"] != lease
    assert set(daemon.core.leases.live) == {again["lease"]}
    assert daemon.core.leases.live[again["lease"]].bytes_held == 4 * EXTENT
    daemon.core.store.clear(None)
    with pytest.raises(LeaseEnded) as caught:
        worker.ask("locate", locate_args(lease, KEYS, ALL))
    assert caught.value.details["chunks"] == [0, 1, 2]


def test_a_locate_only_reads_what_its_lease_holds(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    store(worker, KEYS)
    lease = scheduler.ask("lookup", lookup_args(KEYS[:1]))["lease"]
    with pytest.raises(LeaseEnded) as caught:
        worker.ask("locate", locate_args(lease, KEYS, ALL))
    assert caught.value.details["chunks"] == [1, 2]


def test_a_lease_of_another_namespace_covers_nothing_here(daemon):
    """The engine came back with another fingerprint while a lease of its former one is still held."""
    scheduler, worker = daemon.engine(ATTACH)
    store(worker, KEYS)
    old = scheduler.ask("lookup", lookup_args(KEYS))["lease"]
    scheduler.ask("register", register_args(facts={**FACTS, "draft": "other"}))
    store(worker, KEYS)
    try:
        placed = worker.ask("locate", locate_args(old, KEYS, ALL))
    except PagewardenError:
        return
    index = daemon.core.store.by_slot[1]
    held = int(index.holds.array.sum())
    assert held == len(ALL), f"positions were given out under lease {placed['lease']} that holds none of them"


def test_words_that_changed_are_lost(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    store(worker, KEYS)
    lease = scheduler.ask("lookup", lookup_args(KEYS))["lease"]
    words = worker.ask("locate", locate_args(lease, KEYS, ALL))["words"]
    worker.ask("locate", {**locate_args(lease, KEYS, ALL), "words": words})
    with pytest.raises(LeaseEnded) as caught:
        worker.ask("locate", {**locate_args(lease, KEYS, ALL), "words": [words[0], words[1] + 2, *words[2:]]})
    assert caught.value.details["chunks"] == [1]


def test_a_checksum_failure_takes_that_very_object_out_once(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    store(worker, KEYS)
    lease = scheduler.ask("lookup", lookup_args(KEYS))["lease"]
    words = worker.ask("locate", locate_args(lease, KEYS, ALL))["words"]

    def report(word: int, cause: str) -> None:
        failed = [{"group": 0, "chunk": 1, "key": KEYS[1], "word": word, "cause": cause}]
        args = {
            "lease": lease,
            "request": "r",
            "objects": 4,
            "bytes_loaded": 9,
            "seconds": 0.1,
            "failed": failed,
        }
        worker.ask("loads", args)

    report(words[1] + 2, "checksum")
    report(words[1], "timeout")
    assert scheduler.ask("lookup", lookup_args(KEYS))["hit_chunks"] == 3
    report(words[1], "checksum")
    report(words[1], "checksum")
    found = scheduler.ask("lookup", lookup_args(KEYS))
    assert (found["hit_chunks"], found["reason"]) == (1, MissReason.QUARANTINED)
    assert daemon.core.arena.account().draining == EXTENT, "its readers still hold it"


def test_a_commit_after_the_end_is_refused_and_acknowledges(daemon):
    _, worker = daemon.engine(ATTACH)
    mine = worker.ask("reserve", reserve_args(KEYS))["reservations"]
    daemon.core.clock.advance(1e9)
    for _ in range(700):
        daemon.core.clock.advance(daemon.core.clock._last_monotonic + 1.0)
    daemon.core.reservations.expire()
    assert daemon.core.arena.account().limbo == 6 * EXTENT
    assert worker.ask("heartbeat", {})["revoked"] == sorted(mine)
    assert worker.ask("commit", {"reservations": mine[:2], "checksums": [0, 0]}) == {
        "committed": 0,
        "refused": mine[:2],
    }
    assert daemon.core.arena.account().limbo == 4 * EXTENT
    worker.ask("heartbeat", {"stopped": mine[2:4]})
    worker.ask("abort", {"reservations": mine[4:]})
    assert daemon.core.arena.account().free == 64 * EXTENT
    assert worker.ask("heartbeat", {})["revoked"] == []


def test_a_clear_between_reserve_and_commit_wins(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    mine = worker.ask("reserve", reserve_args(KEYS))["reservations"]
    Peer(daemon, Role.ADMIN, "").ask("clear", {})
    assert worker.ask("commit", {"reservations": mine, "checksums": [0] * 6})["refused"] == mine
    assert scheduler.ask("lookup", lookup_args(KEYS))["hit_chunks"] == 0


def test_a_dead_writer_leaves_limbo_only_after_the_grace(daemon):
    _, worker = daemon.engine(ATTACH)
    worker.ask("reserve", reserve_args(KEYS))
    process_died(daemon.core, ATTACH)
    assert daemon.core.arena.account().limbo == 6 * EXTENT
    from appliance.server.membership import bury

    assert bury(daemon.core) == 0
    for _ in range(5):
        daemon.core.clock.advance(daemon.core.clock._last_monotonic + 1.0)
    assert bury(daemon.core) == 6
    assert daemon.core.arena.account().free == 64 * EXTENT


def test_a_silent_writers_memory_is_never_freed_by_time(daemon):
    _, worker = daemon.engine(ATTACH)
    worker.ask("reserve", reserve_args(KEYS))
    end_session(daemon.core, daemon.core.sessions.live[worker.session], SessionEnd.TTL)
    for _ in range(5000):
        daemon.core.clock.advance(daemon.core.clock._last_monotonic + 1.0)
    daemon.core.reservations.expire()
    assert daemon.core.arena.account().limbo == 6 * EXTENT
    again = Peer(daemon, Role.WORKER)
    again.ask("attach", attach_args(ATTACH))
    assert daemon.core.arena.account().free == 64 * EXTENT, "attach says that no copy is in flight"


def test_one_engine_cannot_fill_the_arena_with_unfinished_writes(daemon):
    _, worker = daemon.engine(ATTACH)
    grants = worker.ask("reserve", reserve_args(chain(*range(20))))["grants"]
    limit = int(daemon.settings.l1_bytes * daemon.settings.engine_inflight_share) // EXTENT
    assert grants == [Grant.GRANTED] * limit + [Grant.OVER_LIMIT] * (40 - limit)


def test_a_replaced_scheduler_ends_even_if_its_successor_is_refused(daemon):
    first, worker = daemon.engine(ATTACH)
    store(worker, KEYS)
    first.ask("lookup", lookup_args(KEYS))
    second = Peer(daemon, Role.SCHEDULER)
    with pytest.raises(PagewardenError):
        second.ask("register", register_args(facts={"model": {}}))
    assert first.session not in daemon.core.sessions.live
    assert daemon.core.leases.live == {}


def test_who_may_do_what(daemon):
    scheduler, worker = daemon.engine(ATTACH)
    admin = Peer(daemon, Role.ADMIN, "")
    for peer, op, args in (
        (worker, "lookup", lookup_args(KEYS)),
        (scheduler, "reserve", reserve_args(KEYS)),
        (worker, "clear", {}),
        (scheduler, "set_ttl", {"name": "write_ttl_seconds", "value_seconds": 1.0}),
        (admin, "heartbeat", {}),
        (admin, "register", register_args()),
        (scheduler, "attach", attach_args(SECOND)),
    ):
        with pytest.raises(WrongRole):
            peer.ask(op, args)


def test_order_of_an_engines_first_messages(daemon):
    worker, scheduler = Peer(daemon, Role.WORKER), Peer(daemon, Role.SCHEDULER)
    with pytest.raises((NotAttached, NotRegistered)):
        worker.ask("reserve", reserve_args(KEYS))
    assert scheduler.ask("register", register_args())["waiting"].startswith("waiting for ranks [0]")
    found = scheduler.ask("lookup", lookup_args(KEYS))
    assert (found["settled"], found["reason"]) == (False, MissReason.REGISTERING)
    with pytest.raises(PagewardenError) as caught:
        worker.ask("attach", attach_args(99))
    assert caught.value.code == "attachment_not_proven"
    worker.ask("attach", attach_args(ATTACH))
    assert scheduler.ask("heartbeat", {})["settled"]["chunk_tokens"] == 4
    other = Peer(daemon, Role.WORKER, "other")
    with pytest.raises(PagewardenError) as caught:
        other.ask("attach", attach_args(ATTACH))
    assert caught.value.code == "attachment_not_proven"


def test_boots_and_sessions(daemon):
    peer = Peer(daemon, Role.ADMIN, "")

    def code(boot: bytes, session: bytes, op: str = "set_ttl") -> type[PagewardenError]:
        body = pack_request(Request(op, 1, boot, session, {}))
        return type(daemon.reply(body).error)

    assert code(b"x" * 16, peer.session) is BootChanged
    assert code(daemon.core.boot, b"x" * 16) is UnknownSession
    assert code(b"", b"") is UnknownSession
    assert code(b"x" * 16, b"x" * 16, "ping") is type(None)
    assert code(b"x" * 16, b"x" * 16, "status") is type(None)
    peer.ask("bye", {})
    assert code(daemon.core.boot, peer.session) is UnknownSession


def test_durable_changes_wait_for_the_catalog(daemon):
    admin = Peer(daemon, Role.ADMIN, "")
    change = {"name": "read_lease_ttl_seconds", "value_seconds": 5.0}
    body = admin.body("set_ttl", change)
    waiting = daemon.handle(body)
    assert isinstance(waiting, Waiting)
    assert daemon.core.ttls.read_lease_ttl_seconds == 5.0
    assert daemon.handle(body) is None, "the first copy will be answered"
    refused = unpack_reply(daemon.dispatcher.finish(waiting, CatalogUnavailable("full")))
    assert type(refused.error) is CatalogUnavailable
    assert daemon.core.ttls.read_lease_ttl_seconds == 300.0
    answer = daemon.reply(body)
    version = daemon.core.ttls.version
    assert answer.result == {"before_seconds": 300.0, "after_seconds": 5.0, "version": version}
    assert daemon.reply(body) == answer
    daemon.catalog_error = CatalogUnavailable("down")
    with pytest.raises(CatalogUnavailable):
        admin.ask("clear", {})


def test_a_namespaces_ttl_that_could_not_be_recorded_leaves_no_override(daemon):
    daemon.engine(ATTACH)
    namespace = daemon.core.store.by_slot[0].namespace.hex()
    admin = Peer(daemon, Role.ADMIN, "")
    args = {"name": "read_lease_ttl_seconds", "value_seconds": 5.0, "namespace": namespace}
    waiting = daemon.handle(admin.body("set_ttl", args))
    daemon.dispatcher.finish(waiting, CatalogUnavailable("full"))
    admin.ask("set_ttl", {"name": "read_lease_ttl_seconds", "value_seconds": 100.0})
    assert daemon.core.ttls.get("read_lease_ttl_seconds", namespace) == 100.0
