"""What goes first after a restart: what went first before it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from appliance.l1.recency import RECENCY_FILE
from tests.support.boots import HYBRID, Boot, Boots, descriptor_of
from tests.support.core_store import EXTENT, attention, chain

FIRST, SECOND = descriptor_of(attention(0)), descriptor_of(*HYBRID, model="other")


@pytest.fixture
def boots(tmp_path) -> Iterator[Boots]:
    directory = tmp_path / "arena"
    directory.mkdir(mode=0o700)
    made = Boots(directory, 32)
    yield made
    made.end(clean=False)


def eviction_order(boot: Boot) -> list[tuple[str, bytes, int]]:
    """Entries in the order in which they go when memory is wanted; nothing is left."""
    while occupied := boot.opened.arena.account().occupied:
        assert boot.store.evict_down_to(occupied - 1, at_most=1) == 1
    return [(namespace, key, group) for namespace, key, group, _, _ in boot.observer.gone]


def touch(boot: Boot, descriptor, key: bytes, group: int = 0) -> None:
    index = boot.store.namespaces[descriptor.fingerprint.namespace]
    boot.store.touch(index, np.array([index.entry(index.find(key), group)], dtype=np.int64))
    boot.clock.advance(2.0)


def fill(boot: Boot) -> None:
    for number in range(6):
        for descriptor in (FIRST, SECOND):
            boot.put(boot.namespace(descriptor), chain(number), 0)
            boot.clock.advance(2.0)
    for number in (4, 1):
        touch(boot, FIRST, chain(number)[0])
    touch(boot, SECOND, chain(3)[0])


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_an_orderly_stop_keeps_the_order_over_namespaces(boots, restarts):
    boot = boots.start()
    fill(boot)
    for _ in range(restarts):
        boots.end(clean=True)
        boot = boots.start()
        assert not (boots.directory / RECENCY_FILE).exists(), "a later crash must not meet an old order"
    last = [(FIRST, 4), (FIRST, 1), (SECOND, 3)]
    stored = [(descriptor, number) for number in range(6) for descriptor in (FIRST, SECOND)]
    expected = [each for each in stored if each not in last] + last
    assert eviction_order(boot) == [
        (descriptor.fingerprint.namespace, chain(number)[0], 0) for descriptor, number in expected
    ]


def test_times_go_on(boots):
    boot = boots.start()
    fill(boot)
    index = boot.store.namespaces[FIRST.fingerprint.namespace]
    entry = index.entry(index.find(chain(0)[0]), 0)
    idle = boot.clock() - index.used_at.view[entry]
    assert idle > 20
    boots.end(clean=True)
    boot = boots.start()
    index = boot.store.namespaces[FIRST.fingerprint.namespace]
    entry = index.entry(index.find(chain(0)[0]), 0)
    assert idle - 1 <= boot.clock() - index.used_at.view[entry] <= idle + 60


@pytest.mark.parametrize("damage", ["killed", "empty", "short", "noise", "magic"])
def test_without_the_file_what_was_stored_first_goes_first(boots, damage):
    boot = boots.start()
    prompt = chain(1, 2, 3, 4)
    index = boot.namespace(FIRST)
    boot.put_chain(index, prompt)
    boots.end(clean=damage != "killed")
    path = boots.directory / RECENCY_FILE
    if damage != "killed":
        good = path.read_bytes()
        path.write_bytes(
            {
                "empty": b"",
                "short": good[:-1],
                "noise": good[:-1] + bytes((good[-1] ^ 1,)),
                "magic": b"x" + good[1:],
            }[damage]
        )
    boot = boots.start()
    assert boot.opened.warm
    assert [key for _, key, _ in eviction_order(boot)] == prompt[::-1], "of one age, deep chunks go first"


def test_after_a_restart_eviction_takes_the_longest_unused(boots):
    boot = boots.start()
    index = boot.namespace(FIRST)
    keys = [chain(number)[0] for number in range(32)]
    for key in keys:
        boot.put(index, [key], 0)
        boot.clock.advance(2.0)
    touch(boot, FIRST, keys[0])
    boots.end(clean=True)
    boot = boots.start()
    index = boot.namespace(FIRST)
    boot.put(index, chain(99), 0, length=3 * EXTENT)
    assert {key for _, key, _, _ in boot.names()} == {keys[0], *keys[4:], chain(99)[0]}


def test_a_set_that_lacks_a_shard_is_still_watched(boots):
    boot = boots.start()
    index = boot.namespace(SECOND)
    boot.put(index, chain(1), 0, group=1, shard=0)
    for number in range(2, 33):
        boot.put(index, chain(number), 0)
        boot.clock.advance(2.0)
    touch(boot, SECOND, chain(1)[0], group=1)
    boots.end(clean=True)
    boot = boots.start()
    boot.clock.advance(boot.store.incomplete_grace_seconds + 1)
    boot.put(boot.namespace(SECOND), chain(50), 0)
    assert (SECOND.fingerprint.namespace, chain(1)[0], 1, 0) not in boot.names(), "nobody can hit half a set"
    assert len(boot.names()) == 32
