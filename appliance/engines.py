"""Engines: workers attach, the scheduler registers, and the namespace is settled once all of them agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from appliance.errors import NamespaceMismatch, PagewardenError, RanksDisagree
from appliance.fingerprint import Fingerprint, assemble, differences, merge_layers
from appliance.geometry import GroupKind, ObjectGroup, check_groups, negotiate_chunk_tokens
from appliance.l1.index import NamespaceIndex
from appliance.planning.expected import PlannedBlocks, deviation, registered_block_tokens
from appliance.protocol.messages import Attach, Difference, OtherNamespace, Register, WorkerGroup

MAX_DIFFERENCES_SHOWN = 32


class EngineState(StrEnum):
    """The life of an engine.

    ::

        REGISTERING ──scheduler and all ranks agree──► READY
           ▲  │                                          │
           │  └──they cannot be one engine──► REFUSED    │
           │                                     │       │
           └──a rank or the scheduler left or came again─┘
    """

    REGISTERING = "registering"
    READY = "ready"
    REFUSED = "refused"


@dataclass(slots=True)
class Counts:
    """What an engine has asked and got, since it was first seen."""

    lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    loads: int = 0
    load_failures: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    objects_stored: int = 0


@dataclass(slots=True)
class Engine:
    """One serving instance."""

    engine_id: str
    state: EngineState = EngineState.REGISTERING
    reason: str = "waiting for the scheduler to register"
    scheduler: bytes = b""
    registration: Register | None = None
    workers: dict[int, tuple[bytes, Attach]] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    index: NamespaceIndex | None = None
    error: PagewardenError | None = None
    notices: list[str] = field(default_factory=list)
    planned_block_tokens: int = 0
    deviation: str = ""
    counts: Counts = field(default_factory=Counts)
    first_seen_unix: float = 0.0

    @property
    def sessions(self) -> list[bytes]:
        """Sessions of its scheduler and its ranks."""
        return [
            *([self.scheduler] if self.scheduler else []),
            *(session for session, _ in self.workers.values()),
        ]


@dataclass(slots=True)
class EngineTable:
    """All engines that have a session, and every fingerprint seen by this boot.

    ``make_index`` gives the index of a settled namespace.
    """

    minimum_chunk_tokens: int
    make_index: Callable[[Fingerprint, list[ObjectGroup], int], NamespaceIndex]
    planned: PlannedBlocks = field(default_factory=PlannedBlocks)
    engines: dict[str, Engine] = field(default_factory=dict)
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    _difference_cache: dict[tuple[str, str], list[Difference]] = field(default_factory=dict)

    def engine(self, engine_id: str, now_unix: float) -> Engine:
        """The engine of an id, made when it is first named."""
        engine = self.engines.get(engine_id)
        if engine is None:
            engine = self.engines[engine_id] = Engine(engine_id, first_seen_unix=now_unix)
        return engine

    def attach(self, engine: Engine, session: bytes, attach: Attach) -> bytes:
        """A worker came; returns the session it replaces (empty if none)."""
        replaced = engine.workers.get(attach.rank, (b"", attach))[0]
        engine.workers[attach.rank] = (session, attach)
        self._unsettle(engine)
        self.settle(engine)
        return replaced if replaced != session else b""

    def register(self, engine: Engine, session: bytes, registration: Register) -> bytes:
        """The scheduler came; returns the session it replaces (empty if none).

        Raises:
            RegistrationError: if the engine cannot be served as it described itself.
        """
        check_groups([facts.group() for facts in registration.groups])
        replaced = engine.scheduler
        engine.scheduler = session
        engine.registration = registration
        self._unsettle(engine)
        self.settle(engine)
        if engine.error is not None:
            raise engine.error
        return replaced if replaced != session else b""

    def leave(self, engine: Engine, session: bytes) -> None:
        """A session of the engine ended."""
        if engine.scheduler == session:
            engine.scheduler = b""
            engine.registration = None
        engine.workers = {rank: each for rank, each in engine.workers.items() if each[0] != session}
        if engine.sessions:
            self._unsettle(engine)
            self.settle(engine)
        else:
            self.engines.pop(engine.engine_id, None)

    def _unsettle(self, engine: Engine) -> None:
        engine.state = EngineState.REGISTERING
        engine.index = None
        engine.error = None
        engine.notices = []
        engine.deviation = ""

    def settle(self, engine: Engine) -> None:
        """Give the engine its namespace if the scheduler and all ranks are there and agree."""
        registration = engine.registration
        if registration is None:
            engine.reason = "waiting for the scheduler to register"
            return
        missing = [rank for rank in range(registration.world_size) if rank not in engine.workers]
        if missing:
            engine.reason = f"waiting for ranks {missing} of {registration.world_size} to attach"
            return
        try:
            fingerprint, groups, chunk_tokens = self._agree(registration, engine)
        except PagewardenError as error:
            engine.state, engine.error, engine.reason = EngineState.REFUSED, error, str(error)
            return
        self.fingerprints[fingerprint.namespace] = fingerprint
        engine.fingerprint = fingerprint
        engine.index = self.make_index(fingerprint, groups, chunk_tokens)
        engine.planned_block_tokens = self.planned.for_model(fingerprint.model)
        engine.deviation = deviation(engine.planned_block_tokens, registered_block_tokens(groups))
        engine.notices = [
            *([engine.deviation] if engine.deviation else []),
            *notices(registration, groups, chunk_tokens),
        ]
        engine.state, engine.reason = EngineState.READY, "serving"

    def _agree(self, registration: Register, engine: Engine) -> tuple[Fingerprint, list[ObjectGroup], int]:
        workers = {
            rank: attach for rank, (_, attach) in engine.workers.items() if rank < registration.world_size
        }
        groups = _existing_shards([facts.group() for facts in registration.groups], workers)
        layers = merge_layers({rank: attach.layers for rank, attach in workers.items()})
        chunk_tokens = negotiate_chunk_tokens(self.minimum_chunk_tokens, groups)
        group_facts = [
            {
                **facts.facts,
                "kind": facts.kind.value,
                "block_tokens": facts.block_tokens,
                "shards": facts.shards,
                "context_shards": facts.context_shards,
                "window_tokens": facts.window_tokens,
                # Which stage has which layers decides what a shard's bytes are.
                "absent_shards": list(group.absent_shards),
            }
            for facts, group in zip(registration.groups, groups, strict=True)
        ]
        fingerprint = assemble(registration.facts, group_facts, layers, chunk_tokens)
        required = registration.require_namespace
        if required and required != fingerprint.namespace:
            raise self._mismatch(required, fingerprint)
        return fingerprint, groups, chunk_tokens

    def _mismatch(self, required: str, fingerprint: Fingerprint) -> NamespaceMismatch:
        other = self.fingerprints.get(required)
        fields = [entry.field for entry in differences(fingerprint.record, other.record)] if other else []
        told = (
            f"They differ in {', '.join(fields[:MAX_DIFFERENCES_SHOWN])}."
            if fields
            else "No engine has it now."
        )
        return NamespaceMismatch(
            f"The engine requires namespace {required} but its fingerprint gives {fingerprint.namespace}. {told}",
            remedy="Start the engine with the settings of the engine whose bytes it should share.",
            required=required,
            namespace=fingerprint.namespace,
            fields=fields,
        )

    # --- other namespaces of the same model ---------------------------------------------------------------------

    def others(self, fingerprint: Fingerprint) -> list[OtherNamespace]:
        """Namespaces of the same model that this one must not share with, and why."""
        return [
            OtherNamespace(
                namespace=other.namespace,
                engines=self.engines_of(other.namespace),
                differences=self.differences(fingerprint, other),
            )
            for other in self.fingerprints.values()
            if other.model == fingerprint.model and other.namespace != fingerprint.namespace
        ]

    def differences(self, ours: Fingerprint, theirs: Fingerprint) -> list[Difference]:
        """The fields in which two fingerprints differ, cut to what a person can read."""
        pair = ours.namespace, theirs.namespace
        if pair not in self._difference_cache:
            self._difference_cache[pair] = [
                Difference(field=entry.field, ours=_short(entry.ours), theirs=_short(entry.theirs))
                for entry in differences(ours.record, theirs.record)[:MAX_DIFFERENCES_SHOWN]
            ]
        return self._difference_cache[pair]

    def engines_of(self, namespace: str) -> list[str]:
        """Ids of the engines that have a namespace now."""
        return [
            engine.engine_id
            for engine in self.engines.values()
            if engine.state is EngineState.READY
            and engine.fingerprint is not None
            and engine.fingerprint.namespace == namespace
        ]


def _existing_shards(groups: list[ObjectGroup], workers: dict[int, Attach]) -> list[ObjectGroup]:
    """The groups with the shards that do not exist: pipeline stages without a layer of the group hold none of it.

    Raises:
        RanksDisagree: if a worker names what the scheduler does not know, or a shard or replica has no worker.
    """
    for rank, attach in workers.items():
        if attach.world_size != len(workers) or [group.index for group in attach.groups] != list(
            range(len(groups))
        ):
            raise RanksDisagree(
                f"Rank {rank} speaks of {attach.world_size} ranks and {len(attach.groups)} cache groups, "
                f"the scheduler of {len(workers)} ranks and {len(groups)} groups.",
                remedy="Start every rank of the engine with the same settings.",
            )
        for mine, group in zip(attach.groups, groups, strict=True):
            if mine.shard >= group.shards or mine.replica >= group.replicas:
                raise RanksDisagree(
                    f"Rank {rank} holds shard {mine.shard}, replica {mine.replica} of group {group.index}, "
                    f"which has {group.shards} shards and {group.replicas} replicas."
                )
    return [
        replace(
            group,
            absent_shards=_absent_shards(group, [each.groups[group.index] for each in workers.values()]),
        )
        for group in groups
    ]


def _absent_shards(group: ObjectGroup, named: list[WorkerGroup]) -> tuple[int, ...]:
    held = {(each.shard, each.replica) for each in named if each.held}
    absent = {(each.shard, each.replica) for each in named if not each.held}
    everyone = {(shard, replica) for shard in range(group.shards) for replica in range(group.replicas)}
    unnamed = sorted({shard for shard, _ in everyone - held - absent})
    if unnamed:
        raise RanksDisagree(
            f"No rank holds shards {unnamed} of group {group.index} in all of their {group.replicas} replicas; "
            "no prompt could ever be hit."
        )
    absent_shards = {shard for shard, _ in absent}
    if not held or absent_shards & {shard for shard, _ in held}:
        raise RanksDisagree(
            f"Ranks disagree whether shards {sorted(absent_shards)} of group {group.index} have layers."
        )
    return tuple(sorted(absent_shards))


def notices(registration: Register, groups: list[ObjectGroup], chunk_tokens: int) -> list[str]:
    """What an admin should know of how this engine is set up."""
    found = []
    if registration.snapshots != "chosen":
        found.append(f"Snapshots cannot be asked for on this engine version ({registration.snapshots}).")
    budget = registration.max_batched_tokens
    recurrent = [group for group in groups if group.kind is GroupKind.RECURRENT]
    if budget and recurrent:
        n = recurrent[0].unit_tokens
        if budget < n:
            found.append(
                f"The token budget {budget} is below the block size {n}: works since vLLM 0.28, with more than one "
                "step a block."
            )
        elif budget < 2 * n:
            found.append(f"The token budget {budget} lies in [{n}, {2 * n}): one block a step.")
        else:
            found.append(
                f"The token budget {budget} spans {budget // n} blocks of {n} a step; states are kept where a lookup "
                "asked for them and at the end of each prompt."
            )
    if recurrent and chunk_tokens > recurrent[0].unit_tokens:
        found.append(
            f"Chunks are {chunk_tokens} tokens, more than the engine's block size {recurrent[0].unit_tokens}."
        )
    return found


def _short(value: Any) -> Any:
    text = str(value)
    return value if len(text) <= 200 else text[:197] + "..."
