"""Pages: where the bytes of one cache group lie in engine memory, and in what order they form a stream.

Stream layout `pages-64/1`: an object's pages are laid one after another, layer-major: for each layer in sorted
name order, for each manager block of the chunk in order, for each kernel block of it in order, for each
contiguous run of that kernel block in ascending offset. Each run starts at the next multiple of 64 bytes. The
padding between is never read, written or checksummed, and neither is what a page holds between its runs and its
stride. The stream's length is where its last run ends, not rounded.

Addresses are plain numbers: nothing here knows a tensor library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kernels.spans import read_only_column

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

STREAM_LAYOUT = "pages-64/1"
"""Name of the layout above; it changes page bytes, so it is part of the fingerprint."""

RUN_ALIGNMENT_BYTES = 64
"""Runs start at multiples of this: one cache line, which is also the widest vector store."""

MAX_RUNS_PER_KERNEL_BLOCK = 4096
"""More than this means that the wrong dimension was taken for the block dimension."""


def _aligned(length_bytes: int) -> int:
    return -(-length_bytes // RUN_ALIGNMENT_BYTES) * RUN_ALIGNMENT_BYTES


@dataclass(frozen=True, eq=False)
class StreamRuns:
    """The contiguous pieces of one object's stream, in stream order.

    Equal-length uint64 vectors: `engine_address`, `length_bytes`, `stream_offset` (multiples of 64 when they come
    from pages). Pieces do not overlap in the stream.
    """

    engine_address: NDArray[np.uint64]
    length_bytes: NDArray[np.uint64]
    stream_offset: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.length_bytes)

    @property
    def stream_bytes(self) -> int:
        """Length of the stream: where its last run ends. 0 without runs."""
        return int(self.stream_offset[-1] + self.length_bytes[-1]) if len(self) else 0

    @property
    def total_bytes(self) -> int:
        """Bytes in the runs, padding left out."""
        return int(self.length_bytes.sum(dtype=np.uint64))

    def coalesced(self) -> StreamRuns:
        """Return the same bytes with pieces joined where both their memory and their stream continue."""
        if len(self) < 2:
            return self
        continues = (self.engine_address[:-1] + self.length_bytes[:-1] == self.engine_address[1:]) & (
            self.stream_offset[:-1] + self.length_bytes[:-1] == self.stream_offset[1:]
        )
        first = np.concatenate(([0], np.flatnonzero(~continues) + 1))
        return StreamRuns(
            self.engine_address[first],
            np.add.reduceat(self.length_bytes, first),
            self.stream_offset[first],
        )


def kernel_block_runs(
    shape: Sequence[int], strides: Sequence[int], item_bytes: int, block_dimension: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Derive (kernel block stride in bytes, runs inside one kernel block) from a cache tensor.

    `shape` and `strides` as the tensor reports them, strides in elements. `block_dimension` is the dimension that
    counts kernel blocks: 0 for `[blocks, 2, ...]` and `[blocks, 1, 16, 576]`, 1 for `[2, blocks, ...]`. Runs are
    (offset in bytes, length in bytes) in ascending offset; adjacent bytes are one run whatever the order of the
    dimensions. A padded page keeps its padding out: int8 `[blocks, 1, 1, 268288]` with stride 327680 has the one
    run (0, 268288).

    Raises ValueError for strides that overlap, are not positive, or give absurdly many runs.
    """
    if len(shape) != len(strides) or not 0 <= block_dimension < len(shape):
        raise ValueError(
            f"shape {tuple(shape)}, strides {tuple(strides)} have no block dimension {block_dimension}"
        )
    if min(shape) < 1 or item_bytes < 1:
        raise ValueError(f"an empty cache tensor: shape {tuple(shape)}, {item_bytes} bytes an item")
    dimensions = [
        (stride * item_bytes, size, index == block_dimension)
        for index, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if size > 1
    ]
    block_stride = strides[block_dimension] * item_bytes
    contiguous, reach = item_bytes, item_bytes
    outer: list[tuple[int, int]] = []
    for stride, size, counts_blocks in sorted(dimensions):
        if stride < reach:
            raise ValueError(f"overlapping strides {tuple(strides)} for shape {tuple(shape)}")
        if counts_blocks:
            pass
        elif stride == contiguous and not outer:
            contiguous *= size
        else:
            outer.append((stride, size))
        reach = stride * (size - 1) + reach
    run_count = math.prod(size for _, size in outer)
    if run_count > MAX_RUNS_PER_KERNEL_BLOCK:
        raise ValueError(f"{run_count} runs in one kernel block: is {block_dimension} the block dimension?")
    offsets = [0]
    for stride, size in outer:
        offsets = [base + step * stride for step in range(size) for base in offsets]
    # A lone block needs no stride, and an engine may report any number for it.
    own_reach = max(offsets) + contiguous
    return (block_stride if shape[block_dimension] > 1 else max(block_stride, own_reach)), tuple(
        (offset, contiguous) for offset in sorted(offsets)
    )


@dataclass(frozen=True)
class PageMap:
    """One layer's pages in one tensor.

    `base_address` is that of kernel block 0. Manager block b covers kernel blocks b*r .. b*r+r-1 with
    r = `kernel_blocks_per_block`. Kernel block k starts `kernel_block_stride_bytes` * k after the base and holds
    the `runs`, (offset, length) in bytes, ascending. `kernel_block_count` bounds the block ids accepted.

    Raises ValueError for numbers that describe no page.
    """

    base_address: int
    kernel_blocks_per_block: int
    kernel_block_stride_bytes: int
    runs: tuple[tuple[int, int], ...]
    kernel_block_count: int

    def __post_init__(self) -> None:
        sizes = (self.kernel_blocks_per_block, self.kernel_block_stride_bytes, self.kernel_block_count)
        if self.base_address < 1 or min(sizes) < 1:
            raise ValueError(f"not a page map: {self}")
        end = 0
        for offset, length in self.runs:
            if offset < end or length < 1:
                raise ValueError(f"runs must be ascending, apart and not empty: {self.runs}")
            end = offset + length
        if not end:
            raise ValueError("a page without runs")

    @classmethod
    def from_tensor(
        cls,
        *,
        base_address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        item_bytes: int,
        block_dimension: int,
        kernel_blocks_per_block: int = 1,
    ) -> PageMap:
        """Describe a cache tensor; `base_address` is that of its first element, the rest as `kernel_block_runs`."""
        stride_bytes, runs = kernel_block_runs(shape, strides, item_bytes, block_dimension)
        return cls(base_address, kernel_blocks_per_block, stride_bytes, runs, shape[block_dimension])

    @property
    def block_count(self) -> int:
        """Manager blocks that lie wholly in the tensor."""
        return self.kernel_block_count // self.kernel_blocks_per_block

    @property
    def block_stream_bytes(self) -> int:
        """Bytes from one manager block to the next in the stream, padding included."""
        return self.kernel_blocks_per_block * sum(_aligned(length) for _, length in self.runs)

    def block_runs(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return (memory offset, length, stream offset), in bytes, of the runs of one manager block."""
        offsets = np.array([offset for offset, _ in self.runs], dtype=np.uint64)
        lengths = np.array([length for _, length in self.runs], dtype=np.uint64)
        strides = np.array([_aligned(length) for _, length in self.runs], dtype=np.uint64)
        kernel_block = np.arange(self.kernel_blocks_per_block, dtype=np.uint64)[:, None]
        memory = kernel_block * np.uint64(self.kernel_block_stride_bytes) + offsets
        all_lengths = np.tile(lengths, self.kernel_blocks_per_block)
        all_strides = np.tile(strides, self.kernel_blocks_per_block)
        return memory.ravel(), all_lengths, np.cumsum(all_strides) - all_strides


@dataclass(frozen=True)
class GroupPages:
    """The page maps of one cache group's layers, in sorted layer-name order.

    Build it with `from_layers`, which sorts.
    """

    layers: tuple[PageMap, ...]
    _templates: tuple[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a cache group without layers")
        object.__setattr__(self, "_templates", tuple(layer.block_runs() for layer in self.layers))

    @classmethod
    def from_layers(cls, layers: Mapping[str, PageMap]) -> GroupPages:
        """Return the group of these layers, sorted by name."""
        return cls(tuple(layers[name] for name in sorted(layers)))

    @property
    def block_count(self) -> int:
        """Manager blocks that every layer has."""
        return min(layer.block_count for layer in self.layers)

    def object_stream_bytes(self, blocks_per_chunk: int) -> int:
        """Return the stream length of an object that holds this many manager blocks of every layer."""
        if blocks_per_chunk < 1:
            raise ValueError(f"an object of {blocks_per_chunk} blocks")
        last_run_bytes = self.layers[-1].runs[-1][1]
        whole = sum(layer.block_stream_bytes for layer in self.layers) * blocks_per_chunk
        return whole - _aligned(last_run_bytes) + last_run_bytes

    def stream_runs(self, block_ids: ArrayLike) -> StreamRuns:
        """Return the stream of the object held by these manager blocks, in the order given.

        `block_ids` is a vector of integers, at least one. Raises ValueError for an id outside a layer's tensor,
        which would touch memory that is not cache.
        """
        ids = read_only_column(block_ids, np.uint64, "block_ids").astype(np.uint64)
        if not len(ids):
            raise ValueError("an object without blocks")
        if int(ids.max()) >= self.block_count:
            raise ValueError(f"block id {int(ids.max())} in a cache of {self.block_count} blocks")
        blocks = len(ids)
        step = np.arange(blocks, dtype=np.uint64)[:, None]
        addresses, lengths, offsets = [], [], []
        layer_offset = 0
        for layer, (memory, length, stream) in zip(self.layers, self._templates, strict=True):
            block_stride = np.uint64(layer.kernel_blocks_per_block * layer.kernel_block_stride_bytes)
            addresses.append((ids[:, None] * block_stride + (memory + np.uint64(layer.base_address))).ravel())
            lengths.append(np.tile(length, blocks))
            offsets.append(
                (step * np.uint64(layer.block_stream_bytes) + (stream + np.uint64(layer_offset))).ravel()
            )
            layer_offset += layer.block_stream_bytes * blocks
        return StreamRuns(
            np.concatenate(addresses), np.concatenate(lengths), np.concatenate(offsets)
        ).coalesced()
