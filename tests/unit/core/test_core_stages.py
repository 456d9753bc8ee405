"""Pipeline stages without a layer of a group: their shards do not exist, and nobody waits for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.engines import EngineState, EngineTable
from appliance.errors import RanksDisagree
from appliance.lookup import find
from appliance.protocol.base import MissReason, parse
from appliance.protocol.messages import Attach, Register
from tests.support.core_store import CHUNK, World, attention, chain
from tests.support.core_wire import FACTS, GROUPS, LAYER

STAGES = 2


@pytest.fixture
def world():
    made = World(segments=(16,))
    yield made
    made.close()


@pytest.fixture
def table(world) -> EngineTable:
    def make_index(fingerprint, groups, chunk_tokens):
        return world.store.namespace(fingerprint.namespace, fingerprint.model, groups, chunk_tokens)

    return EngineTable(256, make_index)


def settle(table: EngineTable, name: str, *stages: tuple[bool, bool], **group: Any) -> Any:
    """An engine with one rank a stage; each stage says of both groups whether it has layers of them."""
    engine = table.engine(name, 0.0)
    groups = [{**each, "shards": len(stages), **group} for each in GROUPS]
    for rank, held in enumerate(stages):
        named = [{"index": g, "shard": rank, "replica": 0, "held": has} for g, has in enumerate(held)]
        args = {"attach_id": 100 + rank, "rank": rank, "world_size": len(stages), "groups": named}
        table.attach(engine, b"%d" % rank + name.encode(), parse(Attach, {**args, "layers": {"l": LAYER}}))
    wanted = {"world_size": len(stages), "facts": FACTS, "groups": groups}
    table.register(engine, b"s" + name.encode(), parse(Register, wanted))
    return engine


def test_only_the_shards_that_exist_are_waited_for(table):
    engine = settle(table, "e", (True, False), (True, True))
    assert engine.state is EngineState.READY
    assert engine.index.full_masks.tolist() == [0b11, 0b10]


def test_another_cut_of_the_model_is_another_namespace(table):
    one, other = (
        settle(table, "one", (True, False), (True, True)),
        settle(table, "other", (True, True), (True, False)),
    )
    assert one.fingerprint.namespace != other.fingerprint.namespace
    assert table.others(one.fingerprint)[0].differences[0].field.endswith("absent_shards")


def test_a_group_that_no_stage_holds_is_refused(table):
    with pytest.raises(RanksDisagree, match="group 1"):
        settle(table, "e", (True, False), (True, False))


def test_replicas_of_one_shard_must_agree(table):
    engine = table.engine("e", 0.0)
    for rank, held in enumerate((True, False)):
        named = [{"index": g, "shard": 0, "replica": rank, "held": held} for g in range(2)]
        args = {
            "attach_id": 100 + rank,
            "rank": rank,
            "world_size": 2,
            "groups": named,
            "layers": {"l": LAYER},
        }
        table.attach(engine, b"%d" % rank, parse(Attach, args))
    groups = [{**each, "replicas": 2} for each in GROUPS]
    with pytest.raises(RanksDisagree, match="have layers"):
        table.register(engine, b"s", parse(Register, {"world_size": 2, "facts": FACTS, "groups": groups}))


def test_a_replica_without_a_rank_is_refused(table):
    """Replicas take turns by chunk: every second chunk would never be stored."""
    with pytest.raises(RanksDisagree, match="2 replicas"):
        settle(table, "e", (True, True), (True, True), replicas=2)


def test_a_lookup_is_served_without_the_absent_shard_and_names_only_real_ones(world):
    group = replace(attention(0, shards=3), absent_shards=(1,))
    index = world.namespace(1, group)
    keys = chain(1)
    world.put(index, keys, 0, 0, shard=0)
    missing = find(index, world.store.ghosts, keys, CHUNK + 1)
    assert missing.reason is MissReason.RANK_MISSING
    assert "shards [2]" in missing.detail
    world.put(index, keys, 0, 0, shard=2)
    assert find(index, world.store.ghosts, keys, CHUNK + 1).reach.hit == 1
