"""How long a restart takes with 100,000 objects in the arena: `python -m tests.benchmarks restart`.

The arena is filled through the store, as a daemon fills it: prompts of 170 chunks, each chunk with an attention object and
three states, each object as small as one can be (4 KiB). Then real daemon processes are started on it, after an orderly
stop and after SIGKILL, and for comparison on an empty directory. Seconds are wall time from the start of the process, and
the CPU time that it had used when it was ready, which tells more on a busy machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TypedDict

from tests.support.boots import Boots, descriptor_of
from tests.support.core_store import EXTENT, attention, chain, recurrent
from tests.support.daemon import DaemonProcess

OBJECTS = 100_000
CHUNKS = 170
SPARE = 1.1
NAMESPACE = descriptor_of(attention(0), recurrent(1), recurrent(2), recurrent(3))


class Row(TypedDict):
    """One start. ``gates_seconds`` is from the first gate to the last object."""

    after: str
    mode: str
    objects: int
    gates_seconds: float
    ready_seconds: float
    ready_cpu_seconds: float


def measure(objects: int = OBJECTS) -> list[Row]:
    """Fill an arena and start daemons on it."""
    prompts = -(-objects // (CHUNKS * len(NAMESPACE.groups)))
    extents = int(prompts * CHUNKS * len(NAMESPACE.groups) * SPARE)
    with tempfile.TemporaryDirectory() as scratch:
        daemon = DaemonProcess(
            Path(scratch), l1_size_gb=extents * EXTENT / (1 << 30), extent_kib=EXTENT // 1024
        )
        try:
            rows = [_start(daemon, "empty directory", 0)]
            daemon.stop()
            for path in daemon.arena_dir.glob("segment-*"):
                path.unlink()
            stored = _fill(daemon.arena_dir, extents, prompts)
            rows.append(_start(daemon, "orderly stop", stored))
            daemon.kill()
            rows.append(_start(daemon, "SIGKILL", stored))
        finally:
            daemon.close()
    return rows


def _fill(directory: Path, extents: int, prompts: int) -> int:
    boots = Boots(directory, extents)
    boot = boots.start()
    index = boot.namespace(NAMESPACE)
    for number in range(prompts):
        boot.put_chain(index, chain(*range(number * CHUNKS, (number + 1) * CHUNKS)))
    boots.end(clean=True)
    return prompts * CHUNKS * len(NAMESPACE.groups)


def _start(daemon: DaemonProcess, after: str, objects: int) -> Row:
    began = time.monotonic()
    status = daemon.start().status()
    ready, cpu = time.monotonic() - began, _cpu_seconds(daemon)
    restart = status.restart
    assert restart is not None
    assert (restart.objects, status.l1.objects) == (objects, objects), "a restart lost objects"
    return Row(
        after=after,
        mode=restart.mode,
        objects=restart.objects,
        gates_seconds=round(restart.seconds, 2),
        ready_seconds=round(ready, 2),
        ready_cpu_seconds=round(cpu, 2),
    )


def _cpu_seconds(daemon: DaemonProcess) -> float:
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(rows: list[Row]) -> str:
    """For people."""
    lines = ["Starts of a daemon, seconds from the start of its process", ""]
    lines.append("| after | mode | objects | gates and objects | ready | CPU until ready |")
    lines.append("|---|---|---|---|---|---|")
    lines += [
        f"| {row['after']} | {row['mode']} | {row['objects']:,} | {row['gates_seconds']} | "
        f"{row['ready_seconds']} | {row['ready_cpu_seconds']} |"
        for row in rows
    ]
    return "\n".join(lines)
