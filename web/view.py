"""What the overview page shows, made of a snapshot: sorted, cut to what a page can carry, and explained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from appliance.protocol.messages import Difference
from appliance.protocol.status import (
    DaemonStatus,
    EngineStatus,
    GroupUsage,
    LeaseEndStatus,
    LeaseStatus,
    Refusal,
)
from web.explain import Explanation, miss_reason
from web.gauge import Gauge, occupancy_gauge
from web.health import Health, health_of
from web.history import History
from web.poller import Snapshot
from web.settings import WebSettings

_T = TypeVar("_T")

ENGINES_SHOWN = 100
GROUPS_SHOWN = 100
REFUSALS_SHOWN = 50
LEASES_SHOWN = 20
LEASE_ENDS_SHOWN = 15
DIFFERENCES_SHOWN = 20

_STATE_ORDER = {"refused": 0, "suspect": 1, "registering": 2, "ready": 3}


@dataclass(frozen=True, slots=True)
class Cut(Generic[_T]):
    """A list that a page can carry: ``shown`` of ``total``."""

    shown: tuple[_T, ...]
    total: int

    @property
    def hidden(self) -> int:
        """How many are left out."""
        return self.total - len(self.shown)


@dataclass(frozen=True, slots=True)
class MissRow:
    """How many lookups fell short for one reason; ``of`` is the number over all reasons."""

    explanation: Explanation
    count: int
    of: int


@dataclass(frozen=True, slots=True)
class CauseRow:
    """How often something ended by one cause, with the bytes where the daemon counts them."""

    cause: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HitTotals:
    """The counters of all engines present, summed up."""

    lookups: int
    asked_tokens: int
    hit_tokens: int
    loads: int
    load_failures: int
    bytes_loaded: int
    bytes_stored: int


@dataclass(frozen=True, slots=True)
class StatusView:
    """The parts of the page that need a status."""

    status: DaemonStatus
    gauge: Gauge
    groups: Cut[GroupUsage]
    engines: Cut[EngineStatus]
    refusals: Cut[Refusal]
    hits: HitTotals
    misses: tuple[MissRow, ...]
    leases: Cut[LeaseStatus]
    lease_ends: Cut[LeaseEndStatus]
    lease_end_causes: tuple[CauseRow, ...]
    evictions: tuple[CauseRow, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole page; ``view`` is ``None`` until the first status has come."""

    snapshot: Snapshot
    health: Health
    view: StatusView | None
    history: History
    connect_command: str
    now_unix: float


def overview_of(snapshot: Snapshot, history: History, settings: WebSettings, *, now_unix: float) -> Overview:
    """The page for a snapshot."""
    return Overview(
        snapshot=snapshot,
        health=health_of(snapshot, endpoint=settings.endpoint.removeprefix("tcp://"), now_unix=now_unix),
        view=None if snapshot.status is None else _status_view(snapshot.status),
        history=history,
        connect_command=connect_command(settings),
        now_unix=now_unix,
    )


def connect_command(settings: WebSettings) -> str:
    """The command that points a vLLM at this daemon."""
    extra: dict[str, str | int] = {"pagewarden.port": settings.daemon_port}
    if settings.daemon_host not in ("127.0.0.1", "localhost", "::1"):
        extra = {"pagewarden.host": settings.daemon_host, **extra}
    config = {
        "kv_connector": "PagewardenConnector",
        "kv_connector_module_path": "connector.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return f"vllm serve MODEL --kv-transfer-config '{json.dumps(config, separators=(',', ':'))}'"


def shown_differences(refusal: Refusal) -> Cut[Difference]:
    """The differing fields of a refusal that fit on the page."""
    return _cut(refusal.differences, DIFFERENCES_SHOWN)


def _status_view(status: DaemonStatus) -> StatusView:
    engines = sorted(status.engines, key=lambda e: (_STATE_ORDER.get(e.state, 1), e.model, e.engine_id))
    return StatusView(
        status=status,
        gauge=occupancy_gauge(status.l1),
        groups=_cut(sorted(status.groups, key=lambda g: (g.model, g.namespace, g.group)), GROUPS_SHOWN),
        engines=_cut(engines, ENGINES_SHOWN),
        refusals=_cut(sorted(status.refusals, key=lambda r: -r.lookups), REFUSALS_SHOWN),
        hits=_hit_totals(status.engines),
        misses=_miss_rows(status.miss_reasons),
        leases=_cut(
            sorted(status.leases, key=lambda lease: lease.remaining_seconds),
            LEASES_SHOWN,
            total=max(status.leases_total, len(status.leases)),
        ),
        lease_ends=_cut(sorted(status.lease_ends, key=lambda end: end.ended_ago_seconds), LEASE_ENDS_SHOWN),
        lease_end_causes=_cause_rows(status.lease_end_causes, {}),
        evictions=_cause_rows(status.evictions, status.evicted_bytes),
    )


def _cut(items: Iterable[_T], limit: int, *, total: int | None = None) -> Cut[_T]:
    everything = tuple(items)
    return Cut(everything[:limit], len(everything) if total is None else total)


def _hit_totals(engines: list[EngineStatus]) -> HitTotals:
    return HitTotals(
        lookups=sum(engine.lookups for engine in engines),
        asked_tokens=sum(engine.asked_tokens for engine in engines),
        hit_tokens=sum(engine.hit_tokens for engine in engines),
        loads=sum(engine.loads for engine in engines),
        load_failures=sum(engine.load_failures for engine in engines),
        bytes_loaded=sum(engine.bytes_loaded for engine in engines),
        bytes_stored=sum(engine.bytes_stored for engine in engines),
    )


def _miss_rows(counts: Mapping[str, int]) -> tuple[MissRow, ...]:
    total = sum(counts.values())
    ordered = sorted(((count, word) for word, count in counts.items() if count), reverse=True)
    return tuple(MissRow(miss_reason(word), count, total) for count, word in ordered)


def _cause_rows(counts: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[CauseRow, ...]:
    causes = sorted(counts.keys() | sizes.keys(), key=lambda cause: (-counts.get(cause, 0), cause))
    return tuple(
        CauseRow(cause, counts.get(cause, 0), sizes.get(cause, 0))
        for cause in causes
        if counts.get(cause) or sizes.get(cause)
    )
