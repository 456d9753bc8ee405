"""Every look in order, each on its own: one that fails is a finding, and the others go on."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterator

from appliance.doctor import catalog, engine_side, machine, network, place, running, vllm
from appliance.doctor.findings import Code, Finding, Report, Severity, report_of
from appliance.doctor.subject import Subject
from appliance.host import GIB, memory_info, mount_of, node_memory

_Look = Callable[[Subject], Iterator[Finding]]

HOST_LOOKS: tuple[tuple[str, _Look], ...] = (
    ("mount", place.mount),
    ("arena", place.arena),
    ("memory", machine.memory),
    ("numa", machine.numa),
    ("limits", machine.limits),
    ("kernel", machine.kernel),
    ("container", machine.container),
    ("clock", machine.clock),
    ("ports", network.ports),
    ("ports", network.listeners),
    ("catalog", catalog.catalog),
)
"""Looks at the daemon's machine and place, by area."""

RUNNING_LOOKS: tuple[tuple[str, _Look], ...] = (("daemon", running.daemon), ("engines", running.engines))
"""Looks at what the daemon says."""

ENGINE_LOOKS: tuple[tuple[str, _Look], ...] = (
    ("engine side", engine_side.engine_side),
    ("limits", machine.limits),
    ("kernel", machine.kernel),
)
"""Looks from an engine's side."""


def examine(subject: Subject) -> Report:
    """The report of everything that concerns ``subject``."""
    looks = ENGINE_LOOKS if subject.engine_side else HOST_LOOKS if subject.same_host else ()
    if subject.running is not None and not subject.engine_side:
        looks += RUNNING_LOOKS
    if subject.vllm_url:
        looks += (("vllm", vllm.vllm),)
    findings: list[Finding] = []
    for area, look in looks:
        findings += _looked(area, look, subject)
    quiet = {area: None for area, _ in looks if all(finding.area != area for finding in findings)}
    findings += [
        Finding(area=area, code=Code.OK, severity=Severity.OK, message=_nothing_wrong(area, subject))
        for area in quiet
    ]
    return report_of(
        findings,
        running=subject.running is not None,
        endpoint=f"{subject.host}:{subject.port}",
        host=socket.gethostname(),
        engine_side=subject.engine_side,
    )


def _looked(area: str, look: _Look, subject: Subject) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(look(subject))
    except Exception as error:  # noqa: BLE001 - one look that fails must not hide what the others see
        found.append(
            Finding(
                area=area,
                code=Code.NOT_LOOKED_AT,
                severity=Severity.WARNING,
                message=f"The {area} could not be looked at.",
                evidence=f"{type(error).__name__}: {error}",
                remedy="Run the doctor as the daemon's user, in its namespaces; report it if that does not help.",
            )
        )
    return found


def _nothing_wrong(area: str, subject: Subject) -> str:
    """What was seen where nothing is wrong."""
    if area == "mount":
        mount = mount_of(subject.arena_dir)
        return f"{subject.arena_dir} is on {mount.point}, {mount.kind}, with room for {subject.arena_bytes / GIB:.2f} GiB."
    seen: dict[str, Callable[[], str]] = {
        "arena": lambda: f"{subject.arena_dir} can be used by user {os.geteuid()}.",
        "memory": lambda: f"{memory_info().get('MemAvailable', 0) / GIB:.1f} GiB are available.",
        "numa": lambda: f"{max(1, len(node_memory()))} node(s); L1 fits, or is spread on purpose.",
        "limits": lambda: "Enough memory may be locked and enough files opened.",
        "kernel": lambda: f"{platform.system()} {platform.release()}.",
        "container": lambda: "The arena is not a container's own.",
        "clock": lambda: "The clock is read fast, and did not jump.",
        "ports": lambda: "The ports are free." if subject.running is None else "The daemon has its ports.",
        "catalog": lambda: f"{subject.catalog} is whole." if subject.catalog.exists() else "It will be made.",
        "daemon": lambda: f"The daemon at {subject.host}:{subject.port} is ready.",
        "engines": lambda: f"{len(subject.running.engines) if subject.running else 0} connected.",
        "engine side": lambda: f"{subject.host}:{subject.port} answers, and its arena can be mapped here.",
        "vllm": lambda: f"The vLLM at {subject.vllm_url} keeps block boundaries and has the connector.",
    }
    return seen[area]()
