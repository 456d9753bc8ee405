"""The status document, made from the core in one turn of the loop."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from appliance import __version__
from appliance.engines import Engine
from appliance.fingerprint import Fingerprint
from appliance.l1.eviction import DEFAULT_POLICY
from appliance.l1.index import NamespaceIndex
from appliance.protocol.status import (
    CatalogStatus,
    DaemonStatus,
    EngineStatus,
    Gate,
    GroupUsage,
    InlineStatus,
    L1Status,
    LeaseEndStatus,
    LeaseStatus,
    LoopStatus,
    NamespaceStatus,
    PolicyShadow,
    Refusal,
    RestartStatus,
    RetentionStatus,
    TtlStatus,
)
from appliance.server.core import Core, Phase
from appliance.sessions import SessionState
from appliance.ttl import TTL_NAMES

MAX_LEASES_SHOWN = 200


def status(
    core: Core,
    *,
    gates: list[Gate],
    catalog: CatalogStatus,
    loops: list[LoopStatus],
    inline: InlineStatus | None = None,
    restart: RestartStatus | None = None,
) -> DaemonStatus:
    """Everything at this moment."""
    return DaemonStatus(
        version=__version__,
        boot=core.boot.hex(),
        phase=core.phase.value,
        ready=core.phase is Phase.READY and all(gate.open for gate in gates),
        uptime_seconds=time.monotonic() - core.started_monotonic,
        started_unix=core.started_unix,
        gates=gates,
        l1=_l1(core),
        groups=[usage for index in core.store.by_slot for usage in _groups(core, index)],
        namespaces=[_namespace(core, index) for index in core.store.by_slot],
        refusals=_refusals(core),
        engines=[_engine(core, engine) for engine in core.engines.engines.values()],
        leases=_leases(core),
        leases_total=len(core.leases.live),
        lease_ends=_lease_ends(core),
        lease_end_causes=dict(core.leases.ended),
        reservation_end_causes=dict(core.reservations.ended),
        evictions=dict(core.history.evicted_entries),
        evicted_bytes=dict(core.history.evicted_bytes),
        miss_reasons=dict(core.miss_reasons),
        counters=dict(core.counters),
        retention=_retention(core),
        inline=inline or InlineStatus(),
        catalog=catalog,
        restart=restart,
        loops=loops,
        settings=_settings(core),
        setting_sources=core.settings.sources,
        ttls=_ttls(core),
        ttls_version=core.ttls.version,
    )


def _l1(core: Core) -> L1Status:
    held = core.arena.account()
    extent_bytes = core.arena.extent_bytes
    indexes = core.store.by_slot
    return L1Status(
        capacity_bytes=held.capacity,
        populated_bytes=held.populated,
        free_bytes=held.free,
        occupied_bytes=held.occupied,
        reserved_bytes=held.reserved,
        limbo_bytes=held.limbo,
        draining_bytes=held.draining,
        leased_bytes=sum(t.leased_extents for index in indexes for t in index.totals) * extent_bytes,
        pinned_bytes=sum(index.pinned_extents() for index in indexes) * extent_bytes,
        objects=sum(t.objects for index in indexes for t in index.totals),
        chunks=sum(index.row_count for index in indexes),
        extent_bytes=extent_bytes,
        segments=len(core.arena.spaces),
        watermark_bytes=int(held.capacity * core.settings.eviction_watermark),
        policy=core.store.policy.name,
        arena_dir=str(core.arena.directory),
    )


def _groups(core: Core, index: NamespaceIndex) -> list[GroupUsage]:
    extent_bytes = core.arena.extent_bytes
    return [
        GroupUsage(
            namespace=index.namespace.hex(),
            model=index.model,
            group=group.index,
            name=group.name,
            kind=group.kind.value,
            shards=group.shards,
            replicas=group.replicas,
            objects=totals.objects,
            bytes=totals.extents * extent_bytes,
            leased_bytes=totals.leased_extents * extent_bytes,
            reserved_bytes=totals.reserved_extents * extent_bytes,
            stored_bytes=ledger.stored * extent_bytes,
            read_bytes=ledger.read * extent_bytes,
            evicted_bytes=ledger.evicted * extent_bytes,
            regret_bytes=ledger.regretted * extent_bytes,
        )
        for group, totals, ledger in zip(index.groups, index.totals, core.retention.of(index), strict=True)
    ]


def _retention(core: Core) -> RetentionStatus:
    active = core.store.policy.name
    return RetentionStatus(
        share=core.shadows.share,
        since_seconds=core.clock() - core.shadows.since,
        policies=[
            PolicyShadow(
                policy=count.policy,
                active=count.policy == active,
                default=count.policy == DEFAULT_POLICY,
                prompts=count.prompts,
                asked_chunks=count.asked_chunks,
                hit_chunks=count.hit_chunks,
            )
            for count in core.shadows.counts.values()
        ],
    )


def _namespace(core: Core, index: NamespaceIndex) -> NamespaceStatus:
    namespace = index.namespace.hex()
    fingerprint = core.engines.fingerprints.get(namespace)
    return NamespaceStatus(
        namespace=namespace,
        model=index.model,
        chunk_tokens=index.chunk_tokens,
        engines=core.engines.engines_of(namespace),
        chunks=index.row_count,
        bytes=sum(totals.extents for totals in index.totals) * core.arena.extent_bytes,
        read_lease_ttl_seconds=core.ttls.get("read_lease_ttl_seconds", namespace),
        write_ttl_seconds=core.ttls.get("write_ttl_seconds", namespace),
        session_ttl_seconds=core.ttls.get("session_ttl_seconds", namespace),
        fields=_short_fields(fingerprint) if fingerprint else {},
    )


@lru_cache(maxsize=256)
def _short_fields(fingerprint: Fingerprint) -> dict[str, Any]:
    """The engine-wide fields; those of single layers and the model's configuration are in the catalog."""
    fields = fingerprint.fields()
    return {
        path: value for path, value in fields.items() if not path.startswith(("layers.", "model.config."))
    }


def _refusals(core: Core) -> list[Refusal]:
    return [
        Refusal(
            model=record.model,
            engine_id=record.engine_id,
            namespace=record.namespace,
            other_namespace=record.other_namespace,
            other_engines=record.other_engines,
            differences=record.differences,
            lookups=record.lookups,
        )
        for record in core.refusals.values()
    ]


def _engine(core: Core, engine: Engine) -> EngineStatus:
    sessions = [s for s in (core.sessions.get(each) for each in engine.sessions) if s is not None]
    shown = core.sessions.get(engine.scheduler) or (sessions[0] if sessions else None)
    suspect = any(session.state is SessionState.SUSPECT for session in sessions)
    attach_ids = {session.attach_id for session in sessions}
    registration, counts = engine.registration, engine.counts
    return EngineStatus(
        engine_id=engine.engine_id,
        state="suspect" if suspect else engine.state.value,
        reason="a session is silent" if suspect else engine.reason,
        model=engine.fingerprint.model if engine.fingerprint else "",
        namespace=engine.fingerprint.namespace if engine.fingerprint else "",
        chunk_tokens=engine.index.chunk_tokens if engine.index else 0,
        block_tokens=[group.block_tokens for group in registration.groups] if registration else [],
        world_size=registration.world_size if registration else 0,
        ranks_attached=sorted(engine.workers),
        host=shown.host if shown else "",
        pid=shown.pid if shown else 0,
        client=shown.client if shown else "",
        heartbeat_age_seconds=max((core.clock() - s.heard_at for s in sessions), default=0.0),
        lookups=counts.lookups,
        asked_tokens=counts.asked_tokens,
        hit_tokens=counts.hit_tokens,
        loads=counts.loads,
        load_failures=counts.load_failures,
        bytes_loaded=counts.bytes_loaded,
        bytes_stored=counts.bytes_stored,
        objects_stored=counts.objects_stored,
        leases=sum(len(core.leases.by_session.get(session.session_id, ())) for session in sessions),
        reserved_bytes=core.reservations.reserved_bytes[engine.engine_id],
        limbo_bytes=sum(core.arena.limbo_bytes_of(attach_id) for attach_id in attach_ids),
        notices=engine.notices,
        transport="+".join(sorted({attach.transport.value for _, attach in engine.workers.values()})),
        planned_block_size=engine.planned_block_tokens,
        deviation=engine.deviation,
    )


def _leases(core: Core) -> list[LeaseStatus]:
    now = core.clock()
    soonest = sorted(core.leases.live.values(), key=lambda lease: lease.deadline)[:MAX_LEASES_SHOWN]
    return [
        LeaseStatus(
            lease=lease.lease_id,
            engine_id=lease.engine_id,
            request=lease.request,
            namespace=lease.index.namespace.hex(),
            chunks=lease.hit_chunks,
            objects=len(lease.entries),
            bytes=lease.bytes_held,
            age_seconds=now - lease.granted_at,
            remaining_seconds=max(0.0, lease.deadline - now),
            renewals=lease.renewals,
        )
        for lease in soonest
    ]


def _lease_ends(core: Core) -> list[LeaseEndStatus]:
    now = core.clock()
    return [
        LeaseEndStatus(
            lease=ending.lease.lease_id,
            engine_id=ending.lease.engine_id,
            request=ending.lease.request,
            namespace=ending.lease.index.namespace.hex(),
            cause=ending.cause.value,
            chunks=ending.lease.hit_chunks,
            bytes=ending.lease.bytes_held,
            age_seconds=ending.age_seconds,
            ended_ago_seconds=now - ending.ended_at,
        )
        for ending in reversed(core.leases.recent)
    ]


def _ttls(core: Core) -> list[TtlStatus]:
    """The global ones, then each override; a namespace without one follows the global value."""
    ttls = core.ttls
    scopes = [(name, "") for name in TTL_NAMES] + sorted(ttls.overrides)
    return [
        TtlStatus(
            name=name,
            namespace=namespace,
            value_seconds=ttls.get(name, namespace),
            configured_seconds=ttls.get(name) if namespace else ttls.configured[name],
            changed=ttls.changed_value(name, namespace) is not None,
        )
        for name, namespace in scopes
    ]


def _settings(core: Core) -> dict[str, Any]:
    shown = core.settings.model_dump(mode="json")
    shown["l1_read_ttl_seconds"] = core.ttls.read_lease_ttl_seconds
    shown["l1_write_ttl_seconds"] = core.ttls.write_ttl_seconds
    shown["session_ttl_seconds"] = core.ttls.session_ttl_seconds
    shown["eviction_policy"] = core.store.policy.name
    return shown
