"""What this connector refuses to serve: checked once, before anything is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import UnsupportedGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse engine features under which cached bytes would be wrong or unusable.

    Raises:
        UnsupportedGeometry: naming the feature and what to change.
    """
    if vllm_config.speculative_config is not None:
        raise UnsupportedGeometry(
            "Speculative decoding is on, and a draft model leaves its last slot of a block unwritten.",
            remedy="Start vLLM without --speculative-config, or without this connector.",
        )
    context_ranks = vllm_config.parallel_config.prefill_context_parallel_size
    if context_ranks > 1:
        raise UnsupportedGeometry(
            f"Prefill context parallelism is on ({context_ranks} ranks), and its page layout is not served.",
            remedy="Start vLLM with --prefill-context-parallel-size 1, or without this connector.",
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedGeometry(
            "Prefix caching is off, so vLLM keeps no block boundary that could be stored.",
            remedy="Start vLLM with --enable-prefix-caching.",
        )
