"""From a configuration to a shape, one function for each family of models.

A model type that is not listed is refused: a guessed geometry would be worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.errors import UnsupportedModel
from appliance.planning.fields import Fields
from appliance.planning.shape import Attention, Recurrent, Shape, StateForm

MOST_LAYERS = 4096
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of the language model that a configuration describes.

    Raises:
        UnsupportedModel: naming the field that is unknown, missing or wrong.
    """
    outer = Fields(config)
    model_type = outer.text("model_type")
    fields = outer.inside("text_config") if outer.has("text_config") else outer
    inner_type = fields.text("model_type", model_type)
    family = FAMILIES.get(inner_type)
    if family is None:
        raise UnsupportedModel(
            f"The configuration's field '{fields.name_of('model_type')}' is '{inner_type}', a family whose cache is not "
            f"known here; known are {', '.join(sorted(FAMILIES))}.",
            remedy="Start vLLM and read the block size from its log: the daemon serves any model whose cache groups it "
            "knows, planned or not.",
            field=fields.name_of("model_type"),
        )
    return family(fields, model_type, _dtype(fields, outer))


def _dtype(fields: Fields, outer: Fields) -> str:
    for place in (fields, outer):
        for name in ("dtype", "torch_dtype"):
            if place.has(name):
                return place.text(name).removeprefix("torch.")
    return ""


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, KV heads, and the width of a head."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    width = fields.count("head_dim", 0) if fields.has("head_dim") else fields.count("hidden_size") // heads
    return heads, kv_heads, width


def _common(fields: Fields, model_type: str, dtype: str, *, own_code: bool = False) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "dtype": dtype,
        "layers": fields.count("num_hidden_layers", most=MOST_LAYERS),
        "query_heads": fields.count("num_attention_heads"),
        "context_tokens": fields.count("max_position_embeddings", 0),
        "own_code": own_code,
    }


def _layer_types(fields: Fields, layers: int, known: tuple[str, ...]) -> list[str]:
    types = fields.list_of("layer_types", str)
    if len(types) != layers:
        raise fields.wrong("layer_types", f"one entry for each of {layers} layers")
    for each in types:
        if each not in known:
            raise UnsupportedModel(
                f"The configuration's field '{fields.name_of('layer_types')}' names the kind '{each}'; known here are "
                f"{', '.join(known)}.",
                field=fields.name_of("layer_types"),
            )
    return types


def _places(types: list[str], kind: str) -> tuple[int, ...]:
    return tuple(place for place, each in enumerate(types) if each == kind)


# --- attention only -----------------------------------------------------------------------------------------------


def _plain(fields: Fields, model_type: str, dtype: str) -> Shape:
    """Keys and values in every layer; some layers may see a sliding window."""
    common = _common(fields, model_type, dtype)
    _, kv_heads, width = _heads(fields)
    full, sliding = _windows(fields, common["layers"])
    window = fields.count("sliding_window") if sliding else 0
    attention = [Attention(full, kv_heads, width)] if full else []
    attention += [Attention(sliding, kv_heads, width, window)] if sliding else []
    return Shape(**common, attention=tuple(attention))


def _windows(fields: Fields, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers with full attention, and those with a sliding window."""
    everything = tuple(range(layers))
    if not fields.has("sliding_window") or fields.raw("use_sliding_window") is False:
        return everything, ()
    if fields.has("layer_types"):
        types = _layer_types(fields, layers, (_FULL, _SLIDING))
        return _places(types, _FULL), _places(types, _SLIDING)
    if fields.raw("use_sliding_window") is True:
        first = fields.count("max_window_layers", 0, least=0)
        return everything[:first], everything[first:]
    return (), everything


def _latent(fields: Fields, model_type: str, dtype: str) -> Shape:
    """Multi-head latent attention in every layer."""
    if fields.has("index_topk"):
        raise UnsupportedModel(
            f"The configuration's field '{fields.name_of('index_topk')}' asks for sparse attention, whose second cache "
            "is not known here.",
            field=fields.name_of("index_topk"),
        )
    common = _common(fields, model_type, dtype)
    return Shape(**common, attention=(_latents(fields, tuple(range(common["layers"]))),))


def _latents(fields: Fields, layers: tuple[int, ...]) -> Attention:
    width = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim", least=0)
    return Attention(layers, kv_heads=0, width=width)


# --- hybrids ------------------------------------------------------------------------------------------------------


def _kimi(fields: Fields, model_type: str, dtype: str) -> Shape:
    """Kimi Delta Attention beside latent attention; layers are numbered from 1 in the configuration."""
    common = _common(fields, model_type, dtype, own_code=True)
    linear = fields.inside("linear_attn_config")
    states = _one_based(linear, "kda_layers", common["layers"])
    latents = _one_based(linear, "full_attn_layers", common["layers"])
    if sorted(states + latents) != list(range(common["layers"])):
        raise linear.wrong(
            "full_attn_layers", f"the layers of 1 to {common['layers']} that kda_layers leaves out"
        )
    heads, width = linear.count("num_heads"), linear.count("head_dim")
    recurrent = Recurrent(
        states, StateForm.KDA, heads, width, heads, width, linear.count("short_conv_kernel_size", least=2)
    )
    return Shape(**common, attention=(_latents(fields, latents),), recurrent=recurrent)


def _one_based(linear: Fields, name: str, layers: int) -> tuple[int, ...]:
    numbers = linear.list_of(name, int)
    if not numbers or not all(1 <= number <= layers for number in numbers):
        raise linear.wrong(name, f"at least one number, each from 1 to {layers}")
    return tuple(sorted(number - 1 for number in numbers))


def _gated_delta(fields: Fields, model_type: str, dtype: str) -> Shape:
    """Gated DeltaNet beside attention with keys and values."""
    common = _common(fields, model_type, dtype)
    layers = common["layers"]
    if fields.has("layer_types"):
        types = _layer_types(fields, layers, (_FULL, _LINEAR))
    else:
        every = fields.count("full_attention_interval")
        types = [_LINEAR if (layer + 1) % every else _FULL for layer in range(layers)]
    if _FULL not in types or _LINEAR not in types:
        raise fields.wrong("layer_types", "both full_attention and linear_attention")
    _, kv_heads, width = _heads(fields)
    recurrent = Recurrent(
        layers=_places(types, _LINEAR),
        form=StateForm.GATED_DELTA,
        key_heads=fields.count("linear_num_key_heads"),
        key_width=fields.count("linear_key_head_dim"),
        value_heads=fields.count("linear_num_value_heads"),
        value_width=fields.count("linear_value_head_dim"),
        convolution=fields.count("linear_conv_kernel_dim", least=2),
        state_dtype=fields.text("mamba_ssm_dtype", ""),
    )
    return Shape(
        **common, attention=(Attention(_places(types, _FULL), kv_heads, width),), recurrent=recurrent
    )


_Family = Callable[[Fields, str, str], Shape]

FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss"), _plain
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _latent),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), _kimi),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta
    ),
}
"""Model types by the function that reads them."""
