"""What an engine's process can reach from here: the daemon, its arena, its lock, its bulk port.

The doctor attaches as a worker of an engine of its own name and says goodbye at once; nothing is reserved or stored.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from appliance.doctor.findings import Code, Finding, Severity
from appliance.doctor.network import why_no_connection
from appliance.doctor.subject import Subject
from appliance.errors import AttachmentNotProven, PagewardenError
from appliance.protocol.arena_layout import HEADER, lock_name
from appliance.protocol.base import Role, Transport
from appliance.protocol.client import RequestClient, endpoint_of
from appliance.protocol.liveness import INLINE_ATTACH_IDS, forget, take_lock
from appliance.protocol.messages import Attach, AttachResult, Done, HelloResult, SegmentInfo


def engine_side(subject: Subject) -> Iterator[Finding]:
    """Everything that an engine needs, tried."""
    if not subject.engine_side:
        return
    if importlib.util.find_spec("numba") is None:
        yield _finding(
            Code.NO_NUMBA,
            Severity.NOTE,
            "numba cannot be imported here: pages in host memory are copied by numpy, more slowly.",
            "no module numba in this environment",
            "pip install 'pagewarden[connector]' in the engine's environment.",
        )
    engine_id = f"pagewarden-doctor-{socket.gethostname()}-{os.getpid()}"
    with RequestClient(
        endpoint_of(subject.host, subject.port),
        client_name="pagewarden-doctor",
        role=Role.WORKER,
        engine_id=engine_id,
    ) as client:
        try:
            hello = client.hello()
        except PagewardenError as error:
            yield _finding(
                Code.DAEMON_UNREACHABLE,
                Severity.PROBLEM,
                "No daemon answers this engine.",
                f"{error.code}: {error.message}",
                "Check pagewarden.host and pagewarden.port of the engine, and that the daemon runs.",
            )
            return
        yield from _arena(client, subject, Path(hello.arena_dir))
        yield from _bulk(subject, hello)


def _arena(client: RequestClient, subject: Subject, named: Path) -> Iterator[Finding]:
    directory = subject.arena_here or named
    attach_id = secrets.randbelow(INLINE_ATTACH_IDS - 1) + 1
    try:
        lock = take_lock(directory / lock_name(attach_id))
    except OSError as error:
        yield _unreachable(f"{directory} cannot be written here: {error.strerror}")
        return
    assert lock is not None, "a lock of another process would prove the doctor's death"
    try:
        attach = Attach(
            attach_id=attach_id, rank=0, world_size=1, groups=[], layers={}, transport=Transport.SHARED
        )
        attached = client.call("attach", attach, AttachResult)
        for segment in attached.segments:
            yield from _segment(directory, segment)
        client.call("bye", {}, Done)
    except AttachmentNotProven as error:
        yield _finding(
            Code.LOCK_NOT_SEEN,
            Severity.WARNING,
            "The daemon does not see a lock that is taken here: the directory is another one, or on another kernel.",
            f"{directory}: {error.message}",
            "Mount the daemon's own arena directory here (pagewarden.arena_dir names it); across hosts or sandboxes use "
            "pagewarden.transport inline.",
        )
    except PagewardenError as error:
        yield _unreachable(f"attach: {error.code}: {error.message}")
    finally:
        os.close(lock)
        forget(directory, attach_id)


def _segment(directory: Path, segment: SegmentInfo) -> Iterator[Finding]:
    path = directory / Path(segment.path).name
    try:
        with path.open("rb") as file:
            header = file.read(HEADER.itemsize)
    except OSError as error:
        yield _unreachable(f"{path} cannot be read here: {error.strerror}")
        return
    if segment.nonce not in header:
        yield _unreachable(f"{path} is not the segment that the daemon serves")


def _bulk(subject: Subject, hello: HelloResult) -> Iterator[Finding]:
    why = why_no_connection(subject.host, hello.bulk_port) if hello.bulk_port else ""
    if why:
        yield _finding(
            Code.BULK_UNREACHABLE,
            Severity.WARNING,
            "The bulk port cannot be reached from here: an engine that cannot map the arena could store nothing.",
            f"{subject.host}:{hello.bulk_port}: {why}",
            "Let the port through the firewall: --bulk-port fixes it.",
        )


def _unreachable(evidence: str) -> Finding:
    return _finding(
        Code.ARENA_UNREACHABLE,
        Severity.WARNING,
        "An engine here cannot map the arena, and will send its pages through a socket.",
        evidence,
        "Mount the arena's directory here, run as the daemon's user, and set pagewarden.arena_dir where it is mounted "
        "elsewhere.",
    )


def _finding(code: Code, severity: Severity, message: str, evidence: str, remedy: str) -> Finding:
    return Finding(
        area="engine side", code=code, severity=severity, message=message, evidence=evidence, remedy=remedy
    )
