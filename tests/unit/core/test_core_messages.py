"""Messages: closed schemas that survive MessagePack, and an envelope that is checked before anything is read."""

from __future__ import annotations

import inspect
from typing import Any

import msgpack
import pytest
from pydantic import BaseModel

from appliance.errors import (
    InvalidField,
    MalformedMessage,
    MessageTooLarge,
    PagewardenError,
    UnsupportedVersion,
)
from appliance.protocol import MAX_CONTROL_BYTES, PROTOCOL_VERSION, messages
from appliance.protocol.base import Lenient, Message, parse
from appliance.protocol.messages import REQUESTS
from appliance.protocol.wire import (
    Request,
    pack_error,
    pack_request,
    pack_result,
    salvage_request_id,
    unpack_reply,
    unpack_request,
)

KEY = bytes(range(32))
GROUP = {
    "index": 0,
    "name": "g",
    "kind": "sliding",
    "block_tokens": 16,
    "shards": 2,
    "replicas": 1,
    "context_shards": 1,
    "window_tokens": 100,
    "facts": {"page_bytes": 1, "nested": {"a": [1, 2.5, None, True, "x"]}},
}
SEGMENT = {"segment": 0, "path": "/a", "nonce": bytes(16), "extent_count": 4, "extent_bytes": 4096}
DIFFERENCE = {"field": "cache.dtype", "ours": "fp8", "theirs": None}
OTHER = {"namespace": "ab", "engines": ["e"], "differences": [DIFFERENCE]}
SETTLED = {
    "namespace": "ab",
    "chunk_tokens": 256,
    "read_lease_ttl_seconds": 300.0,
    "write_ttl_seconds": 600.0,
    "session_ttl_seconds": 600.0,
    "others": [OTHER],
    "notices": ["n"],
}
TTLS = {"read_lease_ttl_seconds": 1.0, "write_ttl_seconds": 2.0, "session_ttl_seconds": 3.0}
FAILED = {"group": 1, "chunk": 2, "key": KEY, "word": 2**64 - 1, "cause": "generation"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "Hello": {"role": "worker", "protocol": 1, "client": "c", "engine_id": "e", "host": "h", "pid": 7},
    "HelloResult": {
        "version": "1",
        "protocol": 1,
        "heartbeat_seconds": 2.0,
        "session_ttl_seconds": 600.0,
        "arena_dir": "/a",
    },
    "SegmentInfo": SEGMENT,
    "GroupFacts": GROUP,
    "WorkerGroup": {"index": 0, "shard": 1, "replica": 0, "held": True},
    "Attach": {
        "attach_id": 5,
        "rank": 0,
        "world_size": 2,
        "groups": [{"index": 0, "shard": 1, "replica": 0, "held": True}],
        "layers": {"l": {"dtype": "x"}},
    },
    "AttachResult": {"segments": [SEGMENT]},
    "Register": {
        "attach_id": 1,
        "world_size": 2,
        "facts": {"model": {"name": "m"}},
        "groups": [GROUP],
        "require_namespace": "ab",
        "max_batched_tokens": 9,
        "snapshots": "chosen",
    },
    "Difference": DIFFERENCE,
    "OtherNamespace": OTHER,
    "Settlement": SETTLED,
    "RegisterResult": {"settled": SETTLED, "waiting": ""},
    "Heartbeat": {"leases": [1, 2**64 - 1], "stopped": [3], "segments_known": 1},
    "HeartbeatResult": {
        "leases_ended": [1],
        "revoked": [2],
        "segments": [SEGMENT],
        "settled": SETTLED,
        "waiting": "w",
        "refused": {"code": "x"},
        **TTLS,
    },
    "Lookup": {
        "request": "r",
        "keys": KEY * 2,
        "prompt_tokens": 9,
        "local_tokens": 1,
        "refused_chunks": [0, 2**32 - 1],
    },
    "LookupResult": {
        "hit_chunks": 1,
        "attention_chunks": 2,
        "lease": 3,
        "snapshots": [2],
        "reason": "evicted",
        "detail": "d",
        "settled": True,
    },
    "Release": {"leases": [1]},
    "ReleaseResult": {"released": 1},
    "Locate": {
        "lease": 1,
        "request": "r",
        "hit_chunks": 2,
        "keys": KEY * 2,
        "groups": [0],
        "chunks": [1],
        "words": [3],
    },
    "LocateResult": {
        "lease": 1,
        "segments": [0],
        "words": [3],
        "lengths": [10],
        "checksums": [2**64 - 1],
        "run_counts": [1],
        "runs": bytes(8),
    },
    "Reserve": {
        "groups": [0],
        "chunks": [1],
        "keys": KEY,
        "parents": KEY,
        "lengths": [10],
        "salt": b"s" * 16,
    },
    "ReserveResult": {
        "grants": [0],
        "reservations": [7],
        "segments": [0],
        "words": [2],
        "run_counts": [1],
        "runs": bytes(8),
    },
    "Commit": {"reservations": [7], "checksums": [2**64 - 1]},
    "CommitResult": {"committed": 0, "refused": [7]},
    "Abort": {"reservations": [7]},
    "AbortResult": {"aborted": 1},
    "FailedLoad": FAILED,
    "Loads": {
        "lease": 1,
        "request": "r",
        "objects": 2,
        "bytes_loaded": 3,
        "seconds": 0.5,
        "failed": [FAILED],
    },
    "Empty": {},
    "Done": {},
    "Ping": {"uptime_seconds": 1.0, "phase": "ready"},
    "Clear": {"namespace": "", "requested_by": "me"},
    "ClearResult": {"epoch": 1, "removed_objects": 2, "removed_bytes": 3, "held_bytes": 4},
    "SetTtl": {"name": "write_ttl_seconds", "value_seconds": 1.5, "namespace": "", "requested_by": "me"},
    "SetTtlResult": {"before_seconds": 1.0, "after_seconds": 2.0},
    "Check": {"run": 1},
    "CheckFinding": {"kind": "k", "subject": "s", "sentence": "It is wrong."},
    "CheckResult": {
        "run": 1,
        "done": True,
        "clean": False,
        "failure": "",
        "seconds": 0.5,
        "looks": 2,
        "longest_look_ms": 0.1,
        "checked": {"rows": 1},
        "findings_total": 1,
        "findings": [{"kind": "k", "subject": "s", "sentence": "It is wrong."}],
        "notes": ["n"],
    },
}


def schemas() -> dict[str, type[BaseModel]]:
    found = inspect.getmembers(messages, inspect.isclass)
    return {
        name: cls
        for name, cls in found
        if issubclass(cls, BaseModel) and cls not in (BaseModel, Message, Lenient)
    }


def test_every_schema_has_an_example():
    assert set(schemas()) <= set(EXAMPLES), "add an example of what is new"


@pytest.mark.parametrize("name", sorted(schemas()))
def test_round_trip(name):
    cls, example = schemas()[name], EXAMPLES[name]
    assert {name for name, field in cls.model_fields.items() if field.is_required()} <= set(example)
    first = parse(cls, example)
    packed = msgpack.packb(first.model_dump(), use_bin_type=True)
    values = msgpack.unpackb(packed, raw=False)
    assert set(values) == set(cls.model_fields)
    assert {name: values[name] for name in example} == example, "what travels is what was said"
    assert parse(cls, values) == first


REQUEST_NAMES = sorted(name for name, cls in schemas().items() if issubclass(cls, Message))


@pytest.mark.parametrize("name", REQUEST_NAMES)
def test_requests_refuse_unknown_fields(name):
    with pytest.raises(InvalidField) as caught:
        parse(schemas()[name], {**EXAMPLES[name], "from_the_future": 1})
    assert caught.value.details["field"] == "from_the_future"


@pytest.mark.parametrize("name", sorted(set(schemas()) - set(REQUEST_NAMES)))
def test_results_ignore_what_a_newer_daemon_adds(name):
    assert parse(schemas()[name], {**EXAMPLES[name], "from_the_future": 1}) == parse(
        schemas()[name], EXAMPLES[name]
    )


@pytest.mark.parametrize("name", REQUEST_NAMES)
def test_requests_coerce_nothing(name):
    cls = schemas()[name]
    for field, value in EXAMPLES[name].items():
        wrong: Any = str(value) if not isinstance(value, str) else 1
        with pytest.raises(InvalidField) as caught:
            parse(cls, {**EXAMPLES[name], field: wrong})
        assert caught.value.details["field"].split(".")[0] == field
        assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "name, changes",
    [
        ("Lookup", {"keys": KEY + b"x"}),
        ("Locate", {"keys": KEY}),
        ("Locate", {"chunks": [2]}),
        ("Locate", {"chunks": [0, 1]}),
        ("Locate", {"words": [1, 2]}),
        ("Locate", {"hit_chunks": 0, "keys": b"", "groups": [], "chunks": [], "words": []}),
        ("Reserve", {"keys": KEY * 2}),
        ("Reserve", {"parents": b""}),
        ("Reserve", {"lengths": []}),
        ("Reserve", {"lengths": [0]}),
        ("Reserve", {"lengths": [2**41]}),
        ("Reserve", {"salt": b"s" * 17}),
        ("Reserve", {"groups": [64]}),
        ("Commit", {"checksums": []}),
        ("FailedLoad", {"key": KEY[:-1]}),
        ("FailedLoad", {"cause": "bad luck"}),
        ("Register", {"groups": []}),
        ("Register", {"world_size": 0}),
        ("Attach", {"attach_id": 0}),
        ("Attach", {"attach_id": 2**63}),
        ("Hello", {"client": ""}),
        ("Hello", {"client": "x" * 257}),
        ("Hello", {"role": "king"}),
        ("SetTtl", {"name": "lease_ttl_seconds"}),
        ("SetTtl", {"value_seconds": 0.0}),
        ("Heartbeat", {"leases": [-1]}),
        ("Heartbeat", {"leases": [2**64]}),
        ("Heartbeat", {"leases": [1] * 65_537}),
        ("Heartbeat", {"leases": [True]}),
        ("GroupFacts", {"facts": {1: 2}}),
        ("GroupFacts", {"facts": {"a": [{"b": {3: 4}}]}}),
    ],
)
def test_values_out_of_bounds(name, changes):
    with pytest.raises(InvalidField):
        parse(schemas()[name], {**EXAMPLES[name], **changes})


def test_every_operation_has_a_closed_schema():
    assert all(issubclass(cls, Message) for cls in REQUESTS.values())
    assert all(
        cls.model_config["extra"] == "forbid" and cls.model_config["strict"] for cls in REQUESTS.values()
    )


# --- the envelope ---------------------------------------------------------------------------------------------------


def envelope(**changes: Any) -> bytes:
    base = {"v": PROTOCOL_VERSION, "op": "ping", "id": 7, "boot": b"b" * 16, "session": b"s" * 16, "args": {}}
    return msgpack.packb({**base, **changes})


def test_requests_and_replies_round_trip():
    request = Request("lookup", 2**64 - 1, b"b" * 16, b"", {"a": [1, b"x", {"y": None}]})
    assert unpack_request(pack_request(request)) == request
    reply = unpack_reply(pack_result(5, b"b" * 16, {"x": 1}))
    assert (reply.request_id, reply.boot, reply.result, reply.error) == (5, b"b" * 16, {"x": 1}, None)
    reply = unpack_reply(pack_error(6, b"b" * 16, MalformedMessage("No.", remedy="Yes.", field="f")))
    assert type(reply.error) is MalformedMessage
    assert reply.error.details == {"field": "f"}


@pytest.mark.parametrize(
    "body, error",
    [
        (b"", MalformedMessage),
        (b"\xc1", MalformedMessage),
        (b"\x80\x80", MalformedMessage),
        (msgpack.packb([1]), MalformedMessage),
        (msgpack.packb({1: 2}), MalformedMessage),
        (msgpack.packb({"v": msgpack.ExtType(5, b"x")}), MalformedMessage),
        (msgpack.packb({"v": msgpack.Timestamp(1)}), MalformedMessage),
        (b"\x81\xa1v\xa1\xff", MalformedMessage),
        (bytes(MAX_CONTROL_BYTES + 1), MessageTooLarge),
        (msgpack.packb({}), UnsupportedVersion),
        (envelope(v=2), UnsupportedVersion),
        (envelope(v=True), UnsupportedVersion),
        (envelope(v="1"), UnsupportedVersion),
        (envelope(op=5), InvalidField),
        (envelope(op="x" * 65), InvalidField),
        (envelope(id=-1), InvalidField),
        (envelope(id=1.0), InvalidField),
        (envelope(id=True), InvalidField),
        (envelope(id=None), InvalidField),
        (envelope(boot=b"b" * 15), InvalidField),
        (envelope(session="s" * 16), InvalidField),
        (envelope(args=[]), InvalidField),
        (envelope(args=None), InvalidField),
    ],
)
def test_envelopes_that_are_refused(body, error):
    with pytest.raises(PagewardenError) as caught:
        unpack_request(body)
    assert type(caught.value) is error
    assert len(caught.value.message) < 300


def test_a_refusal_finds_its_sender():
    assert salvage_request_id(envelope(op=5)) == 7
    assert salvage_request_id(b"\xc1") == 0


def test_a_message_over_the_bound_is_not_sent():
    with pytest.raises(MessageTooLarge):
        pack_request(Request("reserve", 1, b"", b"", {"keys": bytes(MAX_CONTROL_BYTES)}))
    with pytest.raises(MessageTooLarge):
        pack_result(1, b"", {"runs": bytes(MAX_CONTROL_BYTES)})


@pytest.mark.parametrize(
    "body",
    [envelope(ok=True), envelope(ok=True, result=[]), envelope(ok=False), envelope(ok=False, error="x")],
)
def test_replies_that_are_no_replies(body):
    with pytest.raises(MalformedMessage):
        unpack_reply(body)
