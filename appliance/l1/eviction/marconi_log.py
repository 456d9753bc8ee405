"""Prompts as Marconi remembers them to find its alpha: paths in a radix tree of everything that was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_PROMPTS = 8192
_MOST_CHUNKS = 262_144


class Weights(NamedTuple):
    """Of one namespace: extents of a chunk's attention and of a state, and tokens of a chunk."""

    attention_extents: float
    state_extents: float
    chunk_tokens: int


class Segments(NamedTuple):
    """The radix tree, a segment a row: from where prompts part, or one ends, to the next such place. Lengths in chunks."""

    parent: list[int]
    children: list[list[int]]
    depth: list[int]
    end_tokens: NDArray[np.int64]
    chunk_tokens: NDArray[np.int64]
    attention_extents: NDArray[np.float64]
    state_extents: NDArray[np.float64]
    paths: list[list[int]]


class PromptLog:
    """A tree of chunks that grows with each prompt, until it is as large as it may be."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._slots: list[int] = []
        self._branches: list[int] = []
        self._is_end: list[bool] = []
        self._prompts: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def is_full(self) -> bool:
        """Whether no more is remembered."""
        return len(self._prompts) >= MOST_PROMPTS or len(self._parents) >= _MOST_CHUNKS

    def add(self, slot: int, keys: Sequence[bytes]) -> None:
        """One prompt of a namespace."""
        path: list[int] = []
        parent = -1
        for depth, key in enumerate(keys, start=1):
            number = self._numbers.get((slot, key), -1)
            if number < 0:
                number = self._numbers[slot, key] = len(self._parents)
                self._parents.append(parent)
                self._depths.append(depth)
                self._slots.append(slot)
                self._branches.append(0)
                self._is_end.append(False)
                if parent >= 0:
                    self._branches[parent] += 1
            path.append(number)
            parent = number
        self._is_end[parent] = True
        self._prompts.append(path)

    def segments(self, weights: dict[int, Weights]) -> Segments:
        """What was remembered, with every chain between two places where prompts part or end as one segment."""
        is_boundary = [
            end or branches > 1 for end, branches in zip(self._is_end, self._branches, strict=True)
        ]
        segment_of: dict[int, int] = {}
        parents: list[int] = []
        chunks: list[int] = []
        paths: list[list[int]] = []
        for prompt in self._prompts:
            path: list[int] = []
            for chunk in prompt:
                if is_boundary[chunk]:
                    if chunk not in segment_of:
                        segment_of[chunk] = len(chunks)
                        parents.append(path[-1] if path else -1)
                        chunks.append(chunk)
                    path.append(segment_of[chunk])
            paths.append(path)
        children: list[list[int]] = [[] for _ in chunks]
        for segment, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(segment)
        depth = [self._depths[chunk] for chunk in chunks]
        of = [weights[self._slots[chunk]] for chunk in chunks]
        tokens = np.array([each.chunk_tokens for each in of], dtype=np.int64)
        return Segments(
            parent=parents,
            children=children,
            depth=depth,
            end_tokens=np.array(depth, dtype=np.int64) * tokens,
            chunk_tokens=tokens,
            attention_extents=np.array([each.attention_extents for each in of]),
            state_extents=np.array([each.state_extents for each in of]),
            paths=paths,
        )
