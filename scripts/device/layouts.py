"""Page layouts for checks and timings, and batches of objects in them, once on a device and once in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels import GroupPages, PageMap, Spans, plan_object

EXTENT_BYTES = 16 << 10
"""Small, so that pages are cut in many places."""
Layer = tuple[int, int, tuple[tuple[int, int], ...]]
"""(kernel blocks a block, kernel block stride, runs)."""


@dataclass(frozen=True)
class Layout:
    """Layers of pages over one buffer, one after another; `lead_bytes` shifts all of them."""

    name: str
    layers: tuple[Layer, ...]
    blocks: int
    lead_bytes: int = 0

    @property
    def buffer_bytes(self) -> int:
        """Length of the buffer that holds all layers."""
        return self.lead_bytes + sum(_layer_bytes(layer, self.blocks) for layer in self.layers)

    def group(self, address: int) -> GroupPages:
        """The pages over a buffer at this address."""
        start = address + self.lead_bytes
        maps = []
        for per_block, stride, runs in self.layers:
            maps.append(PageMap(start, per_block, stride, runs, per_block * self.blocks))
            start += _layer_bytes((per_block, stride, runs), self.blocks)
        return GroupPages(tuple(maps))

    def batch(
        self,
        address: int,
        arena_address: int,
        arena_bytes: int,
        blocks_per_object: int,
        seed: int,
        extent_bytes: int = EXTENT_BYTES,
    ) -> tuple[Spans, int]:
        """All blocks as objects in scattered extents; the same seed gives the same batch. Returns spans and objects."""
        random = np.random.default_rng(seed)
        group = self.group(address)
        order = random.permutation(self.blocks)
        extents = list(random.permutation(arena_bytes // extent_bytes))
        needed = -(-group.object_stream_bytes(blocks_per_object) // extent_bytes)
        plans = []
        for number in range(self.blocks // blocks_per_object):
            mine = [(int(extents.pop()), 1) for _ in range(needed)]
            plans.append(
                plan_object(
                    group.stream_runs(order[number * blocks_per_object :][:blocks_per_object]),
                    mine,
                    extent_bytes=extent_bytes,
                    data_base_address=arena_address,
                    extent_limit=arena_bytes // extent_bytes,
                    object_index=number,
                )
            )
        return Spans.concatenate(plans), len(plans)


def _layer_bytes(layer: Layer, blocks: int) -> int:
    per_block, stride, _ = layer
    return per_block * stride * blocks


def plain(page_bytes: int, layers: int, blocks: int) -> Layout:
    """Pages without padding."""
    one: Layer = (1, page_bytes, ((0, page_bytes),))
    return Layout(f"{page_bytes // 1024} KiB", (one,) * layers, blocks)


def awkward(scale: int) -> list[Layout]:
    """What real and unreal models have: padding, several kernel blocks a block, odd sizes, two runs in a page."""
    latent: Layer = (4, 16 * 576 * 2, ((0, 16 * 576 * 2),))
    state: Layer = (1, 327_680, ((0, 268_288),))
    halves: Layer = (1, 40_960, ((0, 8192), (20_480, 8192)))
    odd: Layer = (2, 4500, ((3, 1001), (1500, 3000)))
    by_eight: Layer = (1, 4104, ((8, 4088),))
    return [
        Layout("latent cache, 4 kernel blocks a block", (latent, latent), 4 * scale),
        Layout("padded state beside latent cache", (state, latent), 2 * scale),
        Layout("two runs in a page", (halves,), 4 * scale),
        Layout("odd sizes and odd addresses", (odd, odd), 4 * scale, lead_bytes=1),
        Layout("addresses by eight", (by_eight,), 4 * scale),
        plain(65_536, 2, 2 * scale),
    ]


def random_bytes(size: int, seed: int) -> NDArray[np.uint8]:
    """Bytes of which no two places are alike."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
