"""Engines settle once the scheduler and all ranks agree; sessions, clocks and TTLs around them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from appliance.clock import MAX_STEP_SECONDS, LeaseClock
from appliance.engines import Engine, EngineState, EngineTable
from appliance.errors import NamespaceMismatch, PagewardenError, RanksDisagree, UnsupportedGeometry
from appliance.leases import LeaseState
from appliance.planning.expected import PlannedBlocks
from appliance.protocol.base import Role, parse
from appliance.protocol.messages import Attach, Register
from appliance.reservations import ReservationState
from appliance.sessions import Session, SessionState, SessionTable
from appliance.ttl import Ttls
from tests.support.core_store import CHUNK, EXTENT, Clock, World, attention, chain
from tests.support.core_wire import FACTS, GROUPS, LAYER

SHARDED = [{**GROUPS[0], "shards": 2}, {**GROUPS[1], "replicas": 2}]


def registration(**changes: Any) -> Register:
    return parse(Register, copy.deepcopy({"world_size": 2, "facts": FACTS, "groups": SHARDED, **changes}))


def worker(rank: int, **changes: Any) -> Attach:
    groups = [{"index": 0, "shard": rank, "replica": 0}, {"index": 1, "shard": 0, "replica": rank}]
    base = {"attach_id": 100 + rank, "rank": rank, "world_size": 2, "groups": groups, "layers": {"l": LAYER}}
    return parse(Attach, copy.deepcopy({**base, **changes}))


@pytest.fixture
def world() -> Iterator[World]:
    made = World(segments=(16,))
    yield made
    made.close()


@pytest.fixture
def table(world) -> EngineTable:
    def make_index(fingerprint, groups, chunk_tokens):
        return world.store.namespace(fingerprint.namespace, fingerprint.model, groups, chunk_tokens)

    return EngineTable(256, make_index)


def settled(table: EngineTable, name: str = "e", **changes: Any) -> Engine:
    engine = table.engine(name, 0.0)
    table.attach(engine, b"w0" + name.encode(), worker(0))
    table.attach(engine, b"w1" + name.encode(), worker(1))
    table.register(engine, b"s" + name.encode(), registration(**changes))
    return engine


@pytest.mark.parametrize("order", [("s", 0, 1), (0, 1, "s"), (1, "s", 0)])
def test_settles_when_the_last_one_comes_whatever_the_order(table, order):
    engine = table.engine("e", 0.0)
    for position, who in enumerate(order):
        assert engine.state is EngineState.REGISTERING
        assert engine.index is None
        if who == "s":
            table.register(engine, b"s", registration())
        else:
            table.attach(engine, b"w%d" % who, worker(who))
        if position < 2:
            assert engine.reason.startswith("waiting for")
    assert (engine.state, engine.reason) == (EngineState.READY, "serving")
    assert engine.index is not None
    assert engine.index.chunk_tokens == 256
    assert engine.fingerprint.namespace == settled(table, "twin").fingerprint.namespace
    assert table.engines_of(engine.fingerprint.namespace) == ["e", "twin"]


def test_missing_ranks_are_named(table):
    engine = table.engine("e", 0.0)
    table.register(engine, b"s", registration())
    assert engine.reason == "waiting for ranks [0, 1] of 2 to attach"
    table.attach(engine, b"w1", worker(1))
    assert engine.reason == "waiting for ranks [0] of 2 to attach"


@pytest.mark.parametrize(
    "second, told",
    [
        ({"world_size": 3}, "ranks"),
        ({"groups": [{"index": 0, "shard": 1, "replica": 0}]}, "cache groups"),
        (
            {"groups": [{"index": 0, "shard": 0, "replica": 0}, {"index": 1, "shard": 0, "replica": 1}]},
            r"shards \[1\]",
        ),
        (
            {"groups": [{"index": 0, "shard": 2, "replica": 0}, {"index": 1, "shard": 0, "replica": 1}]},
            "holds shard 2",
        ),
        (
            {"groups": [{"index": 0, "shard": 1, "replica": 0}, {"index": 1, "shard": 0, "replica": 2}]},
            "replica 2",
        ),
        (
            {"groups": [{"index": 1, "shard": 1, "replica": 0}, {"index": 0, "shard": 0, "replica": 1}]},
            "groups",
        ),
        ({"layers": {"l": {**LAYER, "backend": "OTHER"}}}, "differently in backend"),
    ],
)
def test_ranks_that_disagree_are_refused_until_they_agree(table, second, told):
    engine = table.engine("e", 0.0)
    table.attach(engine, b"w0", worker(0))
    table.attach(engine, b"w1", worker(1, **second))
    with pytest.raises(RanksDisagree, match=told):
        table.register(engine, b"s", registration())
    assert engine.state is EngineState.REFUSED
    assert engine.index is None
    assert table.attach(engine, b"w1b", worker(1)) == b"w1"
    assert engine.state is EngineState.READY
    assert engine.error is None


def test_pipeline_ranks_bring_different_layers(table):
    engine = table.engine("e", 0.0)
    table.attach(engine, b"w0", worker(0, layers={"a": LAYER}))
    table.attach(engine, b"w1", worker(1, layers={"b": LAYER}))
    table.register(engine, b"s", registration())
    assert sorted(engine.fingerprint.record["layers"]) == ["a", "b"]


def test_who_comes_again_replaces_its_former_session(table):
    engine = settled(table)
    assert table.attach(engine, b"w0e", worker(0)) == b""
    assert table.attach(engine, b"again", worker(0)) == b"w0e"
    assert table.register(engine, b"se", registration()) == b""
    assert table.register(engine, b"s-again", registration()) == b"se"
    assert engine.state is EngineState.READY
    table.leave(engine, b"w0e")
    assert engine.state is EngineState.READY, "the replaced session is not the rank any more"
    table.leave(engine, b"again")
    assert engine.state is EngineState.REGISTERING
    assert engine.notices == []
    assert table.engines_of(engine.fingerprint.namespace) == []
    table.leave(engine, b"w1e")
    table.leave(engine, b"s-again")
    assert table.engines == {}


def test_geometry_that_cannot_be_served_changes_nothing(table):
    engine = settled(table)
    with pytest.raises(UnsupportedGeometry):
        table.register(engine, b"new", registration(groups=[{**GROUPS[0], "index": 1}]))
    assert (engine.state, engine.scheduler) == (EngineState.READY, b"se")


def test_require_namespace(table):
    ours = settled(table, "first").fingerprint.namespace
    assert settled(table, "same", require_namespace=ours).state is EngineState.READY
    other = {**FACTS, "cache": {"dtype": "fp8", "layout": "NHD"}, "draft": "eagle"}
    with pytest.raises(NamespaceMismatch) as caught:
        settled(table, "other", facts=other, require_namespace=ours)
    assert caught.value.details["fields"] == ["cache.dtype", "draft"]
    assert caught.value.details["required"] == ours
    with pytest.raises(NamespaceMismatch, match="No engine has it now"):
        settled(table, "lost", require_namespace="f" * 32)


def test_other_namespaces_of_the_model_are_told_with_what_differs(table):
    settled(table, "first")
    settled(table, "elsewhere", facts={**FACTS, "model": {**FACTS["model"], "name": "another"}})
    second = settled(table, "second", facts={**FACTS, "draft": "eagle"})
    [other] = table.others(second.fingerprint)
    assert other.engines == ["first"]
    assert [(d.field, d.ours, d.theirs) for d in other.differences] == [("draft", "eagle", "none")]


def test_long_values_are_shortened_where_people_read_them(table):
    first = settled(table, "first", facts={**FACTS, "draft": "x" * 500})
    second = settled(table, "second")
    [found] = table.differences(second.fingerprint, first.fingerprint)
    assert len(found.theirs) == 200


@pytest.mark.parametrize(
    "budget, told",
    [
        (700, "below the block size 768"),
        (768, r"\[768, 1536\): one block"),
        (1535, "one block"),
        (2048, "spans 2 blocks"),
    ],
)
def test_notices_for_token_budgets(table, budget, told):
    groups = [{**each, "block_tokens": 768} for each in SHARDED]
    engine = settled(table, groups=groups, max_batched_tokens=budget)
    assert engine.index.chunk_tokens == 768
    [notice] = engine.notices
    assert re.search(told, notice)


def test_other_notices(table):
    assert settled(table, "plain", max_batched_tokens=0).notices == [
        f"Chunks are 256 tokens, more than the engine's block size {CHUNK}."
    ]
    [first, *_] = settled(table, "old", snapshots="too old").notices
    assert "too old" in first
    attention_only = [{**GROUPS[0], "shards": 2}]
    groups = [{"index": 0, "shard": 0, "replica": 0}]
    engine = table.engine("attention", 0.0)
    table.attach(engine, b"a", worker(0, groups=groups))
    table.attach(engine, b"b", worker(1, groups=[{**groups[0], "shard": 1}]))
    table.register(engine, b"c", registration(groups=attention_only, max_batched_tokens=100))
    assert engine.notices == []


# --- clock, sessions, TTLs ------------------------------------------------------------------------------------------


def test_the_clock_follows_time_but_never_jumps():
    clock = LeaseClock(100.0)
    assert clock() == 0.0
    assert clock.advance(100.25) == pytest.approx(0.25)
    assert clock.advance(100.25) == pytest.approx(0.25)
    assert clock.advance(99.0) == pytest.approx(0.25), "time never goes back"
    assert clock.advance(99.5) == pytest.approx(0.75)
    assert clock.advance(10_000.0) == pytest.approx(0.75 + MAX_STEP_SECONDS)


def test_a_daemon_that_was_stopped_expires_nobody(world):
    clock = LeaseClock(0.0)
    for holder in (world.leases, world.reservations):
        holder.clock = clock
    index = world.namespace(1, attention(0))
    world.put(index, chain(1), 0, 0)
    lease = world.leases.grant(b"s", "e", "r", index, 1, np.array([0]), 300.0)
    _, reservation = world.reserve(index, chain(2), 0, 0, ttl_seconds=600.0)
    sessions = SessionTable(clock, heartbeat_seconds=2.0)
    session = sessions.open(Session(b"s", Role.SCHEDULER, "e", "c", "h", 1, heard_at=clock()))
    clock.advance(1.0)
    clock.advance(100_000.0)  # SIGSTOP for a day
    assert world.leases.expire() == world.reservations.expire() == 0
    assert sessions.silent(lambda _: 600.0) == []
    at = 100_000.0
    for _ in range(299):
        at += 1.0
        clock.advance(at)
    assert world.leases.expire() == 1
    assert world.reservations.expire() == 0
    assert sessions.silent(lambda _: 600.0) == []
    assert session.state is SessionState.SUSPECT
    for _ in range(301):
        at += 1.0
        clock.advance(at)
    assert world.reservations.expire() == 1
    assert sessions.silent(lambda _: 600.0) == [session]
    assert [each.cause for each in world.endings] == [LeaseState.EXPIRED]
    assert world.endings[0].age_seconds == pytest.approx(301.0)
    assert lease.lease_id not in world.leases.live
    assert reservation.state is ReservationState.EXPIRED


def test_silence_makes_suspect_and_a_word_makes_live_again():
    clock = Clock()
    table = SessionTable(clock, heartbeat_seconds=2.0)
    session = table.open(Session(b"s", Role.WORKER, "e", "c", "h", 1, heard_at=clock()))
    assert table.open(Session(b"s", Role.WORKER, "e", "c", "h", 1, heard_at=clock())) is session
    clock.advance(6.0)
    assert table.silent(lambda _: 10.0) == []
    assert session.state is SessionState.LIVE
    clock.advance(0.5)
    assert table.silent(lambda _: 10.0) == []
    assert session.state is SessionState.SUSPECT
    table.heard(session)
    assert session.state is SessionState.LIVE
    clock.advance(10.5)
    assert table.silent(lambda _: 10.0) == [session]
    table.remove(session)
    assert table.get(b"s") is None
    assert session.state is SessionState.ENDED


def test_kept_replies_are_bounded_and_the_newest_is_always_there():
    session = Session(b"s", Role.WORKER, "e", "c", "h", 1, heard_at=0.0)
    for request in range(200):
        session.remember_reply(request, b"x" * 10)
    assert list(session.replies) == list(range(136, 200))
    assert session.reply_bytes == 640
    session.remember_reply(199, b"y" * 5)
    assert session.reply_bytes == 635
    session.remember_reply(200, bytes(3 << 20))
    assert list(session.replies) == [200], "a retry of a large request must not be run again"
    session.remember_reply(201, b"z")
    assert list(session.replies) == [201]
    assert session.reply_bytes == 1
    session.forget_reply(201)
    session.forget_reply(201)
    assert (session.reply_bytes, session.replies) == (0, {})


def test_leases_that_their_owner_forgot_end_and_named_ones_live_on(world):
    index = world.namespace(1, attention(0))
    world.put(index, chain(1), 0, 0)
    named, forgotten = (
        world.leases.grant(b"s", "e", "r", index, 1, np.array([0]), 30.0).lease_id for _ in range(2)
    )
    for _ in range(2):
        world.clock.advance(20.0)
        assert world.leases.heard(b"s", [named, 12345], lambda _: 30.0) == [12345]
    assert set(world.leases.live) == {named, forgotten}
    world.leases.heard(b"s", [named], lambda _: 30.0)
    assert set(world.leases.live) == {named}
    assert world.leases.ended == {"orphaned": 1}
    assert world.leases.heard(b"thief", [named], lambda _: 1e9) == [named], "only its owner renews a lease"
    world.clock.advance(30.0)
    assert world.leases.expire() == 1
    assert world.arena.account().occupied == EXTENT
    assert index.totals[0].leased_extents == 0


def test_a_change_of_ttl_and_its_overrides():
    ttls = Ttls()
    assert ttls.set("write_ttl_seconds", 5.0) == 600.0
    assert ttls.set("write_ttl_seconds", 7.0, "ab") == 5.0
    assert (ttls.get("write_ttl_seconds"), ttls.get("write_ttl_seconds", "ab")) == (5.0, 7.0)
    assert ttls.get("write_ttl_seconds", "cd") == 5.0
    assert ttls.get("read_lease_ttl_seconds", "ab") == 300.0
    assert ttls.set("write_ttl_seconds", None, "ab") == 7.0
    assert ttls.set("write_ttl_seconds", None, "ab") == 5.0
    assert ttls.get("write_ttl_seconds", "ab") == 5.0
    assert ttls.set("write_ttl_seconds", None) == 5.0
    assert ttls.get("write_ttl_seconds", "ab") == 600.0
    assert ttls.changed_value("write_ttl_seconds") is None


def test_the_version_of_ttls_changes_with_every_value_and_comes_back_with_it():
    ttls = Ttls()
    first = ttls.version
    versions = {first}
    for value, namespace in ((5.0, ""), (5.0, "ab"), (6.0, "ab"), (600.0, "")):
        ttls.set("write_ttl_seconds", value, namespace)
        versions.add(ttls.version)
    assert len(versions) == 5, "a value that is set to the configured one is still a change"
    ttls.set("write_ttl_seconds", None, "ab")
    ttls.set("write_ttl_seconds", None)
    assert ttls.version == first


def test_a_ttl_that_nobody_knows_cannot_be_set():
    ttls = Ttls()
    with pytest.raises(AssertionError):
        ttls.set("no_such_ttl", 1.0)


def test_errors_of_settlement_are_all_typed(table):
    engine = table.engine("e", 0.0)
    table.attach(engine, b"w0", worker(0))
    table.attach(engine, b"w1", worker(1))
    for facts in ({}, {"model": 1}, {**FACTS, "draft": None}, {**FACTS, "scale": float("nan")}):
        with pytest.raises(PagewardenError) as caught:
            table.register(engine, b"s", registration(facts=facts))
        assert caught.value.code == "partial_fingerprint"
    for bytes_a_page in ("many", 0, None, [1]):
        groups = copy.deepcopy(SHARDED)
        groups[0]["facts"]["page_bytes"] = bytes_a_page
        with pytest.raises(PagewardenError) as caught:
            table.register(engine, b"s", registration(groups=groups))
        assert caught.value.details["field"] == "groups[0].page_bytes"


# --- what was planned -------------------------------------------------------------------------------------------


def planned(table: EngineTable, text: str) -> EngineTable:
    return EngineTable(256, table.make_index, PlannedBlocks.of(text))


def test_an_engine_with_another_block_size_than_planned_is_pointed_out_and_served(table):
    table = planned(table, "tiny-hybrid=944,16")
    engine = settled(table)
    assert engine.fingerprint.model != "tiny-hybrid"
    assert engine.planned_block_tokens == 16
    assert str(min(group["block_tokens"] for group in GROUPS)) in engine.deviation
    assert engine.notices[0] == engine.deviation
    assert engine.state is EngineState.READY


def test_an_engine_as_planned_is_not(table):
    block_tokens = min(group["block_tokens"] for group in GROUPS)
    for text in ("", f"{FACTS['model']['name']}={block_tokens}", f"other=1,{block_tokens}"):
        engine = settled(planned(table, text))
        assert not engine.deviation
        assert not any("planned" in notice for notice in engine.notices)


def test_a_deviation_ends_with_the_registration_that_had_it(table):
    table = planned(table, "1")
    engine = settled(table)
    assert engine.deviation
    table.leave(engine, b"se")
    assert not engine.deviation
