"""What cannot be planned is refused in one sentence that names the field or the option, its value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from planning_configs import config

from appliance.errors import PlanRefused, UnsupportedGeometry, UnsupportedModel
from appliance.planning import PlanRequest, make_plan

KIMI, QWEN, LLAMA = "kimi-linear-48b", "qwen3-next-80b", "llama-3.1-8b"


def linear(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**config(KIMI)["linear_attn_config"], **changes}}


@pytest.mark.parametrize(
    ("name", "changes", "field", "told"),
    [
        (LLAMA, {"model_type": ...}, "model_type", "is missing"),
        (LLAMA, {"model_type": 7}, "model_type", "is 7"),
        (LLAMA, {"model_type": "jamba"}, "model_type", "'jamba'"),
        (LLAMA, {"text_config": {"model_type": "rwkv"}}, "text_config.model_type", "'rwkv'"),
        (LLAMA, {"text_config": [1]}, "text_config", "is [1]"),
        (LLAMA, {"num_hidden_layers": ...}, "num_hidden_layers", "is missing"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers", "is 0"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers", "is True"),
        (LLAMA, {"num_hidden_layers": 1 << 40}, "num_hidden_layers", "is 1099511627776"),
        (LLAMA, {"num_hidden_layers": 5000}, "num_hidden_layers", "to 4096"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads", "is 5"),
        (LLAMA, {"num_attention_heads": "x" * 200}, "num_attention_heads", "..."),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types", "24 layers"),
        ("gpt-oss-20b", {"layer_types": ["chunked"] * 24}, "layer_types", "'chunked'"),
        ("gpt-oss-20b", {"layer_types": "all"}, "layer_types", "is 'all'"),
        ("deepseek-v3", {"index_topk": 2048}, "index_topk", "sparse"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank", "is None"),
        (KIMI, {"linear_attn_config": ...}, "linear_attn_config", "is missing"),
        (KIMI, linear(kda_layers=[]), "linear_attn_config.kda_layers", "is []"),
        (KIMI, linear(kda_layers=[1, 99]), "linear_attn_config.kda_layers", "[1, 99]"),
        (KIMI, linear(full_attn_layers=[4]), "linear_attn_config.full_attn_layers", "is [4]"),
        (KIMI, linear(num_heads=...), "linear_attn_config.num_heads", "is Ellipsis"),
        (KIMI, linear(short_conv_kernel_size=1), "linear_attn_config.short_conv_kernel_size", "is 1"),
        (QWEN, {"full_attention_interval": 1}, "layer_types", "both"),
        (QWEN, {"linear_value_head_dim": -1}, "linear_value_head_dim", "is -1"),
        (QWEN, {"layer_types": ["mamba"] * 48}, "layer_types", "'mamba'"),
    ],
)
def test_a_field_is_named(name: str, changes: dict[str, Any], field: str, told: str):
    with pytest.raises(UnsupportedModel) as caught:
        make_plan(config(name, **changes), PlanRequest())
    assert caught.value.details["field"] == field
    assert f"'{field}'" in caught.value.message
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("name", "options", "field", "told"),
    [
        (KIMI, {"tp": 3}, "tp", "does not divide 32"),
        (QWEN, {"tp": 32}, "tp", "does not divide 16"),
        (LLAMA, {"tp": 5}, "tp", "does not divide"),
        (LLAMA, {"tp": 8, "dcp": 2}, "dcp", "1 ranks"),
        (KIMI, {"tp": 2, "dcp": 4}, "dcp", "2 ranks"),
        ("gpt-oss-20b", {"tp": 16, "dcp": 2}, "dcp", "sliding"),
        (LLAMA, {"pp": 64}, "pp", "32 layers"),
        (LLAMA, {"vllm": "newest"}, "vllm", "'newest'"),
        (KIMI, {"vllm": "0"}, "vllm", "'0'"),
        (KIMI, {"platform": "cpu"}, "platform", "latent"),
        (KIMI, {"attention_backend": "FLASH_ATTN"}, "attention_backend", "latents"),
        (LLAMA, {"attention_backend": "FLASHMLA"}, "attention_backend", "keys and values"),
        (LLAMA, {"attention_backend": "XFORMERS"}, "attention_backend", "XFORMERS"),
        (LLAMA, {"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype", "nvfp4"),
        (LLAMA, {"dtype": "int8"}, "dtype", "int8"),
        (QWEN, {"mamba_cache_dtype": "fp8"}, "mamba_cache_dtype", "fp8"),
        (QWEN, {"mamba_ssm_cache_dtype": "fp8"}, "mamba_ssm_cache_dtype", "fp8"),
        (KIMI, {"mamba_ssm_cache_dtype": "float16"}, "mamba_ssm_cache_dtype", "float16"),
    ],
)
def test_an_option_that_does_not_fit_is_named(name: str, options: dict[str, Any], field: str, told: str):
    with pytest.raises(PlanRefused) as caught:
        make_plan(config(name), PlanRequest(**options))
    assert caught.value.details["field"] == field
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tp": 0}, "tp"),
        ({"tp": "two"}, "tp"),
        ({"platform": "tpu"}, "platform"),
        ({"regime": "fast"}, "regime"),
        ({"users": 0}, "users"),
        ({"tensor": 2}, "tensor"),
        ({"model": "x" * 600}, "model"),
    ],
)
def test_a_value_out_of_bounds_is_named(values: dict[str, Any], field: str):
    with pytest.raises(PlanRefused, match=f"'{field}'") as caught:
        PlanRequest.of(values)
    assert caught.value.details["field"] == field


def test_a_geometry_that_the_daemon_could_not_serve_is_refused():
    with pytest.raises(UnsupportedGeometry, match="shards"):
        make_plan(config(KIMI), PlanRequest(tp=8, pp=16))


def test_what_is_assumed_is_said():
    def notices(name: str, changes: dict[str, Any] | None = None, **options: Any) -> str:
        return " ".join(make_plan(config(name, **(changes or {})), PlanRequest(**options)).notices)

    assert "assumed to be FLASH_ATTN_MLA" in notices(KIMI)
    assert "assumed to be" not in notices(KIMI, attention_backend="FLASHMLA")
    assert "assumed to be" not in notices(KIMI, align=16)
    assert "newest that was read" in notices(KIMI, vllm="0.40")
    assert "needs vLLM 0.30" in notices(KIMI, vllm="0.28")
    assert "works since" in notices(KIMI, vllm="0.28")
    assert "never completes a block" in notices(KIMI, vllm="0.27")
    assert "states stand every 1920" in notices("kimi-k3", tp=8, dcp=8, align=1920)
    assert "bfloat16 was assumed" in notices(LLAMA, {"torch_dtype": ...})
    assert "in place of MODEL" in notices(LLAMA)
    assert "in place of MODEL" not in notices(LLAMA, model="a/b")


def test_float32_weights_are_not_served_as_such():
    by_itself = make_plan(config(LLAMA, torch_dtype="torch.float32"), PlanRequest())
    asked = make_plan(config(LLAMA), PlanRequest(dtype="float32"))
    assert asked.attention_token_bytes == 2 * by_itself.attention_token_bytes
