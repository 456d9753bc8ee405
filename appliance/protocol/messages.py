"""The schema of every operation: what a request's ``args`` and a reply's ``result`` may hold.

Bulk columns (keys, extents) travel as byte strings: keys are 32 bytes each, extent runs are pairs of little-endian
``uint32`` (first extent, count). Durations are in seconds; no timestamp of one host is read by another.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from appliance.geometry import MAX_CHUNK_TOKENS, MAX_GROUPS, MAX_SHARDS, GroupKind, ObjectGroup
from appliance.hashing import KEY_BYTES
from appliance.protocol.accounts import Origin
from appliance.protocol.base import Lenient, LoadFailure, Message, MissReason, Role, Transport
from appliance.protocol.bounds import (
    MAX_ITEMS,
    MAX_KEYS,
    MAX_LEASES_NAMED,
    MAX_OBJECT_BYTES,
    MAX_RANKS,
    U32,
    U64,
    Bytes,
    Facts,
    GroupIndex,
    Keys,
    Name,
    Ranks,
    Tokens,
)
from appliance.protocol.retention import ADMIN_REQUESTS

# --- hello, attach, register -----------------------------------------------------------------------------------


class Hello(Message):
    """Opens a session. Any boot; the session id is the client's own random 16 bytes."""

    role: Annotated[Role, Field(strict=False)]
    protocol: int
    client: Name
    engine_id: Annotated[str, Field(max_length=256)] = ""
    host: Annotated[str, Field(max_length=256)] = ""
    pid: U32 = 0
    secret: Annotated[str, Field(max_length=128)] = ""


class HelloResult(Lenient):
    """What the daemon is."""

    version: str
    protocol: int
    heartbeat_seconds: float
    session_ttl_seconds: float
    arena_dir: str
    bulk_port: int = 0
    bulk_frame_bytes: int = 0
    bulk_credits: int = 0


class SegmentInfo(Lenient):
    """One file of the arena, enough to map it."""

    segment: int
    path: str
    nonce: bytes
    extent_count: int
    extent_bytes: int


class GroupFacts(Message):
    """One cache group as the scheduler describes it; ``facts`` enters the fingerprint."""

    index: GroupIndex
    name: Name
    kind: Annotated[GroupKind, Field(strict=False)]
    block_tokens: Annotated[int, Field(ge=1, le=MAX_CHUNK_TOKENS)]
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)]
    replicas: Ranks
    context_shards: Ranks = 1
    window_tokens: Tokens = 0
    facts: Facts

    def group(self) -> ObjectGroup:
        """The geometry of this group."""
        return ObjectGroup(
            index=self.index,
            name=self.name,
            kind=self.kind,
            block_tokens=self.block_tokens,
            shards=self.shards,
            replicas=self.replicas,
            context_shards=self.context_shards,
            window_tokens=self.window_tokens,
        )


class WorkerGroup(Message):
    """Which shard of a group a worker holds, and which of its replicas it is.

    ``held`` is false on a pipeline stage that has no layer of the group: its shards of the group do not exist.
    """

    index: GroupIndex
    shard: Annotated[int, Field(ge=0, lt=MAX_SHARDS)]
    replica: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    held: bool = True


class Attach(Message):
    """A worker enters under its engine's id, holding the lock file named after ``attach_id``.

    The message also says that no copy from before it is in flight: whatever this attach id held is free at once. With the
    transport *inline* the worker writes nothing itself and has no lock; its attach id is from ``INLINE_ATTACH_IDS`` on.
    """

    attach_id: Annotated[int, Field(ge=1, le=2**63 - 1)]
    rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    world_size: Ranks
    groups: Annotated[list[WorkerGroup], Field(max_length=MAX_GROUPS)]
    layers: dict[str, Facts]
    transport: Annotated[Transport, Field(strict=False)] = Transport.SHARED


class AttachResult(Lenient):
    """The arena to map; nothing where the transport is inline."""

    segments: list[SegmentInfo]


class Register(Message):
    """The scheduler describes the engine; the namespace is settled once all ranks have attached and agree.

    ``attach_id``, if not 0, names a lock file that the scheduler's process holds, so that its death ends its leases at
    once. ``snapshots`` is "chosen" where the engine can be asked for snapshots at boundaries, else why not.
    """

    attach_id: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    world_size: Ranks
    facts: Facts
    groups: Annotated[list[GroupFacts], Field(min_length=1, max_length=MAX_GROUPS)]
    require_namespace: Annotated[str, Field(max_length=64)] = ""
    max_batched_tokens: Tokens = 0
    snapshots: Annotated[str, Field(max_length=64)] = "chosen"


class Difference(Lenient):
    """One field in which another namespace of the same model differs."""

    field: str
    ours: Any = None
    theirs: Any = None


class OtherNamespace(Lenient):
    """A namespace of the same model whose bytes this engine must not read."""

    namespace: str
    engines: list[str]
    differences: list[Difference]


class Settlement(Lenient):
    """The outcome of a registration."""

    namespace: str
    chunk_tokens: int
    read_lease_ttl_seconds: float
    write_ttl_seconds: float
    session_ttl_seconds: float
    others: list[OtherNamespace] = []
    notices: list[str] = []


class RegisterResult(Lenient):
    """``settled`` is ``None`` while ranks are missing; the heartbeat brings it then."""

    settled: Settlement | None = None
    waiting: str = ""


# --- heartbeat --------------------------------------------------------------------------------------------------


class Heartbeat(Message):
    """Keeps the session, and exactly the leases it names; acknowledges revocations whose copies have stopped."""

    leases: Annotated[list[U64], Field(max_length=MAX_LEASES_NAMED)] = []
    stopped: Annotated[list[U64], Field(max_length=MAX_ITEMS)] = []
    segments_known: U32 = 0


class HeartbeatResult(Lenient):
    """What changed since the last one. ``revoked`` is repeated until it is acknowledged."""

    leases_ended: list[int] = []
    revoked: list[int] = []
    segments: list[SegmentInfo] = []
    settled: Settlement | None = None
    waiting: str = ""
    refused: dict[str, Any] | None = None
    read_lease_ttl_seconds: float
    write_ttl_seconds: float
    session_ttl_seconds: float


# --- lookup, locate, release ------------------------------------------------------------------------------------


def _whole_keys(joined: bytes, name: str) -> None:
    if len(joined) % KEY_BYTES:
        raise ValueError(f"'{name}' holds {len(joined)} bytes, no whole number of {KEY_BYTES}-byte keys")


class Lookup(Message):
    """Asks how much of a prompt can be loaded; ``keys`` are those of its whole chunks, in order."""

    request: Name
    keys: Keys
    prompt_tokens: Tokens
    local_tokens: Tokens = 0
    refused_chunks: Annotated[list[U32], Field(max_length=MAX_KEYS)] = []

    @model_validator(mode="after")
    def _check(self) -> Lookup:
        _whole_keys(self.keys, "keys")
        return self


class LookupResult(Lenient):
    """The longest hit that every group and shard can serve, in chunks, and the lease on exactly its objects.

    ``lease`` is 0 where nothing is to be loaded. ``snapshots`` are the boundaries (in chunks) that deserve a
    snapshot for this prompt. ``attention_chunks`` says how far attention alone would reach.
    """

    hit_chunks: int
    attention_chunks: int = 0
    lease: int = 0
    snapshots: list[int] = []
    reason: MissReason | None = None
    detail: str = ""
    settled: bool = True


class Release(Message):
    """Ends leases; one that ended already is no error."""

    leases: Annotated[list[U64], Field(max_length=MAX_LEASES_NAMED)]


class ReleaseResult(Lenient):
    """How many of them were still held."""

    released: int


class Locate(Message):
    """A worker asks where the objects of its own shards lie under a lease.

    ``groups[i]`` and ``chunks[i]`` name the object i asked for; ``keys`` are the keys of chunks
    ``first_chunk .. hit_chunks - 1`` so that any boot can restore the hold. ``words``, if given, are the commit words of
    an earlier answer: an object whose word changed counts as lost.
    """

    lease: U64
    request: Name
    hit_chunks: Annotated[int, Field(ge=1, le=MAX_KEYS)]
    keys: Keys
    groups: Annotated[list[GroupIndex], Field(max_length=MAX_ITEMS)]
    chunks: Annotated[list[U32], Field(max_length=MAX_ITEMS)]
    words: Annotated[list[U64], Field(max_length=MAX_ITEMS)] = []

    @model_validator(mode="after")
    def _check(self) -> Locate:
        _whole_keys(self.keys, "keys")
        if len(self.keys) != self.hit_chunks * KEY_BYTES:
            raise ValueError(f"'keys' holds {len(self.keys) // KEY_BYTES} keys for {self.hit_chunks} chunks")
        if len(self.groups) != len(self.chunks):
            raise ValueError("'groups' and 'chunks' differ in length")
        if self.words and len(self.words) != len(self.groups):
            raise ValueError("'words' and 'groups' differ in length")
        if self.chunks and max(self.chunks) >= self.hit_chunks:
            raise ValueError(f"chunk {max(self.chunks)} lies beyond the hit of {self.hit_chunks} chunks")
        return self


class LocateResult(Lenient):
    """One entry per object asked for, in order; ``runs`` holds ``run_counts[i]`` pairs for object i.

    ``lease`` is the lease to release afterwards: another one than asked for if the hold had to be restored.
    """

    lease: int
    segments: list[int]
    words: list[int]
    lengths: list[int]
    checksums: list[int]
    run_counts: list[int]
    runs: bytes


# --- reserve, commit, abort -----------------------------------------------------------------------------------------


class Reserve(Message):
    """A worker asks for memory for objects of its own shards; columns are of equal length."""

    groups: Annotated[list[GroupIndex], Field(max_length=MAX_ITEMS)]
    chunks: Annotated[list[U32], Field(max_length=MAX_ITEMS)]
    keys: Keys
    parents: Keys
    lengths: Annotated[list[Annotated[int, Field(ge=1, le=MAX_OBJECT_BYTES)]], Field(max_length=MAX_ITEMS)]
    salt: Annotated[bytes, Field(max_length=16)] = b""

    @model_validator(mode="after")
    def _check(self) -> Reserve:
        count = len(self.groups)
        if len(self.chunks) != count or len(self.lengths) != count:
            raise ValueError("'groups', 'chunks' and 'lengths' differ in length")
        if len(self.keys) != count * KEY_BYTES or len(self.parents) != count * KEY_BYTES:
            raise ValueError(f"'keys' and 'parents' must hold {count} keys of {KEY_BYTES} bytes each")
        return self


class ReserveResult(Lenient):
    """One grant per object asked for; the other columns hold 0 (and no runs) where nothing was granted."""

    grants: list[int]
    reservations: list[int]
    segments: list[int]
    words: list[int]
    run_counts: list[int]
    runs: bytes


class Commit(Message):
    """The copies of these reservations are complete and fenced."""

    reservations: Annotated[list[U64], Field(max_length=MAX_ITEMS)]
    checksums: Annotated[list[U64], Field(max_length=MAX_ITEMS)]

    @model_validator(mode="after")
    def _check(self) -> Commit:
        if len(self.reservations) != len(self.checksums):
            raise ValueError("'reservations' and 'checksums' differ in length")
        return self


class CommitResult(Lenient):
    """``refused`` had ended before this commit: their objects are not in the cache."""

    committed: int
    refused: list[int] = []


class Abort(Message):
    """The copies of these reservations have stopped and will not be committed."""

    reservations: Annotated[list[U64], Field(max_length=MAX_ITEMS)]


class AbortResult(Lenient):
    """How many of them were still held."""

    aborted: int


# --- loads, bye, admin ------------------------------------------------------------------------------------------------


class FailedLoad(Message):
    """One object that a worker located but could not use."""

    group: GroupIndex
    chunk: U32
    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    word: U64
    cause: Annotated[LoadFailure, Field(strict=False)]


class Loads(Message):
    """A worker reports a finished load: exactly once, failed or not."""

    lease: U64
    request: Name
    objects: Annotated[int, Field(ge=0, le=MAX_ITEMS)]
    bytes_loaded: Bytes
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    failed: Annotated[list[FailedLoad], Field(max_length=MAX_ITEMS)] = []


class Empty(Message):
    """No arguments."""


class Done(Lenient):
    """Nothing more to say."""


class Ping(Lenient):
    """The loop is alive."""

    uptime_seconds: float
    phase: str


class Clear(Message):
    """Forgets every object of a namespace, or of all of them. Durable before it is acknowledged."""

    namespace: Annotated[str, Field(max_length=64)] = ""
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class ClearResult(Lenient):
    """What the clear removed, and what stays in memory until its readers are done."""

    epoch: int
    removed_objects: int
    removed_bytes: int
    held_bytes: int


class SetTtl(Message):
    """Changes a TTL (null: takes its change back), if the TTLs still have that version. Durable like a clear."""

    name: Annotated[str, Field(pattern="^(read_lease|write|session)_ttl_seconds$")]
    value_seconds: Annotated[float | None, Field(gt=0, le=10_000_000)]
    namespace: Annotated[str, Field(max_length=64)] = ""
    if_version: Annotated[str, Field(max_length=64)] = ""
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class SetTtlResult(Lenient):
    """The value in force before and after, and the version of the TTLs afterwards."""

    before_seconds: float
    after_seconds: float
    version: str = ""


class Check(Message):
    """Starts a consistency check, or joins the one under way, where ``run`` is 0; else asks how that one stands."""

    run: U32 = 0


class CheckFinding(Lenient):
    """One thing that does not add up: ``sentence`` names ``subject`` and says what is wrong with it."""

    kind: str
    subject: str
    sentence: str


class CheckResult(Lenient):
    """How a check stands. ``findings``, at most 500 of them, and ``notes`` come when it is ``done``.

    ``clean`` is whether it is done and found nothing. ``failure`` says why it could not be carried through.
    ``longest_look_ms`` is the longest time for which it kept the daemon's loop from its peers.
    """

    run: int
    done: bool
    clean: bool
    failure: str = ""
    seconds: float
    looks: int
    longest_look_ms: float
    checked: dict[str, int]
    findings_total: int
    findings: list[CheckFinding] = []
    notes: list[str] = []


REQUESTS: dict[str, type[Message]] = {
    "hello": Hello,
    "attach": Attach,
    "register": Register,
    "heartbeat": Heartbeat,
    "lookup": Lookup,
    "locate": Locate,
    "release": Release,
    "reserve": Reserve,
    "commit": Commit,
    "abort": Abort,
    "loads": Loads,
    "bye": Empty,
    "status": Empty,
    "ping": Empty,
    "clear": Clear,
    "set_ttl": SetTtl,
    "check": Check,
    **ADMIN_REQUESTS,
}
"""Every operation of this protocol version."""
