"""The L1 occupancy as a bar: what stands where, in a fixed coordinate system that the SVG template draws."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.protocol.status import L1Status
from web.explain import L1_STATES

BAR_UNITS = 1000.0
"""The width of the bar in user units of its SVG."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of the bar: ``x`` and ``width`` in user units, ``bytes`` as the daemon counts them."""

    state: str
    meaning: str
    bytes: int
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Gauge:
    """The bar; its segments add up to the capacity. ``watermark_x`` is ``None`` where there is none to draw."""

    segments: tuple[Segment, ...]
    whole_bytes: int
    used_bytes: int
    watermark_x: float | None


def occupancy_gauge(l1: L1Status) -> Gauge:
    """The gauge of an arena.

    ``leased`` and ``pinned`` are parts of ``occupied`` and may overlap, so a pinned object under a lease counts as
    leased here: the bar never shows more than there is.
    """
    leased = min(l1.leased_bytes, l1.occupied_bytes)
    pinned = min(l1.pinned_bytes, l1.occupied_bytes - leased)
    parts = {
        "leased": leased,
        "pinned": pinned,
        "occupied": l1.occupied_bytes - leased - pinned,
        "reserved": l1.reserved_bytes,
        "draining": l1.draining_bytes,
        "limbo": l1.limbo_bytes,
        "free": l1.free_bytes,
        "unpopulated": max(0, l1.capacity_bytes - l1.populated_bytes),
    }
    whole = max(sum(parts.values()), 1)
    segments, at = [], 0.0
    for state, size in parts.items():
        width = BAR_UNITS * max(size, 0) / whole
        segments.append(Segment(state, L1_STATES[state], size, round(at, 2), round(width, 2)))
        at += width
    mark = BAR_UNITS * l1.watermark_bytes / whole if 0 < l1.watermark_bytes < whole else None
    return Gauge(
        segments=tuple(segments),
        whole_bytes=l1.capacity_bytes,
        used_bytes=l1.populated_bytes - l1.free_bytes,
        watermark_x=None if mark is None else round(mark, 2),
    )
