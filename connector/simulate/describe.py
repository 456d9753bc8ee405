"""What identifies a simulated engine: its settings, and the fingerprint and cache groups it registers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from appliance.geometry import GroupKind
from appliance.protocol.messages import GroupFacts
from appliance.served_models import Geometry
from connector.client import ClientOptions
from kernels import CHECKSUM_ALGORITHM, STREAM_LAYOUT

SAVE_CHUNKS = 4
"""Chunks a save job: an engine stores as it computes, not a whole prompt at once."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine. ``cache_tokens`` is how much its own pages hold; ``speed`` divides the times between requests."""

    engine_id: str
    geometry: Geometry
    host: str
    port: int
    attention_backend: str
    cache_tokens: int
    concurrency: int
    abort_share: float
    speed: float
    seed: int
    most_requests: int = 0
    rank_processes: bool = False
    arena_dir: str | None = None

    @property
    def options(self) -> ClientOptions:
        """For its clients."""
        return ClientOptions(
            host=self.host,
            port=self.port,
            engine_id=self.engine_id,
            arena_dir=self.arena_dir,
            client_name="pagewarden-simulate",
        )

    @property
    def blocks(self) -> int:
        """Manager blocks of each rank: a prompt's attention, and states for what is loaded and saved beside it."""
        states = sum(each.group.kind is not GroupKind.ATTENTION for each in self.geometry.groups)
        return math.ceil(self.cache_tokens / self.geometry.block_tokens) + 2 * (states + 1) * SAVE_CHUNKS


def engine_facts(geometry: Geometry) -> dict[str, Any]:
    """The engine-wide fingerprint: simulated bytes are never shared with those of a real engine."""
    return {
        "model": {
            "name": geometry.model.title,
            "architecture": geometry.model.name,
            "weights": "simulated",
            "dtype": "bfloat16",
            "config": {"scale": geometry.scale, "block_tokens": geometry.block_tokens},
        },
        "cache": {"dtype": "simulated", "layout": "simulated"},
        "engine": {"name": "pagewarden-simulate", "version": "1", "platform": "cpu"},
        "parallel": {"tensor": geometry.tensor, "pipeline": 1, "decode_context": 1},
        "draft": "none",
        "pages": {"layout": STREAM_LAYOUT, "checksum": CHECKSUM_ALGORITHM},
    }


def group_facts(geometry: Geometry) -> list[GroupFacts]:
    """The cache groups as a scheduler registers them."""
    return [
        GroupFacts(
            index=each.group.index,
            name=each.group.name,
            kind=each.group.kind,
            block_tokens=each.group.block_tokens,
            shards=each.group.shards,
            replicas=each.group.replicas,
            facts={
                "page_bytes": each.run_bytes,
                "spec": f"{each.group.kind.value}: {len(each.layers)} layers of {each.run_bytes} bytes",
            },
        )
        for each in geometry.groups
    ]


def layer_facts(geometry: Geometry, attention_backend: str) -> dict[str, dict[str, Any]]:
    """The layers as a worker describes them."""
    facts = {}
    for each in geometry.groups:
        attention = each.group.kind is GroupKind.ATTENTION
        for layer in each.layers:
            facts[layer] = {
                "backend": attention_backend if attention else "LINEAR_ATTENTION",
                "kernel_block_tokens": each.group.block_tokens,
                "dtype": "simulated",
                "shape": [each.group.block_tokens if attention else 1, each.run_bytes],
                "strides": [geometry.page_bytes, 1],
                "page_bytes": each.run_bytes,
            }
    return facts
