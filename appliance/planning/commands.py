"""The commands that start the daemon and the engine as planned."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from appliance.planning.request import PlanRequest
from appliance.planning.shape import Shape
from appliance.planning.sizing import L1Size

MODEL_SIDE_FLAGS = {"kimi_k3": ("--moe-backend", "auto", "--no-enable-flashinfer-autotune")}
"""What a model's published recipe needs beside its cache."""

MODEL_SIDE_VARIABLES = {"kimi_k3": "VLLM_ENABLE_K3_LATENT_MOE_TAIL_FUSION=1"}
"""Environment variables that a model's published recipe sets."""

_DEFAULT_CHUNK_SIZE, _DEFAULT_EXTENT_KIB = 256, 256


def server_command(request: PlanRequest, size: L1Size, model: str, block_tokens: int) -> str:
    """``pagewarden server`` with an L1 that is populated before the engine starts."""
    planned = f"{model}={block_tokens}" if model else str(block_tokens)
    words = [
        "pagewarden",
        "server",
        "--l1-size-gb",
        str(size.size_gb),
        "--l1-init-size-gb",
        str(size.size_gb),
    ]
    if request.chunk_size != _DEFAULT_CHUNK_SIZE:
        words += ["--chunk-size", str(request.chunk_size)]
    if size.extent_kib != _DEFAULT_EXTENT_KIB:
        words += ["--extent-kib", str(size.extent_kib)]
    return shell([*words, "--planned-block-size", planned])


def vllm_command(request: PlanRequest, shape: Shape, model: str, budget_tokens: int) -> str:
    """``vllm serve`` with everything that decides what is cached."""
    words = ["vllm", "serve", model or "MODEL"]
    if shape.own_code:
        words.append("--trust-remote-code")
    for flag, value, default in (
        ("--tensor-parallel-size", request.tp, 1),
        ("--pipeline-parallel-size", request.pp, 1),
        ("--decode-context-parallel-size", request.dcp, 1),
        ("--dtype", request.dtype, ""),
        ("--kv-cache-dtype", request.kv_cache_dtype, "auto"),
        ("--attention-backend", request.attention_backend.upper(), ""),
    ):
        words += [flag, str(value)] if value != default else []
    if request.ep:
        words.append("--enable-expert-parallel")
    words.append("--enable-prefix-caching")
    if shape.recurrent is not None:
        words += ["--mamba-cache-mode", "align"]
        for flag, value in (
            ("--mamba-cache-dtype", request.mamba_cache_dtype),
            ("--mamba-ssm-cache-dtype", request.mamba_ssm_cache_dtype),
        ):
            words += [flag, value] if value != "auto" else []
    words += MODEL_SIDE_FLAGS.get(shape.model_type, ())
    words += ["--max-num-batched-tokens", str(budget_tokens), "--kv-transfer-config", _transfer_config()]
    variable = MODEL_SIDE_VARIABLES.get(shape.model_type, "")
    return f"{variable} {shell(words)}" if variable else shell(words)


def shell(words: Sequence[str]) -> str:
    """Words as one line for a shell."""
    return " ".join(shlex.quote(word) for word in words)


def _transfer_config() -> str:
    config = {
        "kv_connector": "PagewardenConnector",
        "kv_connector_module_path": "connector.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pagewarden.port": 6555},
    }
    return json.dumps(config, separators=(",", ":"))
