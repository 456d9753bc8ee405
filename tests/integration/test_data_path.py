"""A prompt stored by one engine is loaded by another: real daemon, real sockets, real shared memory."""

from __future__ import annotations

from collections.abc import Callable

from appliance.protocol.base import MissReason
from tests.support.daemon import DaemonProcess
from tests.support.engine import Engine, facts, sharded
from tests.support.waiting import eventually

PROMPT = list(range(1000, 1000 + 32 * 4 + 5))


def accounted(daemon: DaemonProcess) -> None:
    """Bytes add up: by state, and by namespace and group."""
    status = daemon.status()
    l1 = status.l1
    parts = l1.free_bytes + l1.occupied_bytes + l1.reserved_bytes + l1.limbo_bytes + l1.draining_bytes
    assert parts == l1.populated_bytes
    assert sum(group.bytes for group in status.groups) == l1.occupied_bytes
    assert sum(group.reserved_bytes for group in status.groups) == l1.reserved_bytes
    assert sum(group.objects for group in status.groups) == l1.objects


def test_what_one_engine_stores_the_next_one_loads(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    first = Engine(daemon.port, "first").start()
    assert first.chunk_tokens == 32
    missed = first.lookup("r1", PROMPT)
    assert (missed.hit_chunks, missed.lease, missed.reason) == (0, 0, MissReason.NEVER_STORED)
    [saved] = first.save(PROMPT, seed=7)
    assert (saved.stored, saved.skipped, saved.failed) == (5, 0, 0)
    [again] = first.save(PROMPT, seed=7)
    assert (again.stored, again.skipped, again.failed) == (0, 5, 0)
    first.stop()

    second = Engine(daemon.port, "second").start()
    found = second.lookup("r2", PROMPT)
    assert (found.hit_chunks, found.reason) == (4, None)
    assert found.lease
    [loaded] = second.load("r2", PROMPT, found)
    assert loaded.ok, loaded.reason
    second.check_loaded(4, seed=7)
    second.scheduler.release(found.lease)
    eventually(lambda: daemon.status().leases_total == 0, "the lease is released")
    accounted(daemon)
    status = daemon.status()
    assert status.counters["objects_loaded"] == 5
    assert status.lease_end_causes == {"released": 1}
    second.stop()


def test_a_shared_prefix_hits_once_its_state_was_asked_for(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    shared, tail_a, tail_b, tail_c = PROMPT[:64], [1] * 40, [2] * 40, [3] * 40
    engine.save(shared + tail_a, seed=1)
    found = engine.lookup("b", shared + tail_b)
    assert (found.hit_chunks, found.attention_chunks, found.snapshots) == (0, 2, [2])
    assert found.reason is MissReason.RECURRENT_MISSING
    engine.save(shared + tail_b, seed=1, states=[1, 2])
    found = engine.lookup("c", shared + tail_c)
    assert (found.hit_chunks, found.snapshots) == (2, [])
    [loaded] = engine.load("c", shared + tail_c, found)
    assert loaded.ok, loaded.reason
    engine.check_loaded(2, seed=1)
    accounted(daemon)
    engine.stop()


def test_ranks_store_replicated_groups_once_and_their_own_shards(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, shape=sharded(2), world_size=2).start()
    results = engine.save(PROMPT, seed=3)
    assert [result.stored for result in results] == [3, 3]
    usage = {group.name: group.objects for group in daemon.status().groups}
    assert usage == {"mla": 4, "kda": 2}
    found = engine.lookup("r", PROMPT)
    assert found.hit_chunks == 4
    assert all(result.ok for result in engine.load("r", PROMPT, found))
    engine.check_loaded(4, seed=3)
    accounted(daemon)
    engine.stop()


def test_engines_that_differ_never_share_and_the_reason_names_the_field(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    first = Engine(daemon.port, "first").start()
    first.save(PROMPT, seed=7)
    other = Engine(daemon.port, "other", rank_options={"layer_facts": {"backend": "OTHER"}}).start()
    settlement = other.scheduler.settlement
    assert settlement is not None
    [refused] = settlement.others
    assert refused.engines == ["first"]
    assert {d.field for d in refused.differences} == {
        f"layers.layer.{g}.{n}.backend" for g in (0, 1) for n in (0, 1)
    }
    found = other.lookup("r", PROMPT)
    assert (found.hit_chunks, found.reason) == (0, MissReason.REFUSED_FINGERPRINT)
    assert "first" in found.detail
    assert "layers.layer.0.0.backend" in found.detail
    [refusal] = daemon.status().refusals
    assert (refusal.engine_id, refusal.lookups) == ("other", 1)
    other.stop()
    third = Engine(daemon.port, "third", facts=facts(cache={"dtype": "fp8"})).start()
    assert third.lookup("r", PROMPT).hit_chunks == 0
    third.stop()
    first.stop()
