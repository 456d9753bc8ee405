"""Lookup against a brute-force oracle over random presence, shards and groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import event, given, settings

from appliance.geometry import GroupKind, ObjectGroup
from appliance.hashing import ChunkHasher, PromptIdentity
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Ghosts
from appliance.lookup import entries_of, find, fold
from appliance.protocol.base import MissReason

CHUNK = 4


def serves(kind: GroupKind, window: int, column: list[bool], boundary: int) -> bool:
    """Whether one group can continue after ``boundary`` chunks, straight from the definition."""
    if kind is GroupKind.ATTENTION:
        return all(column[:boundary])
    if kind is GroupKind.RECURRENT:
        return column[boundary - 1]
    return all(column[max(0, boundary - window) : boundary])


KINDS = st.sampled_from(list(GroupKind))


@st.composite
def presences(draw):
    chunks = draw(st.integers(0, 9))
    groups = draw(st.lists(st.tuples(KINDS, st.integers(1, 4)), min_size=1, max_size=5))
    rows = draw(
        st.lists(
            st.lists(st.integers(0, 3), min_size=len(groups), max_size=len(groups)),
            min_size=chunks,
            max_size=chunks,
        )
    )
    return groups, [[cell > 0 for cell in row] for row in rows]


@given(presences())
@settings(max_examples=300, deadline=None)
def test_fold_is_the_longest_boundary_that_every_group_serves(case):
    groups, rows = case
    array = np.array(rows, dtype=np.bool_).reshape(len(rows), len(groups))
    reach = fold(array, [kind for kind, _ in groups], [window for _, window in groups])
    columns = [[row[g] for row in rows] for g in range(len(groups))]
    fits = [
        boundary
        for boundary in range(1, len(rows) + 1)
        if all(serves(kind, window, columns[g], boundary) for g, (kind, window) in enumerate(groups))
    ]
    assert reach.hit == max(fits, default=0)
    attention = [g for g, (kind, _) in enumerate(groups) if kind is GroupKind.ATTENTION]
    reaching = [b for b in range(len(rows) + 1) if all(all(columns[g][:b]) for g in attention)]
    assert reach.attention == max(reaching)


@dataclass
class Case:
    groups: list[ObjectGroup]
    prompts: list[list[int]]
    stored: set[tuple[bytes, int, int]]
    asked: int
    prompt_tokens: int
    refused: list[int]


def keys_of(chunks: list[int]) -> list[bytes]:
    return ChunkHasher(CHUNK, PromptIdentity()).keys([number for number in chunks for _ in range(CHUNK)])


@st.composite
def cases(draw):
    groups = []
    for index in range(draw(st.integers(1, 4))):
        kind = draw(KINDS)
        window = draw(st.integers(1, 4 * CHUNK)) if kind is GroupKind.SLIDING else 0
        shards = draw(st.integers(1, 8))
        groups.append(ObjectGroup(index, f"g{index}", kind, CHUNK, shards, 1, window_tokens=window))
    trunk = draw(st.lists(st.integers(0, 9), max_size=5))
    prompts = [
        trunk[: draw(st.integers(0, len(trunk)))] + draw(st.lists(st.integers(10, 12), max_size=4))
        for _ in range(draw(st.integers(1, 3)))
    ]
    # Mostly stored, with holes: an empty cache would be a poor test.
    stored: set[tuple[bytes, int, int]] = set()
    for prompt in prompts:
        for key in keys_of(prompt):
            for group in groups:
                how = draw(st.sampled_from(["whole", "whole", "whole", "nothing", "part"]))
                shards = range(group.shards) if how == "whole" else range(group.shards // 2)
                if how != "nothing":
                    stored |= {(key, group.index, shard) for shard in shards}
    asked = draw(st.integers(0, len(prompts) - 1))
    whole = len(prompts[asked]) * CHUNK
    prompt_tokens = max(0, whole + draw(st.integers(-CHUNK, CHUNK)))
    refused = draw(st.lists(st.integers(0, 8), max_size=1))
    return Case(groups, prompts, stored, asked, prompt_tokens, refused)


def build(case: Case) -> NamespaceIndex:
    index = NamespaceIndex(0, bytes(16), "m", case.groups, CHUNK, 64)
    for prompt in case.prompts:
        keys = keys_of(prompt)
        for chunk, key in enumerate(keys):
            if not any(
                (key, group.index, shard) in case.stored for group in case.groups for shard in range(8)
            ):
                continue
            row = index.ensure_row(key, keys[chunk - 1] if chunk else b"", chunk)
            for group in case.groups:
                for shard in range(group.shards):
                    present = index.present.view[index.entry(row, group.index)] >> shard & 1
                    if (key, group.index, shard) in case.stored and not present:
                        index.set_present(row, group.index, shard, row, 1, 0)
    return index


@given(cases())
@settings(max_examples=300, deadline=None)
def test_find_against_brute_force(case):
    index = build(case)
    keys = keys_of(case.prompts[case.asked])
    found = find(index, Ghosts(), keys, case.prompt_tokens, case.refused)
    usable = min(len(keys), max(0, case.prompt_tokens - 1) // CHUNK)
    columns = [
        [
            chunk not in case.refused
            and all((keys[chunk], g.index, s) in case.stored for s in range(g.shards))
            for chunk in range(usable)
        ]
        for g in case.groups
    ]
    # A window of W tokens at boundary b reads tokens b - W + 1 .. b - 1: the chunks that hold those.
    windows = [max(1, math.ceil((g.window_tokens - 1) / CHUNK)) for g in case.groups]

    def servable(boundary: int) -> bool:
        return all(serves(g.kind, windows[g.index], columns[g.index], boundary) for g in case.groups)

    hit = max(filter(servable, range(1, usable + 1)), default=0)
    event(f"hit {'none' if not hit else 'whole' if hit == usable else 'part'}")
    assert found.reach.hit == hit
    assert hit * CHUNK < case.prompt_tokens or hit == 0, "a token is always left to compute"
    attention = [g for g in case.groups if g.kind is GroupKind.ATTENTION]
    reach = max(b for b in range(usable + 1) if all(all(columns[g.index][:b]) for g in attention))
    assert found.reach.attention == reach

    # Entries: exactly what the hit needs, each once, and all of it committed.
    needed = {
        (keys[chunk], g.index)
        for g in case.groups
        for chunk in range(hit)
        if g.kind is GroupKind.ATTENTION
        or chunk >= hit - (1 if g.kind is GroupKind.RECURRENT else windows[g.index])
    }
    entries = entries_of(index, found.rows, hit)
    named = [
        (index.key_of(int(entry) // index.group_count), int(entry) % index.group_count) for entry in entries
    ]
    assert len(named) == len(set(named))
    assert set(named) == needed
    for key, group in named:
        assert all((key, group, shard) in case.stored for shard in range(case.groups[group].shards))

    # One reason on a shortfall, none otherwise.
    if usable == 0:
        assert found.reason is MissReason.TOO_SHORT
    elif hit == usable:
        assert found.reason is None
        assert found.detail == ""
    else:
        assert found.reason is not None
        assert found.detail
        check_reason(case, index, keys, found.reason, found.reach.attention, hit, columns, windows)


def check_reason(case, index, keys, reason, reach, hit, columns, windows) -> None:
    """Nothing was ever removed here, so the reason follows from presence alone."""
    if reach > hit:
        places = [
            (chunk, g)
            for g in case.groups
            if g.kind is not GroupKind.ATTENTION
            for chunk in range(
                max(0, reach - windows[g.index]) if g.kind is GroupKind.SLIDING else reach - 1, reach
            )
            if not columns[g.index][chunk]
        ]
    else:
        places = [
            (hit, g) for g in case.groups if g.kind is GroupKind.ATTENTION and not columns[g.index][hit]
        ]
    allowed = set()
    for chunk, group in places:
        shards = [(keys[chunk], group.index, shard) in case.stored for shard in range(group.shards)]
        if all(shards):
            assert chunk in case.refused
            allowed.add(MissReason.QUARANTINED)
        elif any(shards):
            allowed.add(MissReason.RANK_MISSING)
        elif group.kind is GroupKind.RECURRENT and index.find(keys[chunk]) >= 0:
            allowed.add(MissReason.RECURRENT_MISSING)
        else:
            allowed.add(MissReason.NEVER_STORED)
    assert reason in allowed
