"""What the running daemon says of itself and of its engines."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from appliance import __version__
from appliance.doctor.findings import Code, Finding, Severity
from appliance.doctor.subject import Subject
from appliance.protocol.status import DaemonStatus, EngineStatus

LOOP_SILENT_SECONDS = 10.0
WAITING_SECONDS = 60.0
BAD_LEASE_ENDS = ("expired", "orphaned")


def daemon(subject: Subject) -> Iterator[Finding]:
    """Gates, version, loops, leases and loads."""
    status = subject.running
    if status is None:
        return
    for gate in status.gates:
        if not gate.open:
            yield _finding(
                "daemon",
                Code.DAEMON_NOT_READY,
                Severity.NOTE if status.phase == "populating" else Severity.WARNING,
                f"The daemon is not ready: the gate {gate.name} is closed.",
                gate.reason,
                "docs/operations.md, Readiness, explains each gate.",
            )
    if status.version != __version__:
        yield _finding(
            "daemon",
            Code.DAEMON_VERSION,
            Severity.WARNING,
            "The daemon is of another version than this command.",
            f"daemon {status.version}, command {__version__}",
            "Install the same version on both sides, and restart the daemon after an upgrade.",
        )
    yield from _loops(status)
    yield from _counted(status)


def _loops(status: DaemonStatus) -> Iterator[Finding]:
    for loop in status.loops:
        if loop.errors or loop.idle_seconds > LOOP_SILENT_SECONDS:
            yield _finding(
                "daemon",
                Code.LOOP_TROUBLE,
                Severity.WARNING,
                f"The background loop {loop.name} survived {loop.errors} errors and went round "
                f"{loop.idle_seconds:.0f} s ago.",
                loop.last_error or "no error was kept",
                "The daemon's log has the trace; report it.",
            )


def _counted(status: DaemonStatus) -> Iterator[Finding]:
    ended = {cause: status.lease_end_causes.get(cause, 0) for cause in BAD_LEASE_ENDS}
    if any(ended.values()):
        yield _finding(
            "daemon",
            Code.LEASES_EXPIRED,
            Severity.WARNING,
            "Leases ended before their engine released them.",
            ", ".join(f"{count:,} {cause}" for cause, count in ended.items() if count),
            "Engines renew what they hold: look for ones that are stopped or cut off, then raise the TTL "
            "(pagewarden ttl read_lease_ttl_seconds SECONDS).",
        )
    failed = sum(engine.load_failures for engine in status.engines)
    if failed:
        yield _finding(
            "daemon",
            Code.LOADS_FAILED,
            Severity.WARNING,
            f"{failed:,} loads failed and were computed anew.",
            ", ".join(f"{e.engine_id}: {e.load_failures:,}" for e in status.engines if e.load_failures),
            "docs/troubleshooting.md: checksum means damaged bytes, generation reuse under a reader.",
        )


def engines(subject: Subject) -> Iterator[Finding]:
    """Each engine that has a session."""
    for engine in subject.running.engines if subject.running is not None else []:
        yield from _engine(engine)


def _engine(engine: EngineStatus) -> Iterator[Finding]:
    name = engine.engine_id
    if engine.state == "refused":
        yield _finding(
            "engines",
            Code.ENGINE_REFUSED,
            Severity.PROBLEM,
            f"Engine {name} is refused and computes everything itself.",
            engine.reason,
            "Correct what the reason names, and restart that engine.",
        )
    elif engine.state != "ready":
        yield _finding(
            "engines",
            Code.ENGINE_WAITING,
            Severity.WARNING,
            f"Engine {name} is {engine.state}: it gets no hit meanwhile."
            if engine.state != "suspect"
            else f"Engine {name} has sent no heartbeat for {engine.heartbeat_age_seconds:.0f} s.",
            engine.reason or f"state {engine.state}",
            "If it stays so: look at the engine's own log, and at the ranks that the reason names.",
        )
    if engine.deviation:
        yield _finding(
            "engines",
            Code.ENGINE_DEVIATES,
            Severity.WARNING,
            f"Engine {name} is not as planned.",
            engine.deviation,
            "pagewarden plan with the engine's own options, then --planned-block-size.",
        )
    if "inline" in engine.transport and engine.host == socket.gethostname():
        yield _finding(
            "engines",
            Code.ENGINE_INLINE,
            Severity.WARNING,
            f"Engine {name} is on this host and sends its pages through a socket.",
            f"transport {engine.transport}",
            "Run `pagewarden doctor --engine` where that engine runs: it says why the arena cannot be mapped there.",
        )


def _finding(area: str, code: Code, severity: Severity, message: str, evidence: str, remedy: str) -> Finding:
    return Finding(area=area, code=code, severity=severity, message=message, evidence=evidence, remedy=remedy)
