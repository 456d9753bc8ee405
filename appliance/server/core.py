"""The daemon's state, all of it in memory, touched by the loop thread only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from appliance.catalog.account_memory import AccountMemory
from appliance.clock import LeaseClock
from appliance.engines import Engine, EngineTable
from appliance.errors import NotAttached, NotRegistered, WrongRole
from appliance.fingerprint import Fingerprint
from appliance.geometry import ObjectGroup
from appliance.l1.arena import Arena
from appliance.l1.eviction import make_policy
from appliance.l1.index import NamespaceIndex
from appliance.l1.namespaces import NamespaceDescriptor
from appliance.l1.opening import Opened
from appliance.l1.rebuild import oldest_age
from appliance.l1.store import Store
from appliance.leases import LeaseEnding, LeaseTable
from appliance.planning.expected import PlannedBlocks
from appliance.protocol.base import Role
from appliance.protocol.messages import Attach, CheckResult, Difference, SegmentInfo
from appliance.reservations import ReservationTable
from appliance.retention import RetentionLedger
from appliance.server.amnesty import Amnesty
from appliance.server.asked import AskedPrompts
from appliance.server.history import History
from appliance.sessions import Session, SessionTable
from appliance.settings import Settings
from appliance.shadows import ShadowBoard
from appliance.tickets import TicketTable
from appliance.ttl import Ttls


class Phase(StrEnum):
    """What the daemon is doing.

    ::

        STARTING ──► POPULATING ──► READY ──► DRAINING ──► STOPPED
                          └──────────────────────┘
    """

    STARTING = "starting"
    POPULATING = "populating"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.POPULATING, Phase.DRAINING}),
    Phase.POPULATING: frozenset({Phase.READY, Phase.DRAINING}),
    Phase.READY: frozenset({Phase.DRAINING}),
    Phase.DRAINING: frozenset({Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
}


@dataclass(slots=True)
class RefusalRecord:
    """Two namespaces of one model that must not share, seen when the second one registered."""

    model: str
    engine_id: str
    namespace: str
    other_namespace: str
    other_engines: list[str]
    differences: list[Difference]
    lookups: int = 0


MAX_REFUSALS = 1024
OVERDUE_SECONDS = 0.5


@dataclass(slots=True)
class Core:
    """Everything the handlers work on."""

    settings: Settings
    boot: bytes
    arena: Arena
    history: History
    clock: LeaseClock
    ttls: Ttls
    store: Store
    leases: LeaseTable
    reservations: ReservationTable
    sessions: SessionTable
    engines: EngineTable
    started_monotonic: float
    started_unix: float
    tickets: TicketTable
    retention: RetentionLedger
    shadows: ShadowBoard
    bulk_port: int = 0
    phase: Phase = Phase.STARTING
    counters: Counter[str] = field(default_factory=Counter)
    miss_reasons: Counter[str] = field(default_factory=Counter)
    refusals: dict[tuple[str, str], RefusalRecord] = field(default_factory=dict)
    located: set[int] = field(default_factory=set)
    asked: AskedPrompts = field(default_factory=AskedPrompts)
    dead: dict[int, float] = field(default_factory=dict)
    amnesty: Amnesty = field(init=False)
    ask_check: Callable[[int], CheckResult] | None = None
    accounts: AccountMemory = field(default_factory=AccountMemory)
    admin_secret: str = ""
    """What admin sessions show at hello; empty refuses all of them."""

    def __post_init__(self) -> None:
        self.amnesty = Amnesty(self.store)

    def move_to(self, phase: Phase) -> None:
        """Change the phase."""
        assert phase in PHASES[self.phase], (
            f"the daemon went from {self.phase} to {phase}: a gate would open too early"
        )
        self.phase = phase

    # --- who is asking ----------------------------------------------------------------------------------------

    def engine_of(self, session: Session) -> Engine:
        """The engine of a scheduler's or worker's session.

        Raises:
            NotRegistered: if nothing of it is known (its first message was not attach or register).
        """
        engine = self.engines.engines.get(session.engine_id)
        if engine is None:
            raise NotRegistered(f"The engine '{session.engine_id}' has neither attached nor registered.")
        return engine

    def settled(self, engine: Engine) -> NamespaceIndex:
        """The engine's namespace.

        Raises:
            NotRegistered: while it is not settled.
        """
        if engine.index is None:
            raise NotRegistered(f"The engine '{engine.engine_id}' is not settled: {engine.reason}.")
        return engine.index

    def attachment(self, session: Session) -> tuple[Engine, Attach]:
        """The engine and the attach message of a worker's session.

        Raises:
            WrongRole, NotAttached.
        """
        require_role(session, Role.WORKER)
        engine = self.engine_of(session)
        found = engine.workers.get(session.rank)
        if found is None or found[0] != session.session_id:
            raise NotAttached(f"This session is not attached as a rank of engine '{session.engine_id}'.")
        return engine, found[1]

    def segments(self, known: int = 0) -> list[SegmentInfo]:
        """Descriptions of the segments from number ``known`` on."""
        return [
            SegmentInfo(
                segment=space.segment.index,
                path=str(space.segment.path),
                nonce=space.segment.nonce,
                extent_count=space.segment.shape.extent_count,
                extent_bytes=space.segment.shape.extent_bytes,
            )
            for space in self.arena.spaces[known:]
        ]

    def remember_refusals(self, engine: Engine) -> None:
        """Keep which other namespaces this engine must not share with, after the engine is gone too."""
        fingerprint = engine.fingerprint
        if fingerprint is None:
            return
        for other in self.engines.others(fingerprint):
            key = fingerprint.namespace, other.namespace
            lookups = self.refusals.pop(key).lookups if key in self.refusals else 0
            self.refusals[key] = RefusalRecord(
                fingerprint.model,
                engine.engine_id,
                fingerprint.namespace,
                other.namespace,
                other.engines,
                other.differences,
                lookups,
            )
        while len(self.refusals) > MAX_REFUSALS:
            del self.refusals[next(iter(self.refusals))]


def require_role(session: Session, *roles: Role) -> None:
    """Refuse an operation of another role.

    Raises:
        WrongRole: naming both.
    """
    if session.role not in roles:
        raise WrongRole(f"This operation is for {' or '.join(roles)}; the session is a {session.role}'s.")


def build_core(
    settings: Settings, boot: bytes, opened: Opened, submit: Callable[[Any], bool], ttls: Ttls
) -> Core:
    """A core over an opened arena; ``submit`` takes history events for the catalog."""
    arena = opened.arena
    # What was taken back is older than this boot, and columns of times know no time before 0.
    clock = LeaseClock(time.monotonic(), oldest_age(opened.taken, time.time()))
    history = History(submit=submit, extent_bytes=arena.extent_bytes, clock=clock)
    retention = RetentionLedger(history)
    store = Store(arena, make_policy(settings.eviction_policy, clock), retention, clock)
    store.incomplete_grace_seconds = ttls.write_ttl_seconds
    first_id = int.from_bytes(boot[:5], "little") << 24  # ids of two boots are told apart

    def make_index(fingerprint: Fingerprint, groups: list[ObjectGroup], chunk_tokens: int) -> NamespaceIndex:
        history.fingerprint_seen(fingerprint, groups, chunk_tokens)
        opened.namespaces.describe(NamespaceDescriptor(fingerprint, tuple(groups), chunk_tokens))
        return store.namespace(fingerprint.namespace, fingerprint.model, groups, chunk_tokens)

    tickets = TicketTable()

    def lease_ended(ending: LeaseEnding) -> None:
        tickets.lease_ended(ending.lease.lease_id)
        history.lease_ended(ending)

    return Core(
        settings=settings,
        boot=boot,
        arena=arena,
        history=history,
        clock=clock,
        ttls=ttls,
        store=store,
        leases=LeaseTable(store, clock, lease_ended, first_id),
        reservations=ReservationTable(
            store,
            clock,
            first_id,
            int(settings.l1_bytes * settings.engine_inflight_share),
            tickets=tickets,
        ),
        sessions=SessionTable(clock, settings.heartbeat_seconds),
        engines=EngineTable(settings.chunk_size, make_index, PlannedBlocks.of(settings.planned_block_size)),
        started_monotonic=time.monotonic(),
        started_unix=time.time(),
        tickets=tickets,
        retention=retention,
        shadows=ShadowBoard(clock, lambda index: _share_of_l1(store, index)),
    )


def _share_of_l1(store: Store, index: NamespaceIndex) -> int:
    """Extents that a namespace may count on: its share of what is occupied, of all there are."""
    occupied = sum(totals.extents for each in store.by_slot for totals in each.totals)
    own = sum(totals.extents for totals in index.totals)
    return store.arena.extent_count * own // occupied if occupied else 0
