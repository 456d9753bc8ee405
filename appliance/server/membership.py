"""Hello, attach, register, heartbeat, bye; and how sessions end."""

from __future__ import annotations

import hmac
import time

import structlog

from appliance import __version__
from appliance.engines import Engine, EngineState
from appliance.errors import (
    AttachmentNotProven,
    InvalidField,
    NotAuthenticated,
    UnsupportedVersion,
    WrongRole,
)
from appliance.protocol import PROTOCOL_VERSION
from appliance.protocol.base import Role, Transport
from appliance.protocol.bulk import BULK_CREDITS, BULK_FRAME_BYTES
from appliance.protocol.liveness import INLINE_ATTACH_IDS, is_alive, is_inline
from appliance.protocol.messages import (
    Attach,
    AttachResult,
    Done,
    Empty,
    Heartbeat,
    HeartbeatResult,
    Hello,
    HelloResult,
    Register,
    RegisterResult,
    Settlement,
)
from appliance.server.answers import Answer
from appliance.server.core import Core, require_role
from appliance.sessions import Session, SessionEnd

_log = structlog.get_logger(__name__)


def hello(core: Core, session_id: bytes, args: Hello) -> Answer:
    """Open a session."""
    if args.protocol != PROTOCOL_VERSION:
        raise UnsupportedVersion(
            f"The client speaks protocol version {args.protocol}; this daemon speaks {PROTOCOL_VERSION}.",
            remedy="Install the same version of pagewarden on both sides.",
        )
    if not session_id:
        raise InvalidField(
            "The field 'session' is empty; hello brings the client's own random 16 bytes.", field="session"
        )
    if args.role is Role.ADMIN:
        _check_secret(core, args.secret)
    elif not args.engine_id:
        raise InvalidField(
            "The field 'engine_id' is empty; an engine's sessions carry its id.", field="engine_id"
        )
    core.sessions.open(
        Session(
            session_id, args.role, args.engine_id, args.client, args.host, args.pid, heard_at=core.clock()
        )
    )
    return Answer(
        HelloResult(
            version=__version__,
            protocol=PROTOCOL_VERSION,
            heartbeat_seconds=core.settings.heartbeat_seconds,
            session_ttl_seconds=core.ttls.session_ttl_seconds,
            arena_dir=str(core.arena.directory),
            bulk_port=core.bulk_port,
            bulk_frame_bytes=BULK_FRAME_BYTES,
            bulk_credits=BULK_CREDITS,
        )
    )


def _check_secret(core: Core, secret: str) -> None:
    """An admin has read the daemon's secret file; anybody may send a message to the port."""
    expected = core.admin_secret.encode()
    if not expected or not hmac.compare_digest(expected, secret.encode("utf-8", "surrogatepass")):
        raise NotAuthenticated(
            "The field 'secret' is not this daemon's admin secret.",
            remedy="Read it anew from the daemon's run directory; it changes at each start.",
        )


def attach(core: Core, session: Session, args: Attach) -> Answer:
    """A worker enters under its engine's id."""
    require_role(session, Role.WORKER)
    _check_attach_id(args)
    if args.transport is Transport.SHARED:
        _prove(core, args.attach_id)
    if any(s.attach_id == args.attach_id and s is not session for s in core.sessions.live.values()):
        raise AttachmentNotProven(f"The attach id {args.attach_id:#x} belongs to another live session.")
    core.reservations.end_session(session.session_id)
    core.reservations.all_stopped(args.attach_id)
    core.dead.pop(args.attach_id, None)
    session.attach_id, session.rank, session.transport = args.attach_id, args.rank, args.transport
    core.tickets.close_session(session.session_id)
    if args.transport is Transport.INLINE:
        core.tickets.open_session(session.session_id)
    engine = core.engines.engine(session.engine_id, time.time())
    replaced = core.engines.attach(engine, session.session_id, args)
    _end_replaced(core, replaced)
    _after_change(core, engine)
    _log.info(
        "worker attached",
        engine=engine.engine_id,
        rank=args.rank,
        transport=args.transport,
        state=engine.state,
        reason=engine.reason,
    )
    return Answer(AttachResult(segments=core.segments() if args.transport is Transport.SHARED else []))


def register(core: Core, session: Session, args: Register) -> Answer:
    """The scheduler describes its engine."""
    require_role(session, Role.SCHEDULER)
    if args.attach_id:
        if is_inline(args.attach_id):
            raise InvalidField("The field 'attach_id' is of those that have no lock.", field="attach_id")
        _prove(core, args.attach_id)
        session.attach_id = args.attach_id
    engine = core.engines.engine(session.engine_id, time.time())
    former = engine.scheduler
    try:
        core.engines.register(engine, session.session_id, args)
    finally:
        _log.info("engine registered", engine=engine.engine_id, state=engine.state, reason=engine.reason)
        if engine.scheduler != former:  # refused or not, this one is the engine's scheduler now
            _end_replaced(core, former)
    _after_change(core, engine)
    waiting = "" if engine.state is EngineState.READY else engine.reason
    return Answer(RegisterResult(settled=settlement(core, engine), waiting=waiting))


def heartbeat(core: Core, session: Session, args: Heartbeat) -> Answer:
    """Keep the session and the leases it names; learn what was revoked."""
    if session.role is Role.ADMIN:
        raise WrongRole("An admin session holds nothing that a heartbeat could keep.")
    for reservation_id in args.stopped:
        core.reservations.stopped(session.attach_id, reservation_id)
    gone = core.leases.heard(
        session.session_id,
        args.leases,
        lambda index: core.ttls.get("read_lease_ttl_seconds", index.namespace.hex()),
    )
    engine = core.engines.engines.get(session.engine_id)
    namespace = engine.fingerprint.namespace if engine and engine.fingerprint else ""
    if engine is not None and session.role is Role.SCHEDULER:
        core.history.engine_seen(engine, session)
    maps = session.role is Role.WORKER and session.transport is Transport.SHARED
    return Answer(
        HeartbeatResult(
            leases_ended=gone,
            revoked=core.reservations.revocations(session.attach_id) if session.role is Role.WORKER else [],
            segments=core.segments(args.segments_known) if maps else [],
            settled=settlement(core, engine) if engine is not None else None,
            waiting=engine.reason if engine is not None and engine.state is not EngineState.READY else "",
            refused=engine.error.to_wire() if engine is not None and engine.error is not None else None,
            read_lease_ttl_seconds=core.ttls.get("read_lease_ttl_seconds", namespace),
            write_ttl_seconds=core.ttls.get("write_ttl_seconds", namespace),
            session_ttl_seconds=core.ttls.get("session_ttl_seconds", namespace),
        )
    )


def bye(core: Core, session: Session, args: Empty) -> Answer:  # noqa: ARG001
    """The peer goes; it says that none of its copies is in flight."""
    attach_id = session.attach_id
    end_session(core, session, SessionEnd.BYE)
    if attach_id and session.role is Role.WORKER:
        core.reservations.all_stopped(attach_id)
    return Answer(Done())


def settlement(core: Core, engine: Engine) -> Settlement | None:
    """What a settled engine is told, ``None`` while it is not."""
    if engine.index is None or engine.fingerprint is None:
        return None
    namespace = engine.fingerprint.namespace
    return Settlement(
        namespace=namespace,
        chunk_tokens=engine.index.chunk_tokens,
        read_lease_ttl_seconds=core.ttls.get("read_lease_ttl_seconds", namespace),
        write_ttl_seconds=core.ttls.get("write_ttl_seconds", namespace),
        session_ttl_seconds=core.ttls.get("session_ttl_seconds", namespace),
        others=core.engines.others(engine.fingerprint),
        notices=engine.notices,
    )


def end_session(core: Core, session: Session, cause: SessionEnd) -> None:
    """End a session and all that it held; what its writer may still write goes to limbo."""
    core.leases.end_session(session.session_id)
    core.reservations.end_session(session.session_id)
    core.tickets.close_session(session.session_id)
    core.sessions.remove(session)
    engine = core.engines.engines.get(session.engine_id)
    if engine is not None and session.session_id in engine.sessions:
        core.engines.leave(engine, session.session_id)
        if session.role is Role.SCHEDULER:
            core.history.engine_ended(session, cause.value)
    core.counters[f"sessions_ended_{cause.value}"] += 1
    if cause is not SessionEnd.BYE:
        _log.warning(
            "session ended", engine=session.engine_id, role=session.role, rank=session.rank, cause=cause
        )


def process_died(core: Core, attach_id: int) -> None:
    """The lock of an attached process is free: it is dead, and its sessions end now.

    Its limbo is freed only after a grace for transfers in flight, by :func:`bury`.
    """
    for session in [s for s in core.sessions.live.values() if s.attach_id == attach_id]:
        end_session(core, session, SessionEnd.DIED)
    core.dead.setdefault(attach_id, core.clock() + core.settings.death_grace_seconds)


def bury(core: Core) -> int:
    """Free the limbo of processes that have been dead for the grace; returns extents freed."""
    now = core.clock()
    freed = 0
    for attach_id in [dead for dead, when in core.dead.items() if when <= now]:
        freed += core.reservations.all_stopped(attach_id)
        del core.dead[attach_id]
    return freed


def attached(core: Core) -> set[int]:
    """Attach ids of live sessions."""
    return {session.attach_id for session in core.sessions.live.values() if session.attach_id}


def watched(core: Core) -> tuple[int, ...]:
    """Attach ids whose death matters and can be proven: those of sessions, and those that hold limbo."""
    ids = attached(core)
    ids |= core.arena.limbo_by_attach.keys() | core.amnesty.waiting
    return tuple(each for each in ids - set(core.dead) if not is_inline(each))


def _check_attach_id(args: Attach) -> None:
    """Ids with a lock and ids without never meet: memory that a locked process may write is freed by nobody else."""
    if is_inline(args.attach_id) != (args.transport is Transport.INLINE):
        side = "from" if args.transport is Transport.INLINE else "below"
        raise InvalidField(
            f"The field 'attach_id' is {args.attach_id:#x}; with the transport '{args.transport}' it is "
            f"{side} {INLINE_ATTACH_IDS:#x}.",
            field="attach_id",
        )


def _prove(core: Core, attach_id: int) -> None:
    if not is_alive(core.arena.directory, attach_id):
        raise AttachmentNotProven(
            f"No process holds the lock file of attach id {attach_id:#x} in {core.arena.directory}.",
            remedy="The client must see the same directory (mount it, or set pagewarden.arena_dir) and lock before it "
            "attaches.",
        )


def _end_replaced(core: Core, session_id: bytes) -> None:
    replaced = core.sessions.get(session_id) if session_id else None
    if replaced is not None:
        end_session(core, replaced, SessionEnd.REPLACED)


def _after_change(core: Core, engine: Engine) -> None:
    if engine.state is EngineState.READY:
        core.remember_refusals(engine)
        if engine.deviation:
            _log.warning(
                "block size is not the planned one",
                engine=engine.engine_id,
                planned=engine.planned_block_tokens,
                reason=engine.deviation,
            )
        scheduler = core.sessions.get(engine.scheduler)
        if scheduler is not None:
            core.history.engine_seen(engine, scheduler)
