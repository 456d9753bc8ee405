"""The rivals' rules, one decision at a time."""

from __future__ import annotations

import numpy as np
import pytest

from appliance.errors import InvalidSettings
from appliance.geometry import GroupKind, ObjectGroup
from appliance.l1.eviction import Prompt, make_policy
from appliance.l1.eviction.marconi import Marconi
from appliance.l1.eviction.marconi_log import PromptLog, Weights
from appliance.l1.eviction.marconi_score import normalized, utility
from appliance.l1.eviction.marconi_search import GRID, AlphaSearch, SegmentCache
from appliance.l1.eviction.seglen import SegmentLength
from appliance.l1.eviction.simple import SimpleRule
from appliance.l1.index import NamespaceIndex
from appliance.l1.keys_only import KeysOnlyCache
from appliance.replay.layouts import layout_of_ratio
from appliance.replay.trace import read_trace
from tests.support.small_trace import SMALL_TRACE

CHUNK = 512
GROUPS = [
    ObjectGroup(0, "attention", GroupKind.ATTENTION, CHUNK, 1, 1),
    ObjectGroup(1, "state", GroupKind.RECURRENT, CHUNK, 1, 1),
]
STATE_EXTENTS = 3


def keys_of(prompt: str) -> list[bytes]:
    return [prompt[: end + 1].encode().ljust(32, b".") for end in range(len(prompt))]


class Tree:
    """An index of one namespace that a policy watches; a prompt is a string, a chunk a letter of it."""

    def __init__(self, policy) -> None:
        self.policy = policy
        self.index = NamespaceIndex(0, bytes(32), "m", GROUPS, CHUNK, 100)
        policy.add_namespace(self.index)

    def ask(self, prompt: str, hit: int = 0, attention: int = 0) -> list[int]:
        keys = keys_of(prompt)
        return list(self.policy.asked(self.index, Prompt(keys, self.index.rows_of(keys), hit, attention)))

    def store(self, prompt: str, *states: int) -> None:
        """Attention of all its chunks, and states at these boundaries; what is there already stays."""
        fresh, used = [], []
        keys = keys_of(prompt)
        for chunk, key in enumerate(keys):
            row = self.index.ensure_row(key, keys[chunk - 1] if chunk else b"", chunk)
            for group, size in ((0, 1), (1, STATE_EXTENTS)):
                entry = 2 * row + group
                if not self.index.present.view[entry] and (group == 0 or chunk + 1 in states):
                    self.index.set_present(row, group, 0, 0, size, 0)
                    fresh.append(entry)
                if self.index.present.view[entry]:
                    used.append(entry)
        self.policy.stored(self.index, np.array(fresh, dtype=np.int64))
        self.policy.touched(self.index, np.array(used[::-1], dtype=np.int64))

    def hold(self, prompt: str, count: int) -> None:
        for row in self.index.rows_of(keys_of(prompt)).tolist():
            self.index.holds.view[2 * row] += count

    def evict(self, count: int) -> list[str]:
        """So many entries, each as its prompt with ``*`` for a state."""
        gone: list[str] = []
        for _, entries in self.policy.candidates(1):
            for entry in entries.tolist():
                if self.index.holds.view[entry] or not self.index.present.view[entry]:
                    continue
                row, group = divmod(entry, 2)
                gone.append(self.index.key_of(row).decode().rstrip(".") + "*" * group)
                self.index.take_present(row, group, 1)
                self.policy.removed(self.index, np.array([entry], dtype=np.int64))
                self.index.recycle_if_empty(row)
                if len(gone) == count:
                    return gone
        return gone


# --- the simple rule --------------------------------------------------------------------------------------------------


def test_the_simple_rule_wants_a_state_where_a_prompt_stopped_matching():
    tree = Tree(SimpleRule())
    assert tree.ask("abcd") == []
    tree.store("abcd", 4)
    assert tree.ask("abx", attention=2) == [2]
    assert tree.ask("abcdef", hit=4, attention=4) == []
    assert tree.ask("") == []


def test_the_simple_rule_lets_other_states_go_first_however_recent():
    tree = Tree(SimpleRule())
    tree.ask("abcd")
    tree.store("abcd", 2, 3, 4)
    tree.ask("xyz")
    tree.store("xyz", 1, 3)
    assert sorted(tree.evict(3)) == ["ab*", "abc*", "x*"]
    assert tree.evict(3) == ["abcd*", "abcd", "abc"]


def test_a_spare_state_that_a_prompt_stopped_at_is_spare_no_more():
    tree = Tree(SimpleRule())
    tree.ask("abcd")
    tree.store("abcd", 2, 4)
    tree.ask("abx", hit=2, attention=2)
    tree.store("abx", 3)
    assert tree.evict(2) == ["abcd*", "abcd"]


# --- Marconi and SegLen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [lambda: Marconi(0.0), SegmentLength])
def test_states_are_admitted_at_branch_points_and_ends_only(policy):
    tree = Tree(policy())
    assert tree.ask("abcd") == []
    tree.store("abcd", 4)
    assert tree.ask("abx", attention=2) == [2]
    assert tree.ask("abcde", hit=4, attention=4) == []


def test_marconi_without_alpha_evicts_the_node_used_longest_ago_with_its_edge():
    tree = Tree(Marconi(0.0))
    for prompt in ("ab", "xyz", "q"):
        tree.ask(prompt)
        tree.store(prompt, len(prompt))
    tree.ask("abc", hit=2, attention=2)
    assert tree.evict(4) == ["xyz*", "xyz", "xy", "x"]
    assert tree.evict(2) == ["q*", "q"]


def test_marconi_keeps_a_branch_point_and_takes_a_nodes_state_alone():
    tree = Tree(Marconi(0.0))
    for prompt, states in (("ab", (2,)), ("abc", (3,)), ("abcd", (4,)), ("abx", (3,))):
        tree.ask(prompt)
        tree.store(prompt, *states)
    # "ab" is the oldest and has two children; "abc" has one, so that its attention stays for "abcd".
    assert tree.evict(1) == ["abc*"]
    assert tree.evict(3) == ["abcd*", "abcd", "abc"]
    assert tree.evict(1) == ["ab*"]


def test_marconis_alpha_keeps_long_edges():
    tree = Tree(Marconi(4.0))
    for prompt in ("abcdefgh", "xy", "q"):
        tree.ask(prompt)
        tree.store(prompt, len(prompt))
    assert tree.evict(2) == ["q*", "q"]
    assert tree.evict(1) == ["xy*"]


def test_seglen_keeps_long_lengths_and_lets_states_of_branch_points_go():
    tree = Tree(SegmentLength())
    for prompt, states in (("abcdefgh", (1, 8)), ("xyz", (3,)), ("axyz", (4,))):
        tree.ask(prompt)
        tree.store(prompt, *states)
    assert tree.evict(1) == ["a*"]
    assert tree.evict(4) == ["xyz*", "xyz", "xy", "x"]
    # Without the state at "a" the longer one saves four chunks, not three; so it was measured anew.
    assert tree.evict(1) == ["axyz*"]


@pytest.mark.parametrize("policy", [lambda: Marconi(0.0), SegmentLength, SimpleRule])
def test_what_is_held_is_passed_over_and_comes_again(policy):
    tree = Tree(policy())
    for prompt in ("ab", "xy"):
        tree.ask(prompt)
        tree.store(prompt, 2)
    tree.hold("ab", 1)
    gone = tree.evict(100)
    assert {"xy*", "xy", "x"} <= set(gone)
    assert not {"ab", "a"} & set(gone)
    tree.hold("ab", -1)
    assert {"ab", "a"} <= set(tree.evict(100))
    assert not tree.index.present.array.any()


def test_a_rest_that_was_extended_meanwhile_stays():
    tree = Tree(Marconi(0.0))
    tree.ask("abcd")
    tree.store("abcd", 4)
    tree.ask("q")
    tree.store("q", 1)
    assert tree.evict(2) == ["abcd*", "abcd"]
    tree.ask("abz", attention=2)
    tree.store("abz", 2, 3)
    assert "ab" not in tree.evict(2), "the attention under a new prompt's states would have gone"


# --- how Marconi finds alpha --------------------------------------------------------------------------------------------


def test_utility_is_recency_and_work_for_bytes_each_scaled():
    used = np.array([0, 5, 10])
    tokens = np.array([1000, 2000, 3000])
    gain = np.array([1000, 1000, 1000])
    size = np.array([10.0, 10.0, 10.0])
    saves = np.array([True, True, False])
    assert utility(0.0, used, tokens, gain, size, saves).tolist() == [0.0, 0.5, 1.0]
    found = utility(2.0, used, tokens, gain, size, saves)
    assert found[2] == 1.0
    assert found[1] == 0.5 + 2.0, "attention makes the later of two equal lengths cost more"
    assert 0 < found[0] < 2.0
    assert normalized(np.array([3, 3]), 0.5).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("alpha", [0.0, 1.0, 4.0])
def test_the_replay_of_segments_hits_what_the_policy_hits(alpha):
    trace = read_trace(SMALL_TRACE)
    layout = layout_of_ratio(5.7)
    capacity = trace.unique_chunks * layout.chunk_units // 12
    cache = KeysOnlyCache(
        Marconi(alpha), layout.groups, CHUNK, capacity_extents=capacity, entry_extents=layout.sizes
    )
    log = PromptLog()
    hits = 0
    for request in trace.requests:
        hits += cache.serve(request.keys, request.at_seconds)
        log.add(0, request.keys)
    segments = log.segments({0: Weights(layout.attention_units, layout.state_units, CHUNK)})
    replayed = SegmentCache(segments, capacity, alpha)
    for path in segments.paths:
        replayed.serve(path)
    assert cache.evicted_entries > 100
    assert replayed.hit_chunks == pytest.approx(hits, rel=0.03)


def test_the_search_takes_the_value_with_the_most_hits_and_of_equal_ones_the_smallest():
    log = PromptLog()
    for prompt in ("abcdefgh", "abcdefgh", "p", "q", "r", "s", "t", "abcdefgh"):
        log.add(0, keys_of(prompt))
    segments = log.segments({0: Weights(1, 3, CHUNK)})
    search = AlphaSearch(segments, 8 + 3 + 3 * 4)
    while not search.is_done:
        search.advance(3)
    hits = []
    for alpha in GRID:
        cache = SegmentCache(segments, 8 + 3 + 3 * 4, alpha)
        for path in segments.paths:
            cache.serve(path)
        hits.append(cache.hit_chunks)
    assert hits[0] == 8 < max(hits) == 16
    assert search.best == GRID[hits.index(16)] > 0


def test_alpha_is_found_after_the_first_evictions_and_not_before():
    policy = Marconi()
    cache = KeysOnlyCache(policy, GROUPS, CHUNK, capacity_extents=40, entry_extents=[1, 3])
    alphas = []
    for turn in range(400):
        # A long prompt that returns, among many that do not: only its length tells it apart.
        prompt = "abcdefgh" if turn % 9 == 0 else chr(256 + turn)
        cache.serve(keys_of(prompt), float(turn))
        alphas.append(policy.alpha)
    assert alphas[0] == 0.0
    assert alphas[-1] > 0.0
    changed = next(turn for turn, alpha in enumerate(alphas) if alpha)
    assert cache.evicted_entries > 0
    assert changed > 50, "the paper waits for many times the prompts before the first eviction"
    assert len(set(alphas[changed:])) == 1


def test_a_log_that_is_full_before_anything_had_to_go_ends_the_search(monkeypatch):
    monkeypatch.setattr("appliance.l1.eviction.marconi_log.MOST_PROMPTS", 5)
    policy = Marconi()
    cache = KeysOnlyCache(policy, GROUPS, CHUNK, capacity_extents=10_000, entry_extents=[1, 3])
    for turn in range(20):
        cache.serve(keys_of(chr(256 + turn)), float(turn))
    assert policy._log is None
    assert policy.alpha == 0.0


def test_rivals_are_chosen_by_name():
    assert isinstance(make_policy("simple", lambda: 0.0), SimpleRule)
    assert isinstance(make_policy("Marconi", lambda: 0.0), Marconi)
    assert isinstance(make_policy("SEGLEN", lambda: 0.0), SegmentLength)
    with pytest.raises(InvalidSettings, match="MARCONI"):
        make_policy("REFERENCE", lambda: 0.0)
