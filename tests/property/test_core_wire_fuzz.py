"""Whatever a peer sends: a typed reply, nothing leaked, nothing broken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings

from appliance.errors import PagewardenError, RegistrationError, all_errors
from appliance.hashing import join_keys
from appliance.protocol import MAX_CONTROL_BYTES
from appliance.protocol.accounts import ACCOUNT_REQUESTS
from appliance.protocol.base import Role
from appliance.protocol.messages import REQUESTS
from appliance.protocol.wire import unpack_reply
from appliance.server.dispatch import Waiting
from tests.support.core_lockholder import lock_holder
from tests.support.core_store import chain, scratch_directory
from tests.support.core_wire import (
    Daemon,
    Peer,
    attach_args,
    lookup_args,
    register_args,
    reserve_args,
    store,
)

ATTACH, OTHER_ATTACH = 41, 42
ASKED = {"requested_by": "t", "requested_from": "h"}
KEYS = chain(1, 2, 3)
BOUNDED = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Target:
    """A daemon that serves an engine: objects stored, a lease held, a reservation open, another one in limbo."""

    def __init__(self, directory: Path) -> None:
        self.daemon = Daemon(directory)
        self.scheduler, self.worker = self.daemon.engine(ATTACH)
        self.admin = Peer(self.daemon, Role.ADMIN, "")
        user = {"name": "fuzz", "role": "viewer", "password_hash": "$argon2id$x", "create": True}
        self.admin.ask("set_user", user)
        store(self.worker, KEYS)
        self.lease = self.scheduler.ask("lookup", lookup_args(KEYS))["lease"]
        [self.reservation] = self.worker.ask("reserve", reserve_args(chain(7), groups=(0,)))["reservations"]
        self.namespace = self.daemon.core.store.by_slot[0].namespace.hex()
        self.peers = {Role.SCHEDULER: self.scheduler, Role.WORKER: self.worker, Role.ADMIN: self.admin}

    def settle(self) -> None:
        """Whatever a message with a flaw did to the engine, the next one meets it as it was."""
        if self.daemon.core.engines.engines["engine"].index is not self.daemon.core.store.by_slot[0]:
            self.scheduler.ask("register", register_args())
        assert self.daemon.core.engines.engines["engine"].index is self.daemon.core.store.by_slot[0]

    def check(self, body: bytes) -> None:
        """Send ``body``; a refusal must have changed nothing."""
        core = self.daemon.core
        before, failures = self.daemon.counts(), core.counters["handler_errors"]
        answer = self.daemon.handle(body)
        if answer is None:
            return
        sent = self.daemon.dispatcher.finish(answer, None) if isinstance(answer, Waiting) else answer.body
        assert len(sent) <= MAX_CONTROL_BYTES
        reply = unpack_reply(sent)
        assert core.counters["handler_errors"] == failures, f"no typed refusal: {reply.error}"
        if reply.error is not None:
            assert type(reply.error) in all_errors().values()
            assert reply.error.code != "internal"
            assert reply.error.message
            after = self.daemon.counts()
            if isinstance(
                reply.error, RegistrationError
            ):  # the engine is shown as refused, holding nothing new
                before, after = ({**each, "engines": None} for each in (before, after))
            assert after == before, f"a refusal left something behind: {reply.error}"
        account = core.arena.account()
        parts = account.free, account.reserved, account.occupied, account.draining, account.limbo
        assert sum(parts) == account.populated


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    directory = scratch_directory()
    with lock_holder(directory, ATTACH, OTHER_ATTACH):
        made = Target(directory)
        yield made
        # After all of it the daemon still serves: an honest engine gets what it asks.
        scheduler, worker = made.daemon.engine(OTHER_ATTACH, "afterwards", require_namespace=made.namespace)
        admin = Peer(made.daemon, Role.ADMIN, "")
        admin.ask("clear", {})
        store(worker, chain(90))
        assert scheduler.ask("lookup", lookup_args(chain(90)))["hit_chunks"] == 1
        admin.ask("status", {})
        made.daemon.close()


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 2, 63, 64, 2**31, 2**32 - 1, 2**32, 2**40, 2**63, 2**64 - 1]),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=40),
    st.just(b"k" * 32),
)
KEY_LIKE = st.one_of(st.text(max_size=4), st.integers(0, 9), st.binary(max_size=4), st.none(), st.booleans())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY_LIKE, inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x81" * 3000)
@example(b"\x91" * 100_000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"x" * (MAX_CONTROL_BYTES + 1))
@BOUNDED
def test_random_bytes(target, body):
    target.check(body)


@given(VALUES)
@BOUNDED
def test_random_messagepack(target, value):
    target.check(msgpack.packb(value))


@given(
    st.sampled_from(sorted(set(REQUESTS) - {"bye"})),
    VALUES,
    st.sampled_from(["v", "op", "id", "boot", "session", "args"]),
    VALUES,
)
@BOUNDED
def test_random_envelopes(target, op, args, field, value):
    envelope = {
        "v": 1,
        "op": op,
        "id": 2**40,
        "boot": target.daemon.core.boot,
        "session": target.scheduler.session,
        "args": args,
        field: value,
    }
    target.check(msgpack.packb(envelope))


def valid_args(target: Target) -> dict[str, dict[str, Any]]:
    return {
        "hello": {"role": "worker", "protocol": 1, "client": "c", "engine_id": "e", "host": "h", "pid": 1},
        "attach": attach_args(ATTACH),
        "register": register_args(require_namespace=target.namespace, max_batched_tokens=64),
        "heartbeat": {"leases": [target.lease], "stopped": [target.reservation], "segments_known": 0},
        "lookup": lookup_args(KEYS, local_tokens=0, refused_chunks=[5]),
        "locate": {
            "lease": target.lease,
            "request": "r",
            "hit_chunks": 3,
            "keys": join_keys(KEYS),
            "groups": [0, 0, 0, 1],
            "chunks": [0, 1, 2, 2],
            "words": [0, 0, 0, 0],
        },
        "release": {"leases": [3]},
        "reserve": {**reserve_args(chain(8)), "salt": b"s"},
        "commit": {"reservations": [5], "checksums": [6]},
        "abort": {"reservations": [5]},
        "loads": {
            "lease": 4,
            "request": "r",
            "objects": 1,
            "bytes_loaded": 1,
            "seconds": 0.5,
            "failed": [{"group": 1, "chunk": 0, "key": KEYS[0], "word": 99, "cause": "checksum"}],
        },
        "bye": {},
        "status": {},
        "ping": {},
        "clear": {"namespace": target.namespace, "requested_by": "t"},
        "set_ttl": {
            "name": "write_ttl_seconds",
            "value_seconds": 600.0,
            "namespace": "",
            "if_version": "",
            **ASKED,
        },
        "set_policy": {"policy": "LRU", "if_policy": "", **ASKED},
        "set_user": {
            "name": "fuzz",
            "role": "viewer",
            "password_hash": "$argon2id$x",
            "create": False,
            **ASKED,
        },
        "remove_user": {"name": "nobody", **ASKED},
        "add_token": {
            "token_id": os.urandom(6).hex(),
            "name": "ci",
            "owner": "fuzz",
            "role": "viewer",
            "scopes": ["status:read"],
            "secret_hash": "0" * 64,
            "lifetime_seconds": 60.0,
            **ASKED,
        },
        "revoke_token": {"token_id": "0" * 12, **ASKED},
        "open_login": {
            "login_id": os.urandom(6).hex(),
            "user": "fuzz",
            "secret_hash": "0" * 64,
            "lifetime_seconds": 60.0,
            "agent": "browser",
            **ASKED,
        },
        "end_login": {"login_id": "0" * 12, **ASKED},
        "note_access": {"tokens": ["0" * 12], "logins": ["0" * 12]},
        "note_audit": {"action": "login.fail", "subject": "fuzz", **ASKED},
        "accounts": {},
    }


ROLES = {
    "attach": Role.WORKER,
    "locate": Role.WORKER,
    "reserve": Role.WORKER,
    "commit": Role.WORKER,
    "abort": Role.WORKER,
    "loads": Role.WORKER,
    "register": Role.SCHEDULER,
    "lookup": Role.SCHEDULER,
    "release": Role.SCHEDULER,
    "heartbeat": Role.SCHEDULER,
    "clear": Role.ADMIN,
    "set_ttl": Role.ADMIN,
    "set_policy": Role.ADMIN,
    **dict.fromkeys(ACCOUNT_REQUESTS, Role.ADMIN),
}
HARMLESS = sorted({"hello", "ping", "status", *ROLES} - {"clear", "attach"})


def test_the_valid_messages_are_valid(target):
    """Else the mutations below would be refused for a dull reason."""
    for op, args in valid_args(target).items():
        if op not in ("bye", "clear"):
            peer = target.peers[ROLES.get(op, Role.SCHEDULER)]
            if op == "hello":
                Peer(target.daemon, Role.ADMIN, "")
            else:
                peer.ask(op, args)
    target.lease = target.scheduler.ask("lookup", lookup_args(KEYS))["lease"]


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of maps and lists."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*at, key))
    return found


@given(st.data())
@settings(parent=BOUNDED, max_examples=500)
def test_valid_messages_with_one_wrong_value(target, data):
    op = data.draw(st.sampled_from(HARMLESS))
    args = valid_args(target)[op]
    places = paths(args)
    if places and data.draw(st.sampled_from([True, True, True, False])):
        place = data.draw(st.sampled_from(places))
        at: Any = args
        for key in place[:-1]:
            at = at[key]
        kind = data.draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
        if kind == "replace" or not isinstance(at[place[-1]], list):
            at[place[-1]] = data.draw(VALUES)
        elif kind == "remove":
            del at[place[-1]]
        else:
            at[place[-1]] = at[place[-1]] * data.draw(st.sampled_from([2, 100]))
    else:
        args[data.draw(st.text(max_size=5))] = data.draw(VALUES)
    role = data.draw(st.sampled_from([ROLES.get(op, Role.SCHEDULER)] * 4 + list(Role)))
    peer = target.peers[role]
    target.check(msgpack.packb(envelope_of(peer, op, args)))
    target.settle()


def envelope_of(peer: Peer, op: str, args: dict[str, Any]) -> dict[str, Any]:
    peer.next_id += 1
    return {
        "v": 1,
        "op": op,
        "id": peer.next_id - 1,
        "boot": peer.daemon.core.boot,
        "session": peer.session,
        "args": args,
    }


@pytest.mark.parametrize(
    "op, changes",
    [
        ("register", {"world_size": 2**40}),
        ("register", {"world_size": 2**64 - 1}),
        ("register", {"max_batched_tokens": 2**64 - 1}),
        ("lookup", {"prompt_tokens": 2**64 - 1}),
        ("loads", {"bytes_loaded": 2**64 - 1}),
        ("loads", {"objects": 2**64 - 1}),
        ("loads", {"seconds": float("inf")}),
        ("locate", {"groups": [63], "chunks": [0], "words": []}),
        ("loads", {"failed": [{"group": 63, "chunk": 0, "key": KEYS[0], "word": 9, "cause": "checksum"}]}),
        ("reserve", {"groups": [63, 63]}),
        ("attach", {"rank": 2**62}),
        ("attach", {"world_size": 2**62}),
        ("set_ttl", {"value_seconds": float("nan")}),
        ("heartbeat", {"segments_known": 2**63}),
    ],
)
def test_huge_and_impossible_numbers_are_refused_by_name(target, op, changes):
    peer = target.peers[ROLES[op]]
    before = target.daemon.counts()
    with pytest.raises(PagewardenError) as caught:
        peer.ask(op, {**valid_args(target)[op], **changes})
    assert caught.value.code == "invalid_field"
    assert caught.value.details["field"].split(".")[0] in {*changes, "groups"}
    assert target.daemon.counts() == before


@pytest.mark.parametrize("deep", [16, 60, 400])
def test_facts_nested_without_end_are_refused(target, deep):
    nest: Any = 1
    for _ in range(deep):
        nest = {"a": nest}
    facts = register_args()["facts"]
    with pytest.raises(PagewardenError, match="nested deeper") as caught:
        target.scheduler.ask("register", register_args(facts={**facts, "extra": nest}))
    assert caught.value.code == "invalid_field"


def test_the_status_can_always_be_packed(target):
    """Counters that peers drive must stay in what a message can hold."""
    for _ in range(5):
        target.scheduler.ask("lookup", lookup_args(KEYS, prompt_tokens=2**32))
        target.worker.ask(
            "loads", {"lease": 1, "request": "r", "objects": 65536, "bytes_loaded": 2**40, "seconds": 1.0}
        )
    assert target.admin.ask("status", {})["engines"]
