"""The policies on a small trace, against counts made without them; and the future, read rightly."""

from __future__ import annotations

import pytest

from appliance.l1.keys_only import KeysOnlyCache
from appliance.replay.clairvoyant import Clairvoyant
from appliance.replay.layouts import layout_of_ratio
from appliance.replay.replay import REFERENCE, REPLAYED, replay
from appliance.replay.trace import Request, Trace, read_trace
from tests.support.small_trace import SMALL_TRACE


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(SMALL_TRACE)


def units(trace: Trace, ratio: float, share: float) -> int:
    return int(trace.unique_chunks * layout_of_ratio(ratio).chunk_units * share)


@pytest.mark.parametrize("ratio", [0.0, 5.7])
@pytest.mark.parametrize("policy", ["LRU", REFERENCE])
def test_without_a_limit_everything_seen_is_hit(trace, policy, ratio):
    replayed = replay(trace, policy, layout_of_ratio(ratio), units(trace, ratio, 2.0))
    assert replayed.hit_chunks == trace.seen_chunks


@pytest.mark.parametrize("policy", REPLAYED)
def test_attention_only_models_hit_what_was_seen_under_every_policy(trace, policy):
    replayed = replay(trace, policy, layout_of_ratio(0), units(trace, 0, 2.0))
    assert replayed.hit_chunks == trace.seen_chunks
    assert replayed.asked_chunks == trace.asked_chunks


def naive_lru(trace: Trace, capacity: int) -> int:
    """Attention chunks only, most recent last, the deepest of a prompt the first to go."""
    held: dict[bytes, None] = {}
    hits = 0
    for request in trace.requests:
        hit = 0
        while hit < len(request.keys) and request.keys[hit] in held:
            hit += 1
        hits += hit
        fresh = [key for key in request.keys if key not in held]
        own = set(request.keys)
        victims = [key for key in held if key not in own][: max(0, len(held) + len(fresh) - capacity)]
        for key in victims:
            del held[key]
        for key in reversed(request.keys):
            held.pop(key, None)
            held[key] = None
    return hits


@pytest.mark.parametrize("chunks", [40, 90, 200])
def test_lru_on_attention_is_an_ordered_map(trace, chunks):
    layout = layout_of_ratio(0)
    replayed = replay(trace, "LRU", layout, chunks * layout.attention_units)
    assert replayed.hit_chunks == naive_lru(trace, chunks)


@pytest.mark.parametrize("share", [0.02, 0.03, 0.05])
def test_whoever_chooses_states_hits_more_than_lru_and_nobody_more_than_the_reference(trace, share):
    rates = {
        policy: replay(trace, policy, layout_of_ratio(5.7), units(trace, 5.7, share)).hit_rate
        for policy in ("LRU", "SIMPLE", "MARCONI", "SEGLEN", REFERENCE)
    }
    assert rates["LRU"] < min(rates["SIMPLE"], rates["MARCONI"], rates["SEGLEN"])
    assert max(rates, key=rates.__getitem__) == REFERENCE


def requests(*prompts: str) -> list[Request]:
    keys = [[prompt[: end + 1].encode().ljust(32, b".") for end in range(len(prompt))] for prompt in prompts]
    return [Request(float(at), of_prompt) for at, of_prompt in enumerate(keys)]


def test_the_reference_stores_states_where_later_prompts_part():
    prompts = requests("abcd", "abx", "abcdef", "q")
    trace = Trace("t", prompts)
    layout = layout_of_ratio(1)
    # The state at "ab" and then that at "abcd" serve; with room for four chunks, two states and what comes anew.
    assert replay(trace, REFERENCE, layout, 10 * layout.attention_units).hit_chunks == 2 + 4
    assert replay(trace, "SIMPLE", layout, 100 * layout.attention_units).hit_chunks == 0 + 4


def test_the_reference_refuses_a_prompt_that_was_not_foreseen():
    layout = layout_of_ratio(0)
    policy = Clairvoyant([[b"a" * 32]])
    cache = KeysOnlyCache(policy, layout.groups, 512, capacity_extents=9000, entry_extents=layout.sizes)
    with pytest.raises(AssertionError, match="the future would be wrong"):
        cache.serve([b"b" * 32], 0.0)
