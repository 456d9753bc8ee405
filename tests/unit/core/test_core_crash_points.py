"""Killed at every single write to the arena's files, whole or torn: what was acknowledged holds, and nothing else lies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from appliance.l1.removals import Removal
from appliance.l1.segment import Segment
from tests.support.boots import HYBRID, Boot, Boots, descriptor_of
from tests.support.core_store import EXTENT, chain, scratch_directory

Name = tuple[str, bytes, int, int]
NAMESPACE, OTHER = descriptor_of(*HYBRID), descriptor_of(*HYBRID, model="other")
PAGE = 4096


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the daemon's runs after it."""


@dataclass
class Ledger:
    """What a peer was told. ``must`` is there after a crash, ``may`` is either way, all else must be gone."""

    must: set[Name] = field(default_factory=set)
    may: set[Name] = field(default_factory=set)


@dataclass
class Kill:
    """Dies in the ``at``-th write; ``torn`` writes first what a kill between two pages leaves."""

    at: int
    torn: bool
    seen: int = 0

    def __call__(
        self, real: Callable[..., None], segment: Segment, data: bytes | memoryview, offset: int
    ) -> None:
        self.seen += 1
        if self.seen != self.at:
            real(segment, data, offset)
            return
        if self.torn:
            whole_pages = PAGE - offset % PAGE
            if whole_pages >= len(data):
                whole_pages = 0
            real(segment, bytes(data)[:whole_pages], offset)
        raise Killed


def store(
    boot: Boot, ledger: Ledger, descriptor, keys: list[bytes], chunk: int, group: int, shard: int
) -> None:
    name = (descriptor.fingerprint.namespace, keys[chunk], group, shard)
    ledger.may.add(name)
    boot.put(boot.namespace(descriptor), keys, chunk, group, shard, length=2 * EXTENT - 9)
    ledger.may.discard(name)
    ledger.must.add(name)


def forget(ledger: Ledger, gone: set[Name]) -> None:
    """Removal begins: until it is acknowledged, either state is right."""
    ledger.must -= gone
    ledger.may |= gone


def scenario(boot: Boot, ledger: Ledger) -> None:
    """Stores, an eviction, a removal under a lease, a reservation given up, clears of one namespace and of all."""
    keys, others = chain(1, 2, 3), chain(5, 6)
    for chunk in range(3):
        for group, shard in ((0, 0), (1, 0), (1, 1)):
            store(boot, ledger, NAMESPACE, keys, chunk, group, shard)
    store(boot, ledger, OTHER, others, 0, 0, 0)
    index, namespace = boot.namespace(NAMESPACE), NAMESPACE.fingerprint.namespace
    given_up = boot.reserve(index, chain(8), 0, length=3 * EXTENT)
    boot.store.end_reservation(given_up, Removal.NONE, writer_stopped=True)
    late = boot.reserve(index, chain(9), 0, length=3 * EXTENT)
    boot.store.end_reservation(late, Removal.WRITE_EXPIRED, writer_stopped=False)
    gone = {(namespace, keys[2], 0, 0)}
    forget(ledger, gone)
    boot.store.remove(index, index.find(keys[2]), 0, Removal.EVICTED)
    ledger.may -= gone
    boot.store.hold(index, np.array([index.entry(index.find(keys[1]), 1)], dtype=np.int64))
    gone = {(namespace, keys[1], 1, shard) for shard in (0, 1)}
    forget(ledger, gone)
    boot.store.remove(index, index.find(keys[1]), 1, Removal.QUARANTINED)
    ledger.may -= gone
    store(boot, ledger, OTHER, others, 1, 0, 0)
    gone = {name for name in ledger.must if name[0] == namespace}
    forget(ledger, gone)
    boot.store.clear(namespace)
    ledger.may -= gone
    store(boot, ledger, NAMESPACE, keys, 0, 0, 0)
    gone = set(ledger.must)
    forget(ledger, gone)
    boot.store.clear(None)
    ledger.may -= gone
    store(boot, ledger, OTHER, others, 0, 0, 0)


def run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kill: Kill, *, clean: bool
) -> tuple[Boots, Ledger, bool]:
    """The scenario until it is killed, and a stop at its end."""
    boots, ledger = Boots(directory), Ledger()
    boot = boots.start()
    real = Segment._write
    died = False
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "_write", lambda segment, data, offset: kill(real, segment, data, offset))
        try:
            scenario(boot, ledger)
            if clean:
                boots.end(clean=True)
        except Killed:
            died = True
    boots.end(clean=False)
    return boots, ledger, died


def writes_of_the_scenario() -> int:
    directory = scratch_directory()
    try:
        with pytest.MonkeyPatch.context() as patch:
            kill = Kill(at=-1, torn=False)
            boots, ledger, died = run(directory, patch, kill, clean=True)
            assert not died
            boot = boots.start()
            assert boot.opened.warm
            assert boot.names() == ledger.must
            boots.end(clean=False)
    finally:
        shutil.rmtree(directory)
    return kill.seen


WRITES = writes_of_the_scenario()


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_killed_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool) -> None:
    assert WRITES > 80, "the scenario would prove little"
    for at in range(1, WRITES + 1):
        directory = tmp_path / f"arena-{at}"
        directory.mkdir(mode=0o700)
        boots, ledger, died = run(directory, monkeypatch, Kill(at, torn), clean=True)
        assert died, "a write of the scenario was not reached"
        boot = boots.start()
        assert boot.opened.warm, (at, boot.opened.reason)
        names = boot.names()
        assert ledger.must <= names, f"write {at}: what was acknowledged is gone"
        assert names <= ledger.must | ledger.may, f"write {at}: what was removed is back"
        assert boot.check_bytes() == len(names)
        boot.accounts_add_up()
        # The boot behind the crash must leave nothing odd for the one behind it.
        boots.end(clean=True)
        again = boots.start()
        assert again.opened.warm, (at, again.opened.reason)
        assert again.opened.clean_stop
        assert again.names() == names
        boots.end(clean=False)
        shutil.rmtree(directory)
