"""Ping, status, clear, TTLs, check: what an admin client asks."""

from __future__ import annotations

import time

from appliance.catalog.events import ClearRecorded, SettingChanged
from appliance.errors import InvalidField, NotFound, ShuttingDown, VersionChanged
from appliance.protocol.base import Role
from appliance.protocol.messages import Check, Clear, ClearResult, Ping, SetTtl, SetTtlResult
from appliance.reservations import ReservationState
from appliance.server.answers import Answer, Durable
from appliance.server.auditing import audit_entry
from appliance.server.core import Core, require_role
from appliance.sessions import Session


def ping(core: Core) -> Answer:
    """The loop answers."""
    return Answer(Ping(uptime_seconds=time.monotonic() - core.started_monotonic, phase=core.phase.value))


def check(core: Core, session: Session, args: Check) -> Answer:
    """Start a consistency check, or tell how one stands: it runs on a thread of its own, in short looks."""
    require_role(session, Role.ADMIN)
    if core.ask_check is None:
        raise ShuttingDown("The daemon does not serve yet.")
    return Answer(core.ask_check(args.run))


def clear(core: Core, session: Session, args: Clear) -> Durable:
    """Forget objects: reservations first, so that no commit under way can undo it; the epoch before the objects."""
    require_role(session, Role.ADMIN)
    if args.namespace and args.namespace not in core.store.namespaces:
        raise NotFound(
            f"The namespace '{args.namespace}' is not known.", remedy="List them with `curl …/api/v1/status`."
        )
    index = core.store.namespaces[args.namespace] if args.namespace else None
    core.reservations.end_namespace(index, ReservationState.CLEARED)
    epoch, objects, extents = core.store.clear(args.namespace or None)
    core.history.forget_objects(args.namespace or None)
    extent_bytes = core.arena.extent_bytes
    result = ClearResult(
        epoch=epoch,
        removed_objects=objects,
        removed_bytes=extents * extent_bytes,
        held_bytes=core.arena.account().draining,
    )
    row = ClearRecorded(
        epoch=epoch,
        scope="namespace" if args.namespace else "all",
        namespace=args.namespace,
        requested_by=args.requested_by,
        cleared_unix=time.time(),
        removed_objects=objects,
        removed_bytes=extents * extent_bytes,
        audit=audit_entry(
            args,
            "cache.clear",
            args.namespace or "every namespace",
            after={"removed_objects": objects, "removed_bytes": extents * extent_bytes},
        ),
    )
    return Durable(result, row)


def set_ttl(core: Core, session: Session, args: SetTtl) -> Durable:
    """Change a TTL: it holds for new leases and for the next renewal of old ones."""
    require_role(session, Role.ADMIN)
    ttls = core.ttls
    known = args.namespace in core.store.namespaces or (args.name, args.namespace) in ttls.overrides
    if args.namespace and not known:
        raise NotFound(f"The namespace '{args.namespace}' is not known.", field="namespace")
    if args.if_version and args.if_version != ttls.version:
        raise VersionChanged(
            "The TTLs were changed since they were read.", remedy="Look at them again.", version=ttls.version
        )
    _check_session_ttl(core, args)
    changed_before = ttls.changed_value(args.name, args.namespace)
    before = ttls.set(args.name, args.value_seconds, args.namespace)
    after = ttls.get(args.name, args.namespace)
    core.store.incomplete_grace_seconds = ttls.write_ttl_seconds
    row = SettingChanged(
        args.name,
        args.namespace,
        args.value_seconds,
        time.time(),
        args.requested_by,
        audit_entry(
            args,
            "ttl.reset" if args.value_seconds is None else "ttl.set",
            f"{args.name} of {args.namespace}" if args.namespace else args.name,
            before=before,
            after=after,
        ),
    )

    def undo() -> None:
        """The change could not be made durable, so it does not hold; a later one of somebody else's does."""
        if ttls.changed_value(args.name, args.namespace) == args.value_seconds:
            ttls.set(args.name, changed_before, args.namespace)
            core.store.incomplete_grace_seconds = ttls.write_ttl_seconds

    result = SetTtlResult(before_seconds=before, after_seconds=after, version=ttls.version)
    return Durable(result, row, undo)


def _check_session_ttl(core: Core, args: SetTtl) -> None:
    least = 3 * core.settings.heartbeat_seconds
    if args.name == "session_ttl_seconds" and args.value_seconds is not None and args.value_seconds < least:
        raise InvalidField(
            f"The field 'value_seconds' is {args.value_seconds:g}; a session TTL under three heartbeats "
            f"({least:g} s) would end live sessions.",
            field="value_seconds",
        )
