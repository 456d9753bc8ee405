"""The occupancy bar shows exactly what the arena holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.protocol.status import L1Status
from tests.integration._peer import GIB, l1
from web.gauge import BAR_UNITS, occupancy_gauge

SIZES = st.integers(0, 1 << 40)


@st.composite
def arenas(draw: st.DrawFn) -> L1Status:
    occupied, reserved, limbo, draining, free, missing = (draw(SIZES) for _ in range(6))
    populated = occupied + reserved + limbo + draining + free
    return L1Status.model_validate(
        l1(
            capacity_bytes=populated + missing,
            populated_bytes=populated,
            occupied_bytes=occupied,
            reserved_bytes=reserved,
            limbo_bytes=limbo,
            draining_bytes=draining,
            free_bytes=free,
            leased_bytes=draw(st.integers(0, occupied)),
            pinned_bytes=draw(st.integers(0, occupied)),
            watermark_bytes=draw(SIZES),
        )
    )


@given(arenas())
def test_segments_are_in_line_and_add_up_to_the_capacity(arena: L1Status) -> None:
    gauge = occupancy_gauge(arena)
    assert sum(segment.bytes for segment in gauge.segments) == arena.capacity_bytes
    assert all(segment.bytes >= 0 for segment in gauge.segments)
    for left, right in zip(gauge.segments, gauge.segments[1:], strict=False):
        assert left.x + left.width == pytest.approx(right.x, abs=0.03)
    assert gauge.segments[-1].x + gauge.segments[-1].width <= BAR_UNITS + 0.1
    assert gauge.used_bytes == arena.populated_bytes - arena.free_bytes


@given(arenas())
def test_watermark_is_drawn_inside_the_bar_or_not_at_all(arena: L1Status) -> None:
    mark = occupancy_gauge(arena).watermark_x
    assert mark is None or 0 <= mark <= BAR_UNITS


def test_pinned_objects_under_a_lease_are_not_shown_twice() -> None:
    gauge = occupancy_gauge(
        L1Status.model_validate(
            l1(occupied_bytes=4 * GIB, free_bytes=60 * GIB, leased_bytes=3 * GIB, pinned_bytes=3 * GIB)
        )
    )
    sizes = {segment.state: segment.bytes for segment in gauge.segments}
    assert (sizes["leased"], sizes["pinned"], sizes["occupied"]) == (3 * GIB, GIB, 0)
