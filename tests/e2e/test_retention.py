"""Growing prompts over a shared system prompt, with memory for a part of them: what each policy makes of it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.families import EVERY_BOUNDARY, FAMILIES
from tests.e2e.harness import Answer, Batch, Job, assert_same_answers, prompt, run_engine
from tests.e2e.processes import Daemon, running

FAMILY = FAMILIES["qwen3_next"]
CHUNK = FAMILY.chunk_tokens
USERS = 6
TURNS = 3
SYSTEM = prompt(700, CHUNK)
TURN_TOKENS = (2 * CHUNK + 30, 4 * CHUNK + 30, 6 * CHUNK + 30)
"""Lengths of a user's prompts: each ends just past a boundary, and the next one goes on from it."""

SNAPSHOTS_ANYWHERE = {"max_num_batched_tokens": EVERY_BOUNDARY["max_num_batched_tokens"]}
L1_GB = "0.012"
"""Less than the last turn of all users needs, and far less with a state at every boundary, as LRU keeps them."""


def prompts() -> list[list[int]]:
    """Every user's first turn, then every user's second, and so on."""
    return [prompt(710 + user, tokens, after=SYSTEM) for tokens in TURN_TOKENS for user in range(USERS)]


@dataclass(frozen=True)
class Outcome:
    """What one policy made of the prompts."""

    answers: list[Answer]
    hit_tokens: int
    copied_bytes: int


def run_under(policy: str, model: Path, directory: Path) -> Outcome:
    """One engine and one daemon that evicts by `policy`; the engine's own cache is emptied before each prompt."""
    directory.mkdir()
    small = ("--l1-size-gb", L1_GB, "--extent-kib", "64")
    with running(Daemon(directory, eviction_policy=policy, arguments=small)) as daemon:
        batches = [Batch([text], max_tokens=4, reset_local_cache=True) for text in prompts()]
        result = run_engine(directory, Job(model, batches, daemon.connector(), llm=SNAPSHOTS_ANYWHERE))
        status = daemon.status()
    assert sum(status["evictions"].values()) > 0, "everything fits: no policy had to choose"
    assert sum(batch.local_hit_tokens for batch in result.batches) == 0
    return Outcome(
        [batch.answers[0] for batch in result.batches],
        sum(batch.external_hit_tokens for batch in result.batches),
        status["counters"]["bytes_stored"] + status["counters"]["bytes_loaded"],
    )


@pytest.mark.timeout(600)
def test_the_default_policy_hits_more_than_lru_and_copies_less(checkpoints: Path, tmp_path: Path) -> None:
    model = checkpoints / FAMILY.name
    alone = [Batch([text], max_tokens=4) for text in prompts()]
    reference = run_engine(tmp_path, Job(model, alone, llm=EVERY_BOUNDARY))
    expected = [batch.answers[0] for batch in reference.batches]
    ours, lru = (run_under(policy, model, tmp_path / policy) for policy in ("RETURNS", "LRU"))
    for outcome in (ours, lru):
        assert_same_answers(outcome.answers, expected)
    print(
        f"external hit tokens {ours.hit_tokens} and {lru.hit_tokens}, bytes copied {ours.copied_bytes} and {lru.copied_bytes}"
    )
    assert ours.hit_tokens > lru.hit_tokens
    assert ours.copied_bytes < lru.copied_bytes
