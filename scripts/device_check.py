#!/usr/bin/env python3
"""Prove and time the GPU path on one device, in minutes: scripts/device_check.py [--dry-run] [--device cuda:0]

Run it from the repository's root, in an environment with torch, Triton, numpy, pyzmq, msgpack and pydantic. The checks
through a daemon need what a daemon needs; --daemon-python names an interpreter that has it. Exits 0 when every check
passed, 1 when one did not, 2 when there is no device. --dry-run interprets the kernels on the CPU and times nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DAEMON_PACKAGES = ROOT / ".run" / "device-packages"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prove and time the GPU path on one device.")
    parser.add_argument(
        "--dry-run", action="store_true", help="interpret the kernels on the CPU; times nothing"
    )
    parser.add_argument("--device", default="cuda:0", help="the device, as torch names it")
    parser.add_argument("--daemon-python", default=sys.executable, help="interpreter that can run the daemon")
    parser.add_argument("--no-daemon", action="store_true", help="leave out the checks through a daemon")
    parser.add_argument("--no-timing", action="store_true", help="check only")
    parser.add_argument("--json", type=Path, help="write the JSON line here as well")
    return parser.parse_args()


class Results:
    """What was checked, with seconds and the reason of each failure."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []

    def run(self, name: str, check: Callable[[], None]) -> None:
        """Run one check; a failure is kept, and the others still run."""
        began = time.perf_counter()
        reason = ""
        try:
            check()
        except Exception as error:  # noqa: BLE001  # one check's failure is a result like another
            reason = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        seconds = round(time.perf_counter() - began, 2)
        self.checks.append({"check": name, "ok": not reason, "seconds": seconds, "reason": reason})
        print(
            f"{'ok    ' if not reason else 'FAILED'} {seconds:7.2f} s  {name}{': ' + reason if reason else ''}",
            flush=True,
        )

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check["ok"] for check in self.checks)


def prepare(*, dry_run: bool) -> None:
    """Settle, before anything imports a kernel, whether kernels are interpreted; and where packages are found."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(ROOT))
    found = [str(ROOT)]
    if DAEMON_PACKAGES.is_dir():
        sys.path.append(str(DAEMON_PACKAGES))
        found.append(str(DAEMON_PACKAGES))
    # For the daemon's process.
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.chdir(ROOT)


def has_device(device: str) -> bool:
    """Whether torch can compute there."""
    import torch

    if not torch.cuda.is_available():
        return False
    torch.zeros(1, device=device)
    return True


def check_daemon(results: Results, subject: Any, python: str) -> None:
    from scripts.device.round_trip import daemon_can_run, daemon_checks, daemon_of

    reason = daemon_can_run(python)
    if reason:
        results.run("a daemon can run", lambda: (_ for _ in ()).throw(RuntimeError(reason)))
        print(
            "A daemon needs packages that this environment lacks. Bring them in one folder of the checkout:\n"
            f"  pip install --target {DAEMON_PACKAGES.relative_to(ROOT)} structlog sqlalchemy alembic typer "
            "pydantic-settings\nor name another interpreter with --daemon-python, or leave this out with --no-daemon."
        )
        return
    with daemon_of(python) as daemon:
        for name, check in daemon_checks(subject, daemon):
            results.run(name, check)


def timings(results: Results, subject: Any) -> dict[str, Any]:
    from scripts.device import timing

    measured: dict[str, Any] = {}
    parts: list[tuple[str, Callable[[], Any]]] = (
        [
            ("copies: GB/s with checksum, beside cudaMemcpyAsync", lambda: timing.copy_rows(subject)),
            ("programs: GB/s at 64 KiB a page", lambda: timing.program_rows(subject)),
            ("registration of 1 GiB", lambda: timing.registration_rows(subject)),
            ("computation beside copies", lambda: [timing.interference_row(subject)]),
        ]
        if subject.real
        else [("timing code, without a device", lambda: timing.dry_rows(subject))]
    )
    for title, part in parts:

        def measure(title: str = title, part: Callable[[], Any] = part) -> None:
            measured[title] = part()

        results.run(f"timed: {title}", measure)
        print(timing.table(title, measured.get(title, [])), flush=True)
    return measured


def main() -> int:
    options = arguments()
    prepare(dry_run=options.dry_run)
    if not options.dry_run and not has_device(options.device):
        print("torch finds no CUDA or HIP device here; --dry-run interprets the kernels", file=sys.stderr)
        return 2
    from scripts.device.subject import InterpretedSubject, TorchSubject
    from scripts.device.verify import device_checks

    began = time.perf_counter()
    subject = InterpretedSubject() if options.dry_run else TorchSubject(options.device)
    print(subject.name, flush=True)
    results = Results()
    for name, check in device_checks(subject):
        results.run(name, check)
    if not options.no_daemon:
        check_daemon(results, subject, options.daemon_python)
    measured = {} if options.no_timing else timings(results, subject)
    document = {
        "device": subject.name,
        "dry_run": options.dry_run,
        "ok": results.ok,
        "seconds": round(time.perf_counter() - began, 1),
        "checks": results.checks,
        "timings": measured,
    }
    line = json.dumps(document)
    print(line, flush=True)
    if options.json:
        options.json.write_text(line + "\n")
    print("all checks passed" if results.ok else "SOME CHECKS FAILED")
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
