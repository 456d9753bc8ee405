"""How Marconi finds its alpha: remembered prompts, replayed with each value of a grid, and the one with the most hits.

The replay works on whole segments of the radix tree, not on chunks and entries: a prompt is a few segments, so that a grid can
be searched beside the traffic. The rule is the same, node by node.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from appliance.l1.columns import Column
from appliance.l1.eviction.marconi_log import Segments
from appliance.l1.eviction.marconi_score import lowest, utility

GRID = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0)


class SegmentCache:
    """One replay. ``hit_chunks`` are counted from the first prompt on."""

    def __init__(self, segments: Segments, capacity_extents: float, alpha: float) -> None:
        self.hit_chunks = 0
        self._segments = segments
        self._capacity = capacity_extents
        self._alpha = alpha
        self._extents = 0.0
        self._prompts = 0
        count = len(segments.depth)
        self._attention = Column(count, np.uint8)
        self._state = Column(count, np.uint8)
        self._continued = Column(count, np.uint32)
        self._used = Column(count, np.int64)
        self._gain = Column(count, np.int64)
        self._ranked: deque[tuple[int, int]] = deque()

    def serve(self, path: list[int]) -> None:
        """The next prompt is looked up, computed and stored."""
        attention, state, used = self._attention.view, self._state.view, self._used.view
        depth = self._segments.depth
        self._prompts += 1
        reach = hit = 0
        for place, segment in enumerate(path, start=1):
            if not attention[segment]:
                break
            reach = place
            if state[segment]:
                hit = place
        if hit:
            self.hit_chunks += depth[path[hit - 1]]
            used[path[hit - 1]] = self._prompts
        wanted = {path[-1], *path[max(hit, reach - 1) : reach]}
        states = [segment for segment in path if segment in wanted and not state[segment]]
        needed = sum(self._edge_extents(segment) for segment in path[reach:])
        needed += sum(float(self._segments.state_extents[segment]) for segment in states)
        if self._make_room(needed, path):
            self._store(path[reach:], states)
            self._extents += needed

    def _store(self, path: list[int], states: list[int]) -> None:
        for segment in path:
            self._attention.view[segment] = 1
            self._used.view[segment] = self._prompts
            parent = self._segments.parent[segment]
            if parent >= 0:
                self._continued.view[parent] += 1
        for segment in states:
            self._state.view[segment] = 1
            self._used.view[segment] = self._prompts
            self._measure_behind(segment)

    def _edge_extents(self, segment: int) -> float:
        """Of the attention between the segment's begin and end."""
        depth, parent = self._segments.depth, self._segments.parent[segment]
        length = depth[segment] - (depth[parent] if parent >= 0 else 0)
        return length * float(self._segments.attention_extents[segment])

    # --- evicting ---------------------------------------------------------------------------------------------------

    def _make_room(self, needed: float, path: list[int]) -> bool:
        while self._extents + needed > self._capacity:
            if not self._ranked:
                self._rank(path)
                if not self._ranked:
                    return False
            segment, used = self._ranked.popleft()
            if self._used.view[segment] == used and segment not in path:
                self._evict(segment, path)
        return True

    def _evict(self, segment: int, path: list[int]) -> None:
        """Its state, and if nothing continues it the attention back to what else needs it."""
        attention, state, continued = self._attention.view, self._state.view, self._continued.view
        if state[segment] and continued[segment] < 2:
            state[segment] = 0
            self._extents -= float(self._segments.state_extents[segment])
            if continued[segment]:
                self._measure_behind(segment)
        while (
            segment >= 0
            and attention[segment]
            and not (state[segment] or continued[segment] or segment in path)
        ):
            attention[segment] = 0
            self._extents -= self._edge_extents(segment)
            segment = self._segments.parent[segment]
            if segment >= 0:
                continued[segment] -= 1

    def _rank(self, path: list[int]) -> None:
        """The lowest nodes that are not the prompt's own, in order."""
        leaf = (self._attention.array != 0) & (self._continued.array == 0)
        nodes = leaf | ((self._state.array != 0) & (self._continued.array < 2))
        nodes[path] = False
        rows = np.flatnonzero(nodes)
        if not len(rows):
            return
        segments = self._segments
        gain = self._gain.array[rows]
        used = self._used.array[rows]
        scores = utility(
            self._alpha,
            used,
            segments.end_tokens[rows],
            gain * segments.chunk_tokens[rows],
            gain * segments.attention_extents[rows] + segments.state_extents[rows],
            self._state.array[rows] != 0,
        )
        first = lowest(scores)
        self._ranked.extend(zip(rows[first].tolist(), used[first].tolist(), strict=True))

    def _measure_behind(self, segment: int) -> None:
        """A state came or went: how much it, and the next ones behind it, save."""
        state, gain, depth = self._state.view, self._gain.view, self._segments.depth
        above = self._segments.parent[segment]
        while above >= 0 and not state[above]:
            above = self._segments.parent[above]
        before = depth[above] if above >= 0 else 0
        if state[segment]:
            gain[segment] = depth[segment] - before
            before = depth[segment]
        behind = list(self._segments.children[segment])
        while behind:
            found = behind.pop()
            if state[found]:
                gain[found] = depth[found] - before
            elif self._attention.view[found]:
                behind.extend(self._segments.children[found])


class AlphaSearch:
    """A search in small steps; ``best`` is the value found, once ``is_done``. Of equal ones the smallest is taken."""

    def __init__(self, segments: Segments, capacity_extents: float) -> None:
        self._segments = segments
        self._capacity = capacity_extents
        self._hits: list[int] = []
        self._cache = SegmentCache(segments, capacity_extents, GRID[0])
        self._at = 0

    @property
    def is_done(self) -> bool:
        """Whether every value of the grid has been tried."""
        return len(self._hits) == len(GRID)

    @property
    def best(self) -> float:
        """The value with the most hits so far."""
        return GRID[self._hits.index(max(self._hits))]

    def advance(self, prompts: int) -> None:
        """Replay so many more prompts."""
        for _ in range(prompts):
            if self._at == len(self._segments.paths):
                self._hits.append(self._cache.hit_chunks)
                if self.is_done:
                    return
                self._cache = SegmentCache(self._segments, self._capacity, GRID[len(self._hits)])
                self._at = 0
            self._cache.serve(self._segments.paths[self._at])
            self._at += 1
