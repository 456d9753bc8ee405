"""Broken, hostile and slow peers against a live daemon: typed answers, and everybody else is served."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import msgpack
import pytest
import zmq

from appliance import errors
from appliance.hashing import join_keys
from appliance.protocol import MAX_CONTROL_BYTES, PROTOCOL_VERSION
from appliance.protocol.client import endpoint_of
from appliance.protocol.messages import ClearResult, Ping, ReserveResult
from appliance.protocol.wire import Reply, Request, pack_request, unpack_reply
from tests.support.daemon import DaemonProcess
from tests.support.engine import Engine, Rank
from tests.support.waiting import eventually

PROMPT = list(range(5000, 5000 + 32 * 4 + 5))


@pytest.fixture
def dealer() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Raw sockets."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def connect(port: int, **options: int) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(endpoint_of("127.0.0.1", port))
        sockets.append(socket)
        return socket

    yield connect
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def exchange(socket: zmq.Socket[bytes], body: bytes) -> Reply:
    socket.send(body)
    assert socket.poll(10_000), "no reply at all"
    return unpack_reply(socket.recv())


def envelope(**fields: object) -> bytes:
    base = {"v": PROTOCOL_VERSION, "op": "ping", "id": 7, "boot": b"", "session": b"", "args": {}}
    return bytes(msgpack.packb({**base, **fields}))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", errors.MalformedMessage),
        (b"\xc1", errors.MalformedMessage),
        (os.urandom(500), errors.MalformedMessage),
        (bytes(msgpack.packb([1, 2, 3])), errors.MalformedMessage),
        (bytes(msgpack.packb({1: 2})), errors.MalformedMessage),
        (bytes(msgpack.packb({"v": msgpack.ExtType(4, b"x")})), errors.MalformedMessage),
        (envelope(v=99), errors.UnsupportedVersion),
        (envelope(op="destroy"), errors.UnknownOperation),
        (envelope(op=5), errors.InvalidField),
        (envelope(id=-1), errors.InvalidField),
        (envelope(boot=b"short"), errors.InvalidField),
        (envelope(args=[]), errors.InvalidField),
        (envelope(op="status", args={"surplus": 1}), errors.InvalidField),
        (envelope(op="lookup", session=b"x" * 16), errors.UnknownSession),
        (envelope(op="lookup", session=b"x" * 16, boot=b"y" * 16), errors.BootChanged),
        (
            envelope(op="hello", session=b"x" * 16, args={"role": "king", "protocol": 1, "client": "c"}),
            errors.InvalidField,
        ),
        (
            envelope(op="hello", session=b"x" * 16, args={"role": "admin", "protocol": 9, "client": "c"}),
            errors.UnsupportedVersion,
        ),
    ],
)
def test_every_broken_message_gets_a_typed_reply(
    make_daemon: Callable[..., DaemonProcess],
    dealer: Callable[..., zmq.Socket[bytes]],
    body: bytes,
    expected: type[errors.PagewardenError],
) -> None:
    daemon = make_daemon()
    reply = exchange(dealer(daemon.port), body)
    assert type(reply.error) is expected, reply.error
    with daemon.client() as client:
        assert client.call("ping", {}, Ping).phase == "ready"


def test_a_message_over_the_bound_ends_its_connection_and_nothing_else(
    make_daemon: Callable[..., DaemonProcess], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    daemon = make_daemon()
    socket = dealer(daemon.port)
    socket.send(b"x" * (MAX_CONTROL_BYTES + 1))
    assert not socket.poll(300)
    multipart = dealer(daemon.port)
    multipart.send_multipart([b"a", b"b", b"c"])
    with daemon.client() as client:
        assert client.call("ping", {}, Ping).phase == "ready"
    eventually(lambda: daemon.status().counters.get("messages_malformed") == 1, "it was counted")


def test_what_an_undeliverable_reply_granted_is_taken_back(
    make_daemon: Callable[..., DaemonProcess], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    daemon = make_daemon(heartbeat_seconds=30.0)
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    link = engine.scheduler.link
    keys, _ = engine.keys(PROMPT)
    args = {"request": "r", "keys": join_keys(keys), "prompt_tokens": len(PROMPT)}
    deaf = dealer(daemon.port, RCVHWM=1, SNDHWM=0, RCVBUF=4096)
    count = 40_000
    for number in range(count):
        deaf.send(pack_request(Request("lookup", 2**40 + number, link._boot, link._session, args)))
    eventually(lambda: daemon.status().counters["requests_lookup"] >= count, "all were handled", seconds=60)
    status = daemon.status()
    undelivered = status.lease_end_causes["undelivered"]
    assert 0 < undelivered <= status.counters["replies_undeliverable"]
    assert status.leases_total == count - undelivered
    engine.stop()
    eventually(lambda: daemon.status().leases_total == 0, "the rest ends with the session")


def test_roles_and_attachments_are_enforced(
    make_daemon: Callable[..., DaemonProcess], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    socket = dealer(daemon.port)
    scheduler, worker = engine.scheduler.link, engine.ranks[0].client.link

    def ask(op: str, link: object, args: dict[str, object]) -> Reply:
        ask.number += 1  # type: ignore[attr-defined]
        session, boot = link._session, link._boot  # type: ignore[attr-defined]
        return exchange(socket, pack_request(Request(op, ask.number, boot, session, dict(args))))  # type: ignore[attr-defined]

    ask.number = 2**40  # type: ignore[attr-defined]
    empty = {"groups": [], "chunks": [], "keys": b"", "parents": b"", "lengths": []}
    assert type(ask("reserve", scheduler, empty).error) is errors.WrongRole
    lookup = {"request": "r", "keys": b"", "prompt_tokens": 1}
    assert type(ask("lookup", worker, lookup).error) is errors.WrongRole
    assert type(ask("clear", worker, {}).error) is errors.WrongRole
    one = {"groups": [9], "chunks": [0], "keys": b"k" * 32, "parents": b"p" * 32, "lengths": [10]}
    assert type(ask("reserve", worker, one).error) is errors.InvalidField
    huge = {**one, "groups": [0], "lengths": [2**39]}
    granted = ReserveResult.model_validate(ask("reserve", worker, huge).result)
    assert granted.reservations == [0]
    fake = {"attach_id": 12345, "rank": 0, "world_size": 1, "groups": [], "layers": {}}
    assert type(ask("attach", worker, fake).error) is errors.AttachmentNotProven
    stolen = {**fake, "attach_id": engine.ranks[0].client._attachment.lock.attach_id}  # type: ignore[union-attr]
    other = Rank(daemon.port, "thief", engine.shape, 0, 1)
    other.client.start()
    eventually(lambda: other.client.health.state == "joined", "joined")
    assert type(ask("attach", other.client.link, stolen).error) is errors.AttachmentNotProven
    other.client.stop()
    engine.stop()


def test_a_repeated_request_is_answered_from_memory(
    make_daemon: Callable[..., DaemonProcess], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    worker = engine.ranks[0].client.link
    keys, parents = engine.keys(PROMPT)
    reserve = {"groups": [0], "chunks": [0], "keys": keys[0], "parents": parents[0], "lengths": [4096]}
    socket = dealer(daemon.port)

    def ask(op: str, number: int, args: dict[str, object]) -> Reply:
        return exchange(socket, pack_request(Request(op, number, worker._boot, worker._session, args)))

    first, again = (ask("reserve", 2**40, dict(reserve)) for _ in range(2))
    assert first.result == again.result
    [reservation] = first.result["reservations"]
    commit = {"reservations": [reservation], "checksums": [1]}
    assert [ask("commit", 2**40 + 1, dict(commit)).result["committed"] for _ in range(2)] == [1, 1]
    assert ask("commit", 2**40 + 2, dict(commit)).result == {"committed": 0, "refused": [reservation]}
    assert ask("reserve", 2**40 + 3, dict(reserve)).result["grants"] == [1]
    assert daemon.status().l1.objects == 1
    engine.stop()


def test_releasing_twice_harms_nobody_and_a_foreign_lease_cannot_be_released(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    first, second = Engine(daemon.port, "first").start(), Engine(daemon.port, "second").start()
    first.save(PROMPT, seed=1)
    found = first.lookup("r", PROMPT)
    with second.scheduler._lock:
        second.scheduler._held.add(found.lease)
    second.scheduler.release(found.lease)
    first.scheduler.release(found.lease)
    first.scheduler.release(found.lease)
    eventually(lambda: daemon.status().lease_end_causes == {"released": 1}, "released once")
    first.stop()
    second.stop()


def test_a_namespace_can_be_cleared_alone_and_the_engine_sees_it(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    first = Engine(daemon.port, "first").start()
    second = Engine(daemon.port, "second", rank_options={"layer_facts": {"backend": "OTHER"}}).start()
    first.save(PROMPT, seed=1)
    second.save(PROMPT, seed=1)
    settlement = first.scheduler.settlement
    assert settlement is not None
    with daemon.client(10.0) as client:
        with pytest.raises(errors.NotFound):
            client.call("clear", {"namespace": "0" * 32}, ClearResult)
        done = client.call("clear", {"namespace": settlement.namespace}, ClearResult)
    assert done.removed_objects == 5
    assert first.lookup("r", PROMPT).hit_chunks == 0
    assert second.lookup("r", PROMPT).hit_chunks == 4
    first.stop()
    second.stop()


def test_a_required_namespace_that_does_not_match_is_refused_with_the_fields(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    first = Engine(daemon.port, "first").start()
    settlement = first.scheduler.settlement
    assert settlement is not None
    other = Engine(
        daemon.port,
        "other",
        rank_options={"layer_facts": {"backend": "OTHER"}},
        require_namespace=settlement.namespace,
    ).start(settled=False)

    def refused() -> bool:
        engines = {engine.engine_id: engine for engine in daemon.status().engines}
        return "other" in engines and engines["other"].state == "refused"

    eventually(refused, "the registration is refused")
    [engine] = [engine for engine in daemon.status().engines if engine.engine_id == "other"]
    assert "layers.layer.0.0.backend" in engine.reason
    assert other.scheduler.chunk_tokens is None
    other.stop()
    same = Engine(daemon.port, "same", require_namespace=settlement.namespace).start()
    same.stop()
    first.stop()


def test_an_idle_peer_s_silence_makes_it_suspect_and_then_ends_it(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon(session_ttl_seconds=2.0)
    with daemon.client() as client:
        client.call("clear", {}, ClearResult)
    time.sleep(0.1)
    eventually(lambda: daemon.status().counters.get("sessions_ended_ttl") == 1, "the silent session ends")
