"""Timings on a device, each beside what `cudaMemcpyAsync` does with the same bytes. Medians; nothing is asserted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from connector.client.device.engine import DeviceCopies
from connector.client.device.pinning import PinnedArena
from kernels import Direction
from scripts.device.layouts import plain
from scripts.device.subject import BOTH, OwnSegment, Pages, Subject, TorchSubject
from scripts.device.verify import WAIT_SECONDS, require

MIB = 1 << 20
PAGE_BYTES = (4096, 16_384, 65_536, 262_144, 1 << 20, 2 << 20)
LAYERS = 4
OBJECTS = 4
BATCH_BYTES = 64 * MIB
EXTENT_BYTES = 256 << 10
"""What a daemon has by default."""
PROGRAMS = (8, 16, 32, 64, 128)
REGISTERED_BYTES = 1 << 30
REGISTER_PIECES = (16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
REPEATS = 9
Row = dict[str, Any]


def _median_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    work()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _rate(size: int, seconds: float) -> float:
    return round(size / seconds / 1e9, 2)


def memcpy(subject: TorchSubject, size: int, direction: Direction) -> float:
    """Seconds of one contiguous copy between pinned host memory and the device, waited for."""
    import torch

    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device=subject.device)
    target, source = (host, device) if direction is Direction.STORE else (device, host)

    def work() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(subject.device).synchronize()

    return _median_seconds(work)


class Copying:
    """An engine over a segment of its own, all of it registered or none."""

    def __init__(self, subject: Subject, *, registered: bool, size: int, programs: int | None = None) -> None:
        self.subject = subject
        self.runtime = subject.make_runtime(programs=programs)
        self.pinned = PinnedArena(self.runtime, settle_seconds=0.01)
        self.copies = DeviceCopies(self.runtime, self.pinned)
        self.segment = OwnSegment(size, size if registered else 0)
        self._pages: list[Pages] = []
        self.copies.mapped(self.segment)
        deadline = time.monotonic() + WAIT_SECONDS
        while registered and self.pinned.waiting_bytes:
            require(time.monotonic() < deadline, "the arena was not registered in time")
            time.sleep(0.01)

    def batch(self, page_bytes: int, batch_bytes: int, direction: Direction) -> Callable[[], object]:
        """A batch through the engine: tables, sums and waiting included, planning not."""
        layout = plain(page_bytes, LAYERS, batch_bytes // page_bytes // LAYERS)
        pages = self.subject.pages(self.runtime, layout.buffer_bytes)
        spans, objects = layout.batch(
            pages.address,
            self.segment.data_address,
            self.segment.data_bytes,
            max(1, layout.blocks // OBJECTS),
            seed=0,
            extent_bytes=EXTENT_BYTES,
        )
        self._pages.append(pages)
        return lambda: self.copies.backend.copy_spans_checksummed(spans, direction, objects)

    def seconds(
        self, page_bytes: int, batch_bytes: int, direction: Direction, *, repeats: int = REPEATS
    ) -> float:
        """The median time of a batch."""
        return _median_seconds(self.batch(page_bytes, batch_bytes, direction), repeats)

    def close(self) -> None:
        """Unpin."""
        self.copies.close()


def copy_rows(subject: TorchSubject) -> list[Row]:
    """GB/s by page size, direction and path, with the checksum, and what a plain copy of the same bytes gives."""
    rows: list[Row] = []
    plain_copy = {each: memcpy(subject, BATCH_BYTES, each) for each in BOTH}
    large = {each: memcpy(subject, 256 * MIB, each) for each in BOTH}
    for path in ("registered", "bounced"):
        copying = Copying(subject, registered=path == "registered", size=2 * BATCH_BYTES)
        for page_bytes in PAGE_BYTES if path == "registered" else (65_536, 2 << 20):
            for direction in BOTH:
                seconds = copying.seconds(page_bytes, BATCH_BYTES, direction)
                rows.append(
                    {
                        "page_bytes": page_bytes,
                        "direction": direction.value,
                        "path": path,
                        "gb_per_second": _rate(BATCH_BYTES, seconds),
                        "memcpy_same_bytes": _rate(BATCH_BYTES, plain_copy[direction]),
                        "memcpy_256_mib": _rate(256 * MIB, large[direction]),
                        "ratio_same_bytes": round(plain_copy[direction] / seconds, 3),
                        "ratio_256_mib": round(large[direction] * BATCH_BYTES / (256 * MIB) / seconds, 3),
                    }
                )
        copying.close()
    return rows


def program_rows(subject: TorchSubject) -> list[Row]:
    """GB/s by the number of programs, at 64 KiB a page."""
    rows: list[Row] = []
    for programs in PROGRAMS:
        copying = Copying(subject, registered=True, size=2 * BATCH_BYTES, programs=programs)
        rates = {each.value: _rate(BATCH_BYTES, copying.seconds(65_536, BATCH_BYTES, each)) for each in BOTH}
        rows.append({"programs": programs, **rates})
        copying.close()
    return rows


def registration_rows(subject: TorchSubject) -> list[Row]:
    """Seconds for each GiB, by the size of a piece, on memory that is there."""
    rows: list[Row] = []
    runtime = subject.make_runtime()
    for piece in REGISTER_PIECES:
        segment = OwnSegment(REGISTERED_BYTES)
        starts = range(segment.data_address, segment.data_address + REGISTERED_BYTES, piece)
        taken = []
        for start in starts:
            began = time.perf_counter()
            seen_at = runtime.register(start, piece)
            taken.append(time.perf_counter() - began)
        began = time.perf_counter()
        for start in starts:
            runtime.unregister(start)
        rows.append(
            {
                "piece_mib": piece // MIB,
                "register_seconds_per_gib": round(sum(taken) * (1 << 30) / REGISTERED_BYTES, 3),
                "device_sees_host_address": seen_at == starts[-1],
                "longest_piece_seconds": round(max(taken), 4),
                "unregister_seconds_per_gib": round(
                    (time.perf_counter() - began) * (1 << 30) / REGISTERED_BYTES, 3
                ),
            }
        )
    return rows


def interference_row(subject: TorchSubject) -> Row:
    """How much slower the compute stream's matrix products are while copies run, both directions at once."""
    import threading

    import torch

    copying = Copying(subject, registered=True, size=4 * BATCH_BYTES)
    a = torch.randn(4096, 4096, device=subject.device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(50):
            torch.matmul(a, a)
        torch.cuda.current_stream(subject.device).synchronize()

    alone = _median_seconds(products)
    stop = threading.Event()
    failed: list[Exception] = []

    batches = [copying.batch(65_536, BATCH_BYTES, each) for each in BOTH]
    copied = [0, 0]

    def copy(number: int) -> None:
        try:
            while not stop.is_set():
                batches[number]()
                copied[number] += BATCH_BYTES
        except Exception as error:  # noqa: BLE001  # raised by the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(len(BOTH))]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    before, began = sum(copied), time.perf_counter()
    beside = _median_seconds(products)
    rate = _rate(sum(copied) - before, time.perf_counter() - began)
    stop.set()
    for thread in threads:
        thread.join()
    copying.close()
    require(not failed, f"a copy failed beside computation: {failed}")
    return {
        "products_alone_seconds": round(alone, 4),
        "slowdown_beside_copies": round(beside / alone, 3),
        "copies_gb_per_second": rate,
    }


def dry_rows(subject: Subject) -> list[Row]:
    """The same code on a few pages, where there is no device: its times mean nothing and are not given."""
    rows: list[Row] = []
    for path in ("registered", "bounced"):
        copying = Copying(subject, registered=path == "registered", size=4 * MIB)
        for direction in BOTH:
            seconds = copying.seconds(16_384, 8 * LAYERS * 16_384, direction, repeats=1)
            rows.append({"path": path, "direction": direction.value, "ran": bool(np.isfinite(seconds))})
        copying.close()
    return rows


def table(title: str, rows: list[Row]) -> str:
    """Rows as text."""
    if not rows:
        return title
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([title, *lines])
