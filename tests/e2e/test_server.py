"""vLLM's OpenAI server, as users run it: the engine in a process of its own, asked with curl."""

from pathlib import Path
from typing import Any

from tests.e2e.families import FAMILIES
from tests.e2e.harness import chunks_below
from tests.e2e.processes import ApiServer, Daemon, running, until

FAMILY = FAMILIES["qwen3_next"]


def stored(daemon: Daemon) -> int:
    """Objects stored so far."""
    return int(daemon.status()["counters"].get("objects_stored", 0))


def test_a_second_server_has_the_prompt_cached(checkpoints: Path, daemon: Daemon, tmp_path: Path) -> None:
    text = "".join(chr(97 + (number * number) % 26) for number in range(FAMILY.prompt_tokens))
    answers: list[dict[str, Any]] = []
    objects = FAMILY.prompt_tokens // FAMILY.chunk_tokens + FAMILY.recurrent_groups
    for number in range(2):
        directory = tmp_path / f"server-{number}"
        directory.mkdir()
        server = ApiServer(
            directory,
            checkpoints / FAMILY.name,
            block_tokens=FAMILY.block_tokens,
            connector=daemon.connector(),
        )
        with running(server):
            answers.append(server.complete(text, max_tokens=8))
            # Storing goes on after the answer; a server that is stopped first leaves the rest unstored.
            until(lambda: stored(daemon) >= objects, 60, "the storing of the prompt")
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    whole = chunks_below(FAMILY.prompt_tokens, FAMILY.chunk_tokens)
    assert cached == [0, whole]
    computed, loaded = (answer["choices"][0] for answer in answers)
    assert loaded["text"] == computed["text"]
    assert loaded["logprobs"]["token_logprobs"] == computed["logprobs"]["token_logprobs"]
