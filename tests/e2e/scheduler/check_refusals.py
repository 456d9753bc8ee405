"""What the connector does not serve is refused when vLLM starts, with what to change."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from appliance.errors import UnsupportedGeometry
from tests.e2e.processes import Daemon
from tests.e2e.scheduler.geometry import Geometry, connector_config, kimi_linear, plain_config

PLAIN = kimi_linear(1)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=64, num_kv_heads=8, head_size=64, dtype=torch.bfloat16, attention_chunk_size=512
)


def speculative(config: VllmConfig) -> None:
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )


def prefill_context(config: VllmConfig) -> None:
    config.parallel_config.prefill_context_parallel_size = 2


def no_prefix_caching(config: VllmConfig) -> None:
    config.cache_config.enable_prefix_caching = False


def unchanged(config: VllmConfig) -> None:
    """The geometry alone is what is refused."""


def states_in_mode(mode: str) -> Geometry:
    layers = tuple(
        (name, replace(spec, mamba_cache_mode=mode) if hasattr(spec, "mamba_cache_mode") else spec)
        for name, spec in PLAIN.layers
    )
    return replace(PLAIN, layers=layers)


@pytest.mark.parametrize("role", list(KVConnectorRole), ids=lambda role: role.name)
@pytest.mark.parametrize(
    ("change", "geometry", "told"),
    [
        (speculative, PLAIN, "--speculative-config"),
        (prefill_context, PLAIN, "--prefill-context-parallel-size"),
        (no_prefix_caching, PLAIN, "--enable-prefix-caching"),
        (unchanged, states_in_mode("all"), "--mamba-cache-mode align"),
        (unchanged, states_in_mode("none"), "--mamba-cache-mode align"),
        (unchanged, replace(PLAIN, name="chunked", layers=(("model.layers.0", CHUNKED),)), "chunked_local"),
    ],
    ids=["speculative", "prefill-context", "no-prefix-caching", "mode-all", "mode-none", "chunked-local"],
)
def test_vllm_does_not_start_and_the_error_says_what_to_change(
    daemon: Daemon,
    models: Path,
    role: KVConnectorRole,
    change: Callable[[VllmConfig], Any],
    geometry: Geometry,
    told: str,
) -> None:
    config = plain_config(models, geometry)
    config.kv_transfer_config = connector_config("refused", daemon.connector())
    config.cache_config.num_gpu_blocks_override = 1200
    (cache,) = get_kv_cache_configs(config, [geometry.stage_layers(0)], [1 << 50])
    change(config)
    with pytest.raises(UnsupportedGeometry, match=told):
        KVConnectorFactory.create_connector(config, role, cache)
