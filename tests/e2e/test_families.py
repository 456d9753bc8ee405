"""A prompt computed by one vLLM process is loaded by the next, fresh one, with the same logprobs."""

from pathlib import Path

import pytest

from tests.e2e.families import FAMILIES, Family, Reference
from tests.e2e.harness import Batch, Job, assert_same_answers, chunks_below, run_engine
from tests.e2e.processes import Daemon


def stored_objects(daemon: Daemon, family: Family) -> dict[str, int]:
    """Objects in the cache by kind of group, for one model."""
    counts: dict[str, int] = {}
    for group in daemon.status()["groups"]:
        if group["model"] == family.name:
            counts[group["kind"]] = counts.get(group["kind"], 0) + group["objects"]
    return counts


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_computed_once(
    name: str, checkpoints: Path, references: dict[str, Reference], daemon: Daemon, tmp_path: Path
) -> None:
    family, reference = FAMILIES[name], references[name]
    model, connector = checkpoints / name, daemon.connector()
    whole = chunks_below(family.prompt_tokens, family.chunk_tokens)
    shared = family.shared_tokens // family.chunk_tokens * family.chunk_tokens

    storing = run_engine(
        tmp_path, Job(model, [Batch([family.first]), *family.turn_batches(reset_local_cache=True)], connector)
    )
    computed, turn, next_turn = storing.batches
    assert set(storing.block_sizes) == {family.block_tokens}
    assert [computed.external_hit_tokens, turn.external_hit_tokens] == [0, 0]
    assert_same_answers(computed.answers, [reference.first])
    # The answer crossed a boundary, and the chunk that holds its beginning was stored with its state.
    assert next_turn.external_hit_tokens == chunks_below(len(next_turn.prompts[0]), family.chunk_tokens)
    assert next_turn.external_hit_tokens > family.turn_tokens
    if family.split_invariant:
        assert_same_answers(turn.answers, [reference.turn])
        assert_same_answers(next_turn.answers, [reference.next_turn])

    loading = run_engine(tmp_path, Job(model, [Batch([family.first]), Batch([family.second])], connector))
    first, second = loading.batches
    assert first.external_hit_tokens == whole
    assert first.answers[0].cached_tokens == whole
    assert_same_answers(first.answers, [reference.first_resumed])
    assert_same_answers(second.answers, [reference.second])

    sharing = run_engine(tmp_path, Job(model, [Batch([family.third])], connector))
    assert sharing.batches[0].external_hit_tokens == shared
    assert_same_answers(sharing.batches[0].answers, [reference.third_resumed])

    status = daemon.status()
    assert status["leases_total"] == 0
    assert set(status["lease_end_causes"]) == {"released"}
    objects = stored_objects(daemon, family)
    assert objects["attention"] > 0
    assert ("recurrent" in objects) == (family.recurrent_groups > 0)
