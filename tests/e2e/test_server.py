"""vLLM's OpenAI server, as users run it: the engine in a process of its own, asked with curl."""

from pathlib import Path
from typing import Any

from appliance.doctor.asking import running_status
from appliance.doctor.run import examine
from appliance.doctor.subject import Subject
from appliance.planning import PlanRequest, make_plan
from appliance.planning.request import Platform
from appliance.planning.source import read_model_config
from tests.e2e.families import FAMILIES
from tests.e2e.harness import chunks_below
from tests.e2e.processes import ApiServer, Daemon, running, until

FAMILY = FAMILIES["qwen3_next"]


def stored(daemon: Daemon) -> int:
    """Objects stored so far."""
    return int(daemon.status()["counters"].get("objects_stored", 0))


def engine_codes(daemon: Daemon, server: ApiServer) -> set[str]:
    """What the doctor finds at a running vLLM and at the daemon's engines."""
    status = running_status("127.0.0.1", daemon.port)
    assert status is not None
    url = f"http://127.0.0.1:{server.port}"
    subject = Subject.of_settings({**status.settings, "port": daemon.port}, running=status, vllm_url=url)
    return {each.code.value for each in examine(subject).findings if each.area in ("vllm", "engines")}


def planned_block_size(checkpoint: Path) -> int:
    """N as it is planned from the checkpoint's own configuration."""
    config = read_model_config(str(checkpoint)).values
    return make_plan(config, PlanRequest(platform=Platform.CPU)).block_size


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
            assert engine_codes(daemon, server) == {"ok"}, "before its first request"
            answers.append(server.complete(text, max_tokens=8))
            # Storing goes on after the answer; a server that is stopped first leaves the rest unstored.
            until(lambda: stored(daemon) >= objects, 60, "the storing of the prompt")
            assert engine_codes(daemon, server) == {"ok"}
            assert planned_block_size(checkpoints / FAMILY.name) == FAMILY.block_tokens
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    whole = chunks_below(FAMILY.prompt_tokens, FAMILY.chunk_tokens)
    assert cached == [0, whole]
    computed, loaded = (answer["choices"][0] for answer in answers)
    assert loaded["text"] == computed["text"]
    assert loaded["logprobs"]["token_logprobs"] == computed["logprobs"]["token_logprobs"]
