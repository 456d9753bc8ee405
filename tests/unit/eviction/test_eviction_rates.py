"""Return rates are learned by class and by age, and what they say a byte is worth follows from them."""

from __future__ import annotations

import numpy as np
import pytest

from appliance.l1.eviction.boundaries import BoundaryMemory
from appliance.l1.eviction.rates import BUCKETS, ReturnRates, bucket_of

NOTHING = np.empty(0, dtype=np.int64), np.empty(0)


def learned(*lives: tuple[int, np.ndarray, bool], classes: int = 3) -> ReturnRates:
    """Rates after these lives ended: class, ages in seconds, whether with a return."""
    rates = ReturnRates(classes)
    for kind, ages, returned in lives:
        rates.count(np.full(len(ages), kind), ages, returned=returned)
    rates.learn(*NOTHING)
    return rates


def worth(rates: ReturnRates, kind: int, age_seconds: float) -> float:
    return float(rates.worth[kind, int(bucket_of(np.array([age_seconds]))[0])])


def test_buckets_are_half_octaves():
    ages = np.array([0.0, 0.5, 0.7, 0.71, 1.0, 1.42, 2.0, 4.0, 1e9])
    assert bucket_of(ages).tolist() == [0, 0, 0, 1, 2, 3, 4, 6, BUCKETS - 1]
    many = bucket_of(np.geomspace(0.01, 1e8, 500))
    assert (np.diff(many) >= 0).all()


def test_before_anything_was_seen_what_is_younger_is_worth_more():
    rates = ReturnRates(2)
    assert (np.diff(rates.worth[:, 1:], axis=1) < 0).all(), "recency is what is assumed, above a second"
    assert (rates.worth[0] == rates.worth[1]).all()


def test_a_constant_rate_is_what_is_found():
    ages = np.random.default_rng(1).exponential(20.0, 4000)
    rates = learned((0, ages, True))
    for age in (2.0, 10.0, 30.0):
        assert worth(rates, 0, age) == pytest.approx(1 / 20, rel=0.35)
    assert rates.chance[0] > 0.95


def test_what_is_due_is_worth_more_than_what_was_stored_just_now():
    ages = np.random.default_rng(2).normal(60.0, 5.0, 2000)
    rates = learned((0, ages, True))
    assert worth(rates, 0, 50.0) > 3 * worth(rates, 0, 1.0)
    assert worth(rates, 0, 200.0) < worth(rates, 0, 1.0), "what did not come when it was due will not come"


def test_a_class_that_never_returns_is_worth_little():
    generator = np.random.default_rng(3)
    rates = learned(
        (0, generator.exponential(30.0, 500), True),
        (1, np.full(500, 3000.0), False),
    )
    for age in (1.0, 30.0, 300.0):
        assert worth(rates, 1, age) < worth(rates, 0, age) / 20
    assert rates.chance[1] < 0.1 < 0.9 < rates.chance[0]


def test_a_class_without_lives_of_its_own_looks_like_the_others():
    ages = np.random.default_rng(4).normal(60.0, 5.0, 2000)
    rates = learned((0, ages, True))
    assert worth(rates, 2, 50.0) > worth(rates, 2, 1.0), "the shape over age is shared"


def test_lives_that_go_on_count_as_waiting():
    rates = ReturnRates(1)
    rates.count(np.zeros(100, dtype=np.int64), np.full(100, 10.0), returned=True)
    rates.learn(*NOTHING)
    before = rates.worth[0].copy()
    rates.learn(np.zeros(1000, dtype=np.int64), np.full(1000, 100.0))
    assert (rates.worth[0] < before).all(), "a thousand that have not returned yet must count"
    rates.learn(*NOTHING)
    assert rates.worth[0] == pytest.approx(before), "and are not counted twice"


def test_new_traffic_outweighs_old():
    rates = ReturnRates(1)
    rates.count(np.zeros(1000, dtype=np.int64), np.full(1000, 10.0), returned=True)
    for _ in range(12):
        rates.forget_half()
        rates.count(np.zeros(200, dtype=np.int64), np.full(200, 5000.0), returned=False)
    rates.learn(*NOTHING)
    assert rates.chance[0] < 0.2


# --- boundaries ------------------------------------------------------------------------------------------------


def memory(capacity: int = 4) -> tuple[BoundaryMemory, ReturnRates]:
    rates = ReturnRates(3)
    return BoundaryMemory(rates, capacity), rates


def test_the_boundary_untouched_for_longest_is_forgotten_first():
    kept, _ = memory(capacity=3)
    for at, key in enumerate((b"a", b"b", b"c")):
        assert kept.begin(key, 0, float(at))[1] == -1
    kept.begin(b"a", 1, 5.0)
    oldest = kept.find(b"b")
    boundary, forgotten = kept.begin(b"d", 0, 6.0)
    assert forgotten == oldest == boundary, "its number is given out again"
    assert kept.find(b"b") == -1
    assert kept.find_all([b"a", b"b", b"d"]) == [kept.find(b"a"), -1, boundary]
    assert len(kept) == 3


def test_a_number_that_is_given_out_again_remembers_nothing():
    kept, _ = memory(capacity=1)
    first, _ = kept.begin(b"a", 2, 0.0)
    kept.came_back(first, 1.0)
    kept.is_end.view[first] = 1
    again, forgotten = kept.begin(b"b", 0, 2.0)
    assert forgotten == first == again
    assert (kept.returns.view[again], kept.is_end.view[again], kept.row.view[again]) == (0, 0, 0)


def test_returns_and_forgotten_lives_are_what_is_learned_from():
    kept, rates = memory(capacity=50)
    for round_number in range(40):
        boundary, _ = kept.begin(b"comes back", 0, round_number * 10.0)
        kept.came_back(boundary, round_number * 10.0 + 8.0)
        kept.begin(b"never %d" % round_number, 1, round_number * 10.0)
    kept.learn(400.0)
    assert rates.chance[0] > 0.9 > 0.3 > rates.chance[1]
    assert kept.returns.view[kept.find(b"comes back")] == 40
    both = np.array([kept.find(b"comes back"), kept.find(b"never 39")])
    [returning, never] = kept.worth_of(both, 400.0)
    assert returning > 5 * never


def test_the_columns_grow_with_what_is_remembered():
    kept, _ = memory(capacity=5000)
    for number in range(3000):
        kept.begin(b"%d" % number, number % 3, float(number))
    assert [kept.kind.view[kept.find(b"%d" % number)] for number in (0, 1024, 2999)] == [0, 1, 2]
    assert kept.since_ms.view[kept.find(b"2999")] == 2_999_000
