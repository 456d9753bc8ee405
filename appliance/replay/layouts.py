"""What a chunk weighs in a replay: by a ratio of state to attention, or by the geometry of a served model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.errors import UnsupportedGeometry
from appliance.geometry import GroupKind, ObjectGroup
from appliance.replay.trace import CHUNK_TOKENS
from appliance.served_models import MODELS, geometry_of

_RATIO_UNITS = 1000
"""Units of an attention chunk where only the ratio is known: fine enough for ratios with three decimals."""

_BYTES_PER_UNIT = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one chunk's attention and of one state, in units; a state of 0 means a model with attention only."""

    attention_units: int
    state_units: int

    @property
    def chunk_units(self) -> int:
        """What one chunk weighs with its state."""
        return self.attention_units + self.state_units

    @property
    def state_ratio(self) -> float:
        """State to attention."""
        return self.state_units / self.attention_units

    @property
    def sizes(self) -> list[int]:
        """Of one entry of each group."""
        return [self.attention_units, self.state_units] if self.state_units else [self.attention_units]

    @property
    def groups(self) -> list[ObjectGroup]:
        """One attention group, and one of states."""
        kinds = (GroupKind.ATTENTION, GroupKind.RECURRENT)[: len(self.sizes)]
        return [
            ObjectGroup(index, kind.value, kind, block_tokens=CHUNK_TOKENS, shards=1, replicas=1)
            for index, kind in enumerate(kinds)
        ]


def layout_of_ratio(state_ratio: float) -> Layout:
    """A chunk whose state weighs ``state_ratio`` times its attention."""
    return Layout(_RATIO_UNITS, round(state_ratio * _RATIO_UNITS))


@dataclass(frozen=True, slots=True)
class GeometryLayouts:
    """A served model's chunk: replicated groups once and states without padding, or all as every rank holds it."""

    name: str
    once: Layout
    padded: Layout

    def units_of_gb(self, gb: float) -> int:
        """Units in so many GB (10^9 bytes)."""
        return int(gb * 10**9) // _BYTES_PER_UNIT


def layouts_of(name: str) -> GeometryLayouts:
    """The layouts of ``<model>-tp<ranks>``, such as ``kimi-k3-tp8``.

    Raises:
        UnsupportedGeometry: naming what there is.
    """
    found = re.fullmatch(r"(.+)-tp([1-9][0-9]?)", name)
    if found is None or found[1] not in MODELS:
        raise UnsupportedGeometry(
            f"There is no geometry '{name}'.",
            remedy=f"Use a model and its tensor-parallel size: {', '.join(f'{model}-tp8' for model in sorted(MODELS))}.",
        )
    geometry = geometry_of(found[1], int(found[2]))
    once = dict.fromkeys(GroupKind, 0)
    padded = dict.fromkeys(GroupKind, 0)
    for cache_group in geometry.groups:
        group, layers = cache_group.group, len(cache_group.layers)
        once[group.kind] += layers * cache_group.run_bytes * group.shards
        padded[group.kind] += layers * geometry.page_bytes * geometry.tensor
    return GeometryLayouts(name, _in_units(once), _in_units(padded))


def _in_units(size_bytes: dict[GroupKind, int]) -> Layout:
    return Layout(
        size_bytes[GroupKind.ATTENTION] // _BYTES_PER_UNIT, size_bytes[GroupKind.RECURRENT] // _BYTES_PER_UNIT
    )
