"""Page copies against contiguous copies: the cost of scattering, and of the checksum.

For each page size one object is copied between the pages of a cache and an arena: pages in random block order,
extents in random order, one thread. A ratio is bytes per second of that copy over those of one contiguous numpy
copy, both timed in the same round; the median over the rounds is reported, so that another process's burst moves
one round and not the result. Engine memory is an ordinary allocation, the arena is shared memory.
"""

from __future__ import annotations

import mmap
import time
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from kernels import Direction, GroupPages, PageMap, Spans, load_backend, plan_object

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB = 1 << 10, 1 << 20
PAGE_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB)
BASELINE_BYTES = 256 * MIB
OBJECT_BYTES = 128 * MIB
"""Larger than a last-level cache of most hosts, since a cache is not what is measured."""
EXTENT_BYTES = 2 * MIB
LAYERS = 4
ROUNDS = 15


class Row(TypedDict):
    """One page size and direction; ratios are medians, higher is better."""

    page_bytes: int
    layers: int
    direction: str
    ratio_256mib: float
    """Without checksum, against a 256 MiB contiguous numpy copy."""
    ratio_256mib_checksum: float
    """With checksum, against the same."""
    ratio_same_size: float
    """Without checksum, against a contiguous numpy copy of as many bytes between the same two memories."""


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _median(ratios: np.ndarray) -> float:
    return round(float(np.median(ratios)), 3)


def _object_spans(
    engine: np.ndarray, arena: np.ndarray, page_bytes: int, random: np.random.Generator
) -> Spans:
    blocks = OBJECT_BYTES // page_bytes // LAYERS
    layer_bytes = OBJECT_BYTES // LAYERS
    start = engine.ctypes.data + -engine.ctypes.data % 64
    group = GroupPages(
        tuple(
            PageMap(start + layer * layer_bytes, 1, page_bytes, ((0, page_bytes),), blocks)
            for layer in range(LAYERS)
        )
    )
    extents = random.permutation(OBJECT_BYTES // EXTENT_BYTES)
    return plan_object(
        group.stream_runs(random.permutation(blocks)),
        [(int(first), 1) for first in extents],
        extent_bytes=EXTENT_BYTES,
        data_base_address=arena.ctypes.data,
        extent_limit=len(extents),
    )


def measure() -> list[Row]:
    """Return a row for each page size and direction."""
    random = np.random.default_rng(0)
    backend = load_backend()
    # Filled, so that no page is the kernel's shared zero page and none is faulted in while timed.
    baseline_from, baseline_to = (np.full(BASELINE_BYTES, fill, dtype=np.uint8) for fill in (1, 2))
    engine = np.full(OBJECT_BYTES + 64, 3, dtype=np.uint8)
    arena = np.frombuffer(mmap.mmap(-1, OBJECT_BYTES), dtype=np.uint8)
    arena[:] = 4
    flat = engine[:OBJECT_BYTES]
    rows: list[Row] = []
    for page_bytes in PAGE_BYTES:
        spans = _object_spans(engine, arena, page_bytes, random)
        for direction in Direction:
            source, target = (flat, arena) if direction is Direction.STORE else (arena, flat)
            work: dict[str, Callable[[], object]] = {
                "baseline": partial(np.copyto, baseline_to, baseline_from),
                "plain": partial(backend.copy_spans, spans, direction),
                "checksummed": partial(backend.copy_spans_checksummed, spans, direction, 1),
                "same_size": partial(np.copyto, target, source),
            }
            # One round after the other, each with everything, so that noise falls on both sides of a ratio.
            timed = [{name: _seconds(action) for name, action in work.items()} for _ in range(ROUNDS)]
            seconds = {name: np.array([row[name] for row in timed]) for name in work}
            contiguous = seconds["baseline"] * (OBJECT_BYTES / BASELINE_BYTES)
            rows.append(
                {
                    "page_bytes": page_bytes,
                    "layers": LAYERS,
                    "direction": direction.value,
                    "ratio_256mib": _median(contiguous / seconds["plain"]),
                    "ratio_256mib_checksum": _median(contiguous / seconds["checksummed"]),
                    "ratio_same_size": _median(seconds["same_size"] / seconds["plain"]),
                }
            )
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    lines = [
        f"page copy with the {load_backend().name} backend, one thread; ratio to a contiguous numpy copy",
        f"{'page':>9} {'direction':>9} {'to 256 MiB':>11} {'checksum':>9} {'to same size':>13}",
    ]
    lines += [
        f"{row['page_bytes'] // KIB:>5} KiB {row['direction']:>9} {row['ratio_256mib']:>11.2f} "
        f"{row['ratio_256mib_checksum']:>9.2f} {row['ratio_same_size']:>13.2f}"
        for row in rows
    ]
    return "\n".join(lines)
