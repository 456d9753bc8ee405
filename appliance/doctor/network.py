"""Ports and addresses of the daemon before it starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from appliance.doctor.findings import Code, Finding, Severity
from appliance.doctor.subject import Subject

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def ports(subject: Subject) -> Iterator[Finding]:
    """Whether the ports are free; not asked while the daemon itself holds them."""
    if subject.running is not None:
        return
    wanted = [("--port", subject.host, subject.port), ("--bulk-port", subject.host, subject.bulk_port)]
    if subject.web:
        wanted.append(("--http-port", subject.http_host, subject.http_port))
    for flag, host, port in wanted:
        why = why_not(host, port) if port else ""
        if why:
            yield Finding(
                area="ports",
                code=Code.PORT_TAKEN,
                severity=Severity.PROBLEM,
                message=f"The address {host}:{port} ({flag}) cannot be listened on.",
                evidence=f"bind: {why}",
                remedy=f"Stop the process that listens there (ss -ltnp sport = :{port}), or choose another {flag}.",
            )


def listeners(subject: Subject) -> Iterator[Finding]:
    """Whether other hosts can reach the daemon, whose peers are not authenticated."""
    wanted = [("--host", subject.host)] + ([("--http-host", subject.http_host)] if subject.web else [])
    for flag, host in wanted:
        if host not in _LOOPBACK:
            yield Finding(
                area="ports",
                code=Code.LISTENER_EXPOSED,
                severity=Severity.WARNING if subject.insecure else Severity.PROBLEM,
                message="Other hosts can reach this listener."
                if subject.insecure
                else "Other hosts could reach this listener, so the daemon will refuse to start.",
                evidence=f"{flag} is {host}, --insecure is {'given' if subject.insecure else 'not given'}",
                remedy="Use a loopback address, or be sure that every host on the network is trusted: docs/security.md.",
            )


def why_not(host: str, port: int) -> str:
    """Why nobody could listen on an address; empty if one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "error") + f" ({error.strerror})"
    return ""


def why_no_connection(host: str, port: int, *, timeout_seconds: float = 2.0) -> str:
    """Why no connection can be made; empty if one can."""
    try:
        with socket.create_connection((host, port), timeout_seconds):
            return ""
    except OSError as error:
        return str(error.strerror or error)
