"""What the doctor's tests share: subjects that are well, reports by code, and a machine with other files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.doctor.findings import Code, Finding, Report, Severity
from appliance.doctor.run import examine
from appliance.doctor.subject import Subject
from appliance.settings import Settings
from tests.support.daemon import SHM, DaemonProcess, free_port

MIB = 1 << 20


def well(directory: Path, **changes: Any) -> Subject:
    """A subject with which nothing is wrong: 16 MiB in a directory of its own on shared memory, free ports."""
    settings = Settings(
        port=free_port(),
        http_port=free_port(),
        l1_size_gb=16 / 1024,
        extent_kib=4,
        arena_dir=directory,
        catalog=Path(tempfile.mkdtemp(prefix="pagewarden-doctor-", dir="/var/tmp")) / "catalog.db",
    )
    return replace(Subject.of_settings(settings.model_dump()), **changes)


def found(report: Report, code: Code) -> Finding:
    """The finding of a code, which must say everything that a finding says."""
    matching = [finding for finding in report.findings if finding.code is code]
    assert matching, f"{code} was not found, but {[(f.code.value, f.evidence) for f in report.findings]}"
    assert all(each.message.endswith(".") and each.evidence and each.remedy for each in matching)
    return matching[0]


def provoked(subject: Subject, code: Code, severity: Severity, *told: str) -> Finding:
    """Examine, and expect a finding that names what was provoked."""
    finding = found(examine(subject), code)
    assert finding.severity is severity
    for text in told:
        assert text in f"{finding.message} {finding.evidence} {finding.remedy}"
    return finding


def absent(subject: Subject, *codes: Code) -> None:
    """Examine, and expect none of these."""
    assert not {finding.code for finding in examine(subject).findings} & set(codes)


@contextmanager
def mounted(kind: str, options: str = "size=64m") -> Iterator[Path]:
    """A mount of its own."""
    directory = Path(tempfile.mkdtemp(prefix="pagewarden-mount-"))
    made = subprocess.run(
        ["mount", "-t", kind, "-o", options, kind, str(directory)], capture_output=True, check=False
    )
    if made.returncode:
        directory.rmdir()
        pytest.skip(f"this process may not mount a {kind}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
        directory.rmdir()


def elsewhere(script: str, *flags: str) -> Report:
    """The command, started by a shell in a mount namespace of its own after ``script`` has changed it."""
    command = " ".join(["exec", sys.executable, "-m", "appliance.cli", "doctor", "--json", *flags])
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"set -e\n{script}\n{command}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "Operation not permitted" in done.stderr or "not permitted" in done.stderr:
        pytest.skip("this process may not change a namespace")
    assert done.returncode in (0, 1), done.stderr
    report = Report.model_validate_json(done.stdout)
    assert (done.returncode == 1) is (report.worst is Severity.PROBLEM)
    return report


def flags(subject: Subject) -> list[str]:
    """The command's flags for a subject."""
    return [
        f"--port={subject.port}",
        f"--http-port={subject.http_port}",
        f"--l1-size-gb={subject.l1_bytes / (1 << 30)}",
        f"--extent-kib={subject.extent_bytes // 1024}",
        f"--arena-dir={subject.arena_dir}",
        f"--catalog={subject.catalog}",
    ]


def beside(daemon: DaemonProcess, **changes: Any) -> Subject:
    """The subject of a running daemon."""
    status = daemon.status()
    subject = Subject.of_settings({**status.settings, "port": daemon.port}, running=status)
    return replace(subject, **changes)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for an arena on shared memory."""
    directory = Path(tempfile.mkdtemp(prefix="pagewarden-doctor-", dir=SHM))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def subject(place: Path) -> Iterator[Subject]:
    """A subject with which nothing is wrong."""
    made = well(place)
    yield made
    shutil.rmtree(made.catalog.parent, ignore_errors=True)
