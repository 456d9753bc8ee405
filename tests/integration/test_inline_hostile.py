"""Hostile, broken and slow peers of the bulk socket: typed answers, bounded memory, and everybody else is served."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from appliance import errors
from appliance.hashing import join_keys
from appliance.protocol import PROTOCOL_VERSION
from appliance.protocol.bulk import BULK_CREDITS, BULK_FRAME_BYTES, MAX_BULK_PART_BYTES
from appliance.protocol.client import endpoint_of
from appliance.protocol.liveness import INLINE_ATTACH_IDS
from appliance.protocol.messages import Ping
from appliance.protocol.wire import Reply, Request, pack_request, unpack_reply
from tests.integration.test_data_path import accounted
from tests.support.bulk import BulkPeer
from tests.support.daemon import DaemonProcess
from tests.support.engine import HYBRID, Engine, Shape
from tests.support.waiting import eventually

PROMPT = list(range(5000, 5000 + 32 * 4 + 5))
LENGTH = 10_000
NOWHERE = "/nowhere/pagewarden"
BIG = Shape(HYBRID.groups, (700_001, 1_500_000))


class Victim:
    """An inline engine whose worker's session is used by hand: `control` on its own socket, `bulk` for frames."""

    def __init__(self, daemon: DaemonProcess, name: str = "victim", shape: Shape = HYBRID) -> None:
        import zmq

        self.daemon = daemon
        self.engine = Engine(daemon.port, name, shape=shape, rank_options={"arena_dir": NOWHERE}).start()
        self.boot, self.session = self.engine.ranks[0].client.link.identity
        self.port = daemon.status().inline.port
        self.keys, self.parents = self.engine.keys(PROMPT)
        self._context = zmq.Context()
        self._control = self._context.socket(zmq.DEALER)
        self._control.connect(endpoint_of("127.0.0.1", daemon.port))
        self._next = 2**40
        self._peers: list[BulkPeer] = []

    def control(self, op: str, args: dict[str, Any], session: bytes | None = None) -> Reply:
        """One request under the worker's session, or another."""
        self._next += 1
        self._control.send(pack_request(Request(op, self._next, self.boot, session or self.session, args)))
        assert self._control.poll(20_000)
        return unpack_reply(self._control.recv())

    def bulk(self, session: bytes | None = None, **options: int) -> BulkPeer:
        """A raw peer of the bulk socket."""
        peer = BulkPeer(self.port, self.boot, self.session if session is None else session, **options)
        self._peers.append(peer)
        return peer

    def reserve(self, chunk: int = 0, length: int = LENGTH) -> int:
        """A reservation of this session."""
        args = {
            "groups": [0],
            "chunks": [chunk],
            "keys": self.keys[chunk],
            "parents": self.parents[chunk],
            "lengths": [length],
        }
        [reservation] = self.control("reserve", args).result["reservations"]
        assert reservation
        return int(reservation)

    def located(self) -> dict[str, Any]:
        """The arguments of a get for the whole of a located object's first frame."""
        found = self.engine.lookup("r", PROMPT)
        assert found.lease
        args = {
            "lease": found.lease,
            "request": "r",
            "hit_chunks": found.hit_chunks,
            "keys": join_keys(self.keys[: found.hit_chunks]),
            "groups": [0],
            "chunks": [1],
        }
        result = self.control("locate", args).result
        length = min(BULK_FRAME_BYTES, result["lengths"][0])
        return {
            "lease": result["lease"],
            "group": 0,
            "chunk": 1,
            "word": result["words"][0],
            "offset": 0,
            "length": length,
        }

    def close(self) -> None:
        """End everything."""
        for peer in self._peers:
            peer.close()
        self._control.close(linger=0)
        self._context.term()
        self.engine.stop()


@pytest.fixture
def victim_of() -> Iterator[Callable[..., Victim]]:
    """Makes engines to be abused."""
    made: list[Victim] = []

    def make(daemon: DaemonProcess, *args: Any) -> Victim:
        made.append(Victim(daemon, *args))
        return made[-1]

    yield make
    for victim in made:
        victim.close()


def header(victim: Victim, **fields: Any) -> bytes:
    base = {"v": PROTOCOL_VERSION, "op": "put", "id": 7, "boot": victim.boot, "session": victim.session}
    return bytes(msgpack.packb({**base, "args": {"reservation": 1, "offset": 0}, **fields}))


def test_every_broken_frame_gets_a_typed_answer_and_the_thread_goes_on(
    make_daemon: Callable[..., DaemonProcess], victim_of: Callable[..., Victim]
) -> None:
    daemon = make_daemon()
    victim = victim_of(daemon)
    broken: list[tuple[tuple[bytes, ...], type[errors.PagewardenError]]] = [
        ((b"",), errors.MalformedMessage),
        ((header(victim),), errors.MalformedMessage),
        ((header(victim), b"x", b"y"), errors.MalformedMessage),
        ((b"\xc1", b"x"), errors.MalformedMessage),
        ((os.urandom(500), b"x"), errors.MalformedMessage),
        ((bytes(msgpack.packb([1, 2])), b"x"), errors.MalformedMessage),
        ((header(victim, v=9), b"x"), errors.UnsupportedVersion),
        ((header(victim, op="destroy"), b"x"), errors.UnknownOperation),
        ((header(victim, op="lookup"), b"x"), errors.UnknownOperation),
        ((header(victim, boot=b"z" * 16), b"x"), errors.BootChanged),
        ((header(victim, session=b"z" * 16), b"x"), errors.UnknownSession),
        ((header(victim, session=b""), b"x"), errors.UnknownSession),
        ((header(victim, session=victim.engine.scheduler.link.identity[1]), b"x"), errors.UnknownSession),
        ((header(victim, args={}), b"x"), errors.InvalidField),
        ((header(victim, args={"reservation": 1, "offset": -1}), b"x"), errors.InvalidField),
        ((header(victim, args={"reservation": 1, "offset": 0, "path": "/etc"}), b"x"), errors.InvalidField),
        ((header(victim), b""), errors.InvalidField),
        ((header(victim), b"x"), errors.ReservationEnded),
        ((header(victim), b"x" * (BULK_FRAME_BYTES + 1)), errors.MessageTooLarge),
        ((header(victim, op="get", args={"lease": 1}), b""), errors.InvalidField),
    ]
    peer = victim.bulk()
    for parts, expected in broken:
        peer.send_raw(*parts)
        reply, data = peer.receive()
        assert (type(reply.error), data) == (expected, b""), (parts[0][:80], reply.error)
    huge = victim.bulk()
    huge.send_raw(header(victim), b"x" * (MAX_BULK_PART_BYTES + 1))
    assert not huge.socket.poll(300), "a part over the bound ends its connection"
    status = daemon.status()
    assert status.inline.refusals == len(broken)
    assert {loop.name: loop.errors for loop in status.loops}["bulk"] == 0
    assert victim.engine.save(PROMPT, seed=1)[0].stored == 5


def test_only_the_sessions_own_reservation_can_be_written(
    make_daemon: Callable[..., DaemonProcess], victim_of: Callable[..., Victim]
) -> None:
    daemon = make_daemon()
    victim, thief = victim_of(daemon, "victim"), victim_of(daemon, "thief")
    reservation = victim.reserve()
    put = {"reservation": reservation, "offset": 0}
    assert type(thief.bulk().ask("put", put, b"x" * LENGTH)[0].error) is errors.ReservationEnded
    mine = victim.bulk()
    for offset, size in ((1, 10), (0, LENGTH + 1), (LENGTH, 1), (2**40, 1)):
        reply, _ = mine.ask("put", {"reservation": reservation, "offset": offset}, b"x" * size)
        assert type(reply.error) is errors.InvalidField, (offset, size)
    refused = victim.control("commit", {"reservations": [reservation], "checksums": [1]}).result
    assert refused == {"committed": 0, "refused": [reservation]}, "a stream with missing bytes"
    assert type(mine.ask("put", put, b"x" * LENGTH)[0].error) is errors.ReservationEnded
    whole = victim.reserve()
    for offset in (0, 4096, 8192):
        data = b"y" * min(4096, LENGTH - offset)
        assert mine.ask("put", {"reservation": whole, "offset": offset}, data)[0].result == {
            "arrived": offset + len(data)
        }
    assert victim.control("commit", {"reservations": [whole], "checksums": [1]}).result["committed"] == 1
    reply, _ = mine.ask("put", {"reservation": whole, "offset": 0}, b"z")
    assert type(reply.error) is errors.ReservationEnded, "a committed object would be changed"
    shared = Engine(daemon.port, "shared").start()
    reply, _ = mine.ask("put", {"reservation": whole + 1, "offset": 0}, b"z")
    assert type(reply.error) is errors.ReservationEnded
    shared.stop()
    accounted(daemon)


def test_only_objects_that_the_session_located_can_be_read(
    make_daemon: Callable[..., DaemonProcess], victim_of: Callable[..., Victim]
) -> None:
    daemon = make_daemon()
    victim, thief = victim_of(daemon, "victim"), victim_of(daemon, "thief")
    victim.engine.save(PROMPT, seed=1)
    get = victim.located()
    mine = victim.bulk()
    reply, data = mine.ask("get", get)
    assert reply.error is None
    assert len(data) == get["length"]
    for wrong, expected in (
        ({"chunk": 0}, errors.LeaseEnded),
        ({"group": 1}, errors.LeaseEnded),
        ({"lease": get["lease"] + 1}, errors.LeaseEnded),
        ({"word": get["word"] + 2}, errors.LeaseEnded),
        ({"offset": 1}, errors.InvalidField),
        ({"offset": 2**40}, errors.InvalidField),
        ({"length": 0}, errors.InvalidField),
        ({"length": BULK_FRAME_BYTES + 1}, errors.InvalidField),
    ):
        reply, data = mine.ask("get", {**get, **wrong})
        assert (type(reply.error), data) == (expected, b""), wrong
    assert type(thief.bulk().ask("get", get)[0].error) is errors.LeaseEnded
    assert type(victim.bulk(session=b"s" * 16).ask("get", get)[0].error) is errors.UnknownSession
    victim.control(
        "loads", {"lease": get["lease"], "request": "r", "objects": 1, "bytes_loaded": 1, "seconds": 0.1}
    )
    assert type(mine.ask("get", get)[0].error) is errors.LeaseEnded, "the load was reported: it has ended"
    get = victim.located()
    victim.engine.scheduler.release(get["lease"])
    eventually(lambda: type(mine.ask("get", get)[0].error) is errors.LeaseEnded, "the lease has ended")


def test_attach_ids_with_and_without_a_lock_never_meet(
    make_daemon: Callable[..., DaemonProcess], victim_of: Callable[..., Victim]
) -> None:
    daemon = make_daemon()
    victim, other = victim_of(daemon, "victim"), victim_of(daemon, "other")
    shared = Engine(daemon.port, "shared").start()
    lock = shared.ranks[0].client._attachment.lock
    assert lock is not None
    args = {"rank": 0, "world_size": 1, "groups": [], "layers": {}}
    stolen = {**args, "attach_id": lock.attach_id, "transport": "inline"}
    assert type(victim.control("attach", stolen).error) is errors.InvalidField
    lockless = {**args, "attach_id": INLINE_ATTACH_IDS + 1, "transport": "shared"}
    assert type(victim.control("attach", lockless).error) is errors.InvalidField
    session = [each for each in daemon.status().engines if each.engine_id == "other"]
    assert session
    twice = {**args, "attach_id": INLINE_ATTACH_IDS + 9, "transport": "inline"}
    assert other.control("attach", twice).error is None
    assert type(victim.control("attach", twice).error) is errors.AttachmentNotProven
    assert type(victim.control("attach", {**twice, "transport": "pigeon"}).error) is errors.InvalidField
    shared.stop()


def resident_bytes(daemon: DaemonProcess) -> int:
    """The daemon's own memory, without what it shares."""
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    [anonymous] = [line for line in lines if line.startswith("RssAnon:")]
    return int(anonymous.split()[1]) * 1024


def lookup_seconds(victim: Victim, count: int) -> float:
    """The median round trip of a lookup that takes no lease."""
    _, session = victim.engine.scheduler.link.identity
    args = {
        "request": "timed",
        "keys": join_keys(victim.keys),
        "prompt_tokens": len(PROMPT),
        "local_tokens": len(PROMPT),
    }
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        found = victim.control("lookup", args, session)
        taken.append(time.perf_counter() - began)
        assert found.result["hit_chunks"] == 4
    return statistics.median(taken)


def test_a_reader_that_does_not_read_slows_only_itself(
    make_daemon: Callable[..., DaemonProcess], victim_of: Callable[..., Victim]
) -> None:
    daemon = make_daemon(l1_size_gb=64 / 1024)
    victim = victim_of(daemon, "victim", BIG)
    other = victim_of(daemon, "other", BIG)
    victim.engine.save(PROMPT, seed=1)
    get = victim.located()
    assert get["length"] == BULK_FRAME_BYTES
    before = lookup_seconds(other, 300)
    small = resident_bytes(daemon)
    deaf = victim.bulk(RCVHWM=1, RCVBUF=4096, SNDHWM=0)
    asked = 40 * BULK_CREDITS
    for _ in range(asked):
        deaf.send("get", get)
    eventually(lambda: daemon.status().inline.stalled_peers == 1, "the peer is full")
    eventually(lambda: daemon.status().inline.answers_dropped > 0, "what is over its credits is dropped")
    grown = resident_bytes(daemon) - small
    assert grown < asked * BULK_FRAME_BYTES / 4, f"{grown} bytes wait for a peer that does not read"

    found = other.engine.lookup("other", PROMPT)
    [loaded] = other.engine.load("other", PROMPT, found)
    assert loaded.ok, loaded.reason
    other.engine.check_loaded(4, seed=1)
    assert lookup_seconds(other, 300) < 10 * before
    assert daemon.status().inline.stalled_peers == 1
    deaf.close()
    eventually(lambda: daemon.status().inline.stalled_peers == 0, "a peer that is gone is forgotten")
    with daemon.client() as client:
        assert client.call("ping", {}, Ping).phase == "ready"


def test_a_reader_that_pauses_gets_every_answer(
    make_daemon: Callable[..., DaemonProcess], victim_of: Callable[..., Victim]
) -> None:
    daemon = make_daemon(l1_size_gb=64 / 1024)
    victim = victim_of(daemon, "victim", BIG)
    victim.engine.save(PROMPT, seed=1)
    get = victim.located()
    slow = victim.bulk(RCVHWM=1, RCVBUF=4096)
    expected = slow.ask("get", get)[1]
    answered: set[int] = set()
    for _ in range(3):
        asked = {slow.send("get", get) for _ in range(3 * BULK_CREDITS)}
        time.sleep(0.3)
        for _ in asked:
            reply, data = slow.receive()
            assert reply.error is None
            assert data == expected
            answered.add(reply.request_id)
        assert asked <= answered
