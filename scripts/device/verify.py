"""Checks of the copy engine on a device: every byte and every sum against the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector.client.device.engine import DeviceCopies
from connector.client.device.pinning import PinnedArena
from connector.client.device.runtime import DeviceRuntime
from kernels import Direction, Spans, load_backend, reference_backend
from scripts.device.layouts import Layout, awkward, plain, random_bytes
from scripts.device.subject import BOTH, OwnSegment, Pages, Subject

ARENA_BYTES = 48 << 20
PIECE_BYTES = 4 << 20
WAIT_SECONDS = 60.0


class Mismatch(Exception):
    """Something is not as the reference has it."""


def require(condition: object, what: str) -> None:
    """Raise Mismatch unless the condition holds."""
    if not condition:
        raise Mismatch(what)


@dataclass
class Rig:
    """An engine with a segment of which a part is registered."""

    subject: Subject
    runtime: DeviceRuntime
    copies: DeviceCopies
    segment: OwnSegment
    before: dict[str, Any] = field(default_factory=dict)


@contextmanager
def rig(subject: Subject, usable_bytes: int, *, arena_bytes: int = ARENA_BYTES) -> Iterator[Rig]:
    """An engine with an arena of its own; leaves when `usable_bytes` of it are registered."""
    runtime = subject.make_runtime()
    pinned = PinnedArena(runtime, piece_bytes=PIECE_BYTES, settle_seconds=0.01)
    copies = DeviceCopies(runtime, pinned)
    segment = OwnSegment(arena_bytes, usable_bytes)
    copies.mapped(segment)
    deadline = time.monotonic() + WAIT_SECONDS
    while pinned.registered_bytes < usable_bytes // PIECE_BYTES * PIECE_BYTES:
        require(
            time.monotonic() < deadline,
            "the arena was not registered in time: see the log for the driver's reason",
        )
        time.sleep(0.01)
    try:
        yield Rig(subject, runtime, copies, segment)
    finally:
        copies.close()
        left = pinned.registered_bytes
    require(left == 0, f"{left} bytes are still registered after close")


USABLE: dict[str, int] = {"registered": ARENA_BYTES, "bounced": 0, "mixed": ARENA_BYTES // 2}


def bytes_and_sums(subject: Subject, path: str) -> None:
    """Gather and scatter of awkward pages: bytes, padding, sums; then the arena's bytes with one bit changed."""
    with rig(subject, USABLE[path]) as made:
        for number, layout in enumerate(awkward(4 if subject.real else 1)):
            _one_layout(made, layout, seed=number)


def _one_layout(made: Rig, layout: Layout, seed: int) -> None:
    what = layout.name
    content = random_bytes(layout.buffer_bytes, seed)
    pages = made.subject.pages(made.runtime, layout.buffer_bytes)
    pages.write(content)
    made.segment.data[:] = 0xA5
    arena_bytes = made.segment.data_bytes
    spans, objects = layout.batch(pages.address, made.segment.data_address, arena_bytes, 2, seed)
    host = content.copy()
    shadow = np.full(arena_bytes + 4096, 0xA5, dtype=np.uint8)
    shadow = shadow[-shadow.ctypes.data % 4096 :][:arena_bytes]
    same, _ = layout.batch(int(host.ctypes.data), int(shadow.ctypes.data), arena_bytes, 2, seed)

    reference = reference_backend()
    expected = reference.copy_spans_checksummed(same, Direction.STORE, objects)
    backend = made.copies.backend
    sums = backend.copy_spans_checksummed(spans, Direction.STORE, objects)
    require(sums.tolist() == expected.tolist(), f"{what}: sums of a store differ")
    require(np.array_equal(made.segment.data, shadow), f"{what}: stored bytes differ")
    require(np.array_equal(pages.read(), content), f"{what}: a store changed the pages")

    empty = random_bytes(layout.buffer_bytes, seed + 1000)
    pages.write(empty)
    host[:] = empty
    reference.copy_spans(same, Direction.LOAD)
    sums = backend.copy_spans_checksummed(spans, Direction.LOAD, objects)
    require(sums.tolist() == expected.tolist(), f"{what}: sums of a load differ")
    require(
        np.array_equal(pages.read(), host), f"{what}: loaded bytes differ, or bytes beside them were written"
    )

    at = int(spans.arena_address[0]) - made.segment.data_address
    made.segment.data[at] ^= 0x04
    sums = backend.copy_spans_checksummed(spans, Direction.LOAD, objects)
    changed = [n for n in range(objects) if int(sums[n]) != int(expected[n])]
    require(changed == [int(spans.object_index[0])], f"{what}: a changed bit was not seen, or seen elsewhere")


def behind_the_compute_stream(subject: Subject, path: str) -> None:
    """A store of pages that are still to be computed, a load into pages that are still to be written."""
    with rig(subject, USABLE[path]) as made:
        layout = plain(65_536, 2, 16 if subject.real else 4)
        old, new, junk = (random_bytes(layout.buffer_bytes, seed) for seed in (1, 2, 3))
        pages = subject.pages(made.runtime, layout.buffer_bytes)
        spans, objects = layout.batch(pages.address, made.segment.data_address, made.segment.data_bytes, 2, 5)
        pages.write(old)
        _ordered(made, pages, new, Direction.STORE, spans, objects)
        pages.write(junk)
        _ordered(made, pages, old, Direction.LOAD, spans, objects)
        require(np.array_equal(pages.read(), new), "a load did not wait for what still wrote the pages")


def _ordered(made: Rig, pages: Pages, coming: Any, direction: Direction, spans: Spans, objects: int) -> None:
    """Queue a write of the pages on the compute stream, then copy behind it."""
    waits = made.subject.later(made.runtime, pages, coming)
    ready = made.copies.mark(direction)
    ready()
    require(waits(), f"the mark of a {direction.value} waited for the engine's stream")
    made.copies.backend.copy_spans_checksummed(spans, direction, objects)
    require(not waits(), f"a {direction.value} ended before what it had to wait for")


def many_batches_on_two_threads(subject: Subject) -> None:
    """Stores and loads at the same time on their own lanes, each with its own pages."""
    from concurrent.futures import ThreadPoolExecutor

    rounds = 40 if subject.real else 2
    half = ARENA_BYTES // 2
    with rig(subject, ARENA_BYTES - PIECE_BYTES) as made:

        def work(direction: Direction, place: int) -> None:
            layout = plain(16_384, 3, 64 if subject.real else 6)
            pages = subject.pages(made.runtime, layout.buffer_bytes)
            start = made.segment.data_address + place
            arena = made.segment.data[place : place + half]
            spans, objects = layout.batch(pages.address, start, half, 2, place)
            host = load_backend()
            for number in range(rounds):
                content = random_bytes(layout.buffer_bytes, number)
                pages.write(content)
                mirror, _ = layout.batch(int(content.ctypes.data), start, half, 2, place)
                if direction is Direction.STORE:
                    sums = made.copies.backend.copy_spans_checksummed(spans, direction, objects)
                    stored = arena.copy()
                    expected = host.copy_spans_checksummed(mirror, direction, objects)
                    require(np.array_equal(stored, arena), "stored bytes differ under load")
                else:
                    expected = host.copy_spans_checksummed(mirror, Direction.STORE, objects)
                    pages.write(np.zeros_like(content))
                    sums = made.copies.backend.copy_spans_checksummed(spans, direction, objects)
                    require(np.array_equal(pages.read(), content), "loaded bytes differ under load")
                require(sums.tolist() == expected.tolist(), "sums differ under load")

        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(work, direction, n * half) for n, direction in enumerate(BOTH)]
            for job in jobs:
                job.result()


def while_a_graph_is_captured(subject: Subject) -> None:
    """Pieces are registered and copies run on other threads while this one captures a graph, as engines do at start."""
    from concurrent.futures import ThreadPoolExecutor

    with rig(subject, 0) as made, ThreadPoolExecutor(1) as pool:
        layout = plain(65_536, 2, 4)
        content = random_bytes(layout.buffer_bytes, 11)
        pages = subject.pages(made.runtime, layout.buffer_bytes)
        pages.write(content)
        arena = made.segment
        spans, objects = layout.batch(pages.address, arena.data_address, arena.data_bytes, 2, 3)
        mirror, _ = layout.batch(int(content.ctypes.data), arena.data_address, arena.data_bytes, 2, 3)
        copy = made.copies.backend.copy_spans_checksummed
        with subject.capturing():
            bounced = pool.submit(copy, spans, Direction.STORE, objects).result()
            arena.usable = arena.data_bytes
            deadline = time.monotonic() + WAIT_SECONDS
            while made.copies.pinned.waiting_bytes:
                require(time.monotonic() < deadline, "the arena was not registered during a capture")
                time.sleep(0.01)
            direct = pool.submit(copy, spans, Direction.STORE, objects).result()
        expected = load_backend().copy_spans_checksummed(mirror, Direction.STORE, objects)
        require(bounced.tolist() == direct.tolist() == expected.tolist(), "sums differ during a capture")


def pinned_again_after_it_was_unpinned(subject: Subject) -> None:
    """A range that was retired can be registered again: nothing of it was left behind."""
    runtime = subject.make_runtime()
    segment = OwnSegment(PIECE_BYTES)
    for _ in range(2):
        runtime.register(segment.data_address, segment.data_bytes)
        runtime.unregister(segment.data_address)


def device_checks(subject: Subject) -> list[tuple[str, Callable[[], None]]]:
    """Everything that needs no daemon, by name."""
    checks: list[tuple[str, Callable[[], None]]] = []
    for path in USABLE:
        checks.append((f"bytes, padding and sums, {path}", lambda path=path: bytes_and_sums(subject, path)))  # type: ignore[misc]
        checks.append(
            (
                f"order behind the compute stream, {path}",
                lambda path=path: behind_the_compute_stream(subject, path),  # type: ignore[misc]
            )
        )
    checks.append(("registered and copied during a capture", lambda: while_a_graph_is_captured(subject)))
    checks.append(("stores and loads at the same time", lambda: many_batches_on_two_threads(subject)))
    checks.append(
        ("registered, unregistered, registered", lambda: pinned_again_after_it_was_unpinned(subject))
    )
    return checks
