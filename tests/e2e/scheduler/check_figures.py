"""The connector's figures reach vLLM's log line and its Prometheus metrics."""

from collections import Counter

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from tests.e2e.harness import prompt
from tests.e2e.scheduler.conftest import StartEngine
from tests.e2e.scheduler.engine import PAGE_BYTES
from tests.e2e.scheduler.geometry import kimi_linear


def test_what_was_stored_and_loaded_is_counted(start_engine: StartEngine) -> None:
    geometry = kimi_linear(8)
    engine = start_engine(geometry)
    text = prompt(1200, 3 * geometry.chunk_tokens + 1)
    for name in ("first", "again"):
        engine.add(name, text)
        engine.run()
        engine.forget_local_cache()
    total: Counter[str] = Counter()
    for figures in engine.figures:
        total.update(figures)
    # One state of 20 layers on each of 8 ranks, and 3 chunks of 7 layers; a rank loads every chunk that it stored or not.
    states, latents = 20 * PAGE_BYTES, 7 * PAGE_BYTES
    assert total == {
        "lookups": 2,
        "lookup_hits": 1,
        "rank_loads": 8,
        "stored_objects": 8 * 3 + 3,
        "stored_bytes": 8 * states + 3 * latents,
        "loaded_bytes": 8 * (states + 3 * latents),
    }

    metrics = KVConnectorProm(engine.config, ["engine"], {0: ["0"]})
    lines: list[str] = []
    log = KVConnectorLogging(engine.config.kv_transfer_config)
    for figures in engine.figures:
        metrics.observe(figures)
        log.observe(figures)
    log.log(lambda text, values: lines.append(text % values))
    for name, value in total.items():
        assert REGISTRY.get_sample_value(f"vllm:pagewarden_{name}_total", {"engine": "0"}) == value
        assert f"{name}={value}" in lines[0]
