"""vLLM's rules for the unified block size N and the types of cached values, by version, platform and backend.

Read from the sources of vLLM 0.26, 0.27.1, 0.28 and 0.32::

    align = max(smallest kernel block, default block size); latent hybrids since 0.27: max(align, 128)
    N     = align x ceil(state bytes / (align x attention bytes of a token))
    N     = the next multiple of the smallest kernel block
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from appliance.errors import PlanRefused
from appliance.planning.request import PlanRequest, Platform
from appliance.planning.shape import Shape, StateForm

DEFAULT_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128
LATENT_HYBRID_ALIGNMENT_TOKENS = 128
LATENT_HYBRID_ALIGNMENT_SINCE = (0, 27)
SMALL_BUDGETS_SINCE = (0, 28)
CONNECTOR_SINCE = (0, 30)
LAST_READ = (0, 32)

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of one item by type. Packed cache types (nvfp4, per-token-head scales, ds_mla) are not known here."""

_MODEL_TYPES = frozenset({"float32", "bfloat16", "float16", "half"})
_STATE_TYPES = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend: its smallest kernel block, the block size it prefers, and whether it reads latents."""

    name: str
    kernel_tokens: int
    preferred_tokens: int
    latent: bool


BACKENDS = {
    each.name: each
    for each in (
        Backend("FLASH_ATTN", 16, 16, latent=False),
        Backend("FLASHINFER", 16, 16, latent=False),
        Backend("TRITON_ATTN", 16, 16, latent=False),
        Backend("FLEX_ATTENTION", 16, 16, latent=False),
        Backend("ROCM_ATTN", 16, 16, latent=False),
        Backend("ROCM_AITER_FA", 16, 16, latent=False),
        Backend("ROCM_AITER_UNIFIED_ATTN", 16, 64, latent=False),
        Backend("CPU_ATTN", 32, CPU_BLOCK_TOKENS, latent=False),
        Backend("FLASH_ATTN_MLA", 16, 16, latent=True),
        Backend("FLASHMLA", 64, 64, latent=True),
        Backend("FLASHINFER_MLA", 32, 32, latent=True),
        Backend("TOKENSPEED_MLA", 32, 32, latent=True),
        Backend("CUTLASS_MLA", 128, 128, latent=True),
        Backend("TRITON_MLA", 16, 16, latent=True),
        Backend("ROCM_AITER_MLA", 1, 16, latent=True),
    )
}

_DEFAULT_BACKENDS = {
    (Platform.CUDA, False): "FLASH_ATTN",
    (Platform.CUDA, True): "FLASH_ATTN_MLA",
    (Platform.ROCM, False): "ROCM_ATTN",
    (Platform.ROCM, True): "ROCM_AITER_MLA",
    (Platform.CPU, False): "CPU_ATTN",
}


@dataclass(frozen=True, slots=True)
class Types:
    """Bytes of one item: attention cache, convolution windows, recurrent states; and the model's type by name."""

    model: str
    attention_bytes: int
    convolution_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """What N is a multiple of, why, and the smallest kernel block that it is rounded to afterwards."""

    tokens: int
    kernel_tokens: int
    reason: str


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number of a version such as ``0.32`` or ``0.32.0``.

    Raises:
        PlanRefused: if it is none.
    """
    found = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:[.+a-z].*)?", text.strip())
    if found is None:
        raise PlanRefused(
            f"The option 'vllm' is '{text}', which is no version.", remedy="Say it as in 0.32.", field="vllm"
        )
    return int(found[1]), int(found[2])


def backend_of(request: PlanRequest, shape: Shape) -> tuple[Backend, bool]:
    """The attention backend, and whether it was assumed rather than given.

    Raises:
        PlanRefused: if it is unknown, or does not read this model's kind of cache.
    """
    name = request.attention_backend.upper()
    assumed = not name
    if assumed:
        default = _DEFAULT_BACKENDS.get((request.platform, shape.latent))
        if default is None:
            raise PlanRefused(
                "The option 'platform' is 'cpu', and vLLM keeps no prefix cache for latent attention there.",
                remedy="Plan for cuda or rocm.",
                field="platform",
            )
        name = default
    backend = BACKENDS.get(name)
    if backend is None:
        raise PlanRefused(
            f"The option 'attention_backend' is '{request.attention_backend}', whose block sizes are not known here; "
            f"known are {', '.join(BACKENDS)}.",
            remedy="Give one of these, or --align with the number that vLLM's log implies.",
            field="attention_backend",
        )
    if backend.latent != shape.latent:
        kind = "latents" if shape.latent else "keys and values"
        raise PlanRefused(
            f"The option 'attention_backend' is '{backend.name}', but the model caches {kind}, which it does not read.",
            remedy=f"Use one of {', '.join(each.name for each in BACKENDS.values() if each.latent == shape.latent)}.",
            field="attention_backend",
        )
    return backend, assumed


def alignment_of(request: PlanRequest, shape: Shape, backend: Backend) -> Alignment:
    """What vLLM of the request's version aligns N to."""
    if request.align:
        return Alignment(request.align, 1, "as given with --align")
    tokens = max(backend.kernel_tokens, backend.preferred_tokens)
    reason = f"the block size of {backend.name}"
    if shape.recurrent is not None and shape.latent:
        version = parse_version(request.vllm)
        if version >= LATENT_HYBRID_ALIGNMENT_SINCE and tokens < LATENT_HYBRID_ALIGNMENT_TOKENS:
            tokens = LATENT_HYBRID_ALIGNMENT_TOKENS
            reason = "vLLM's rule for latent attention beside recurrent layers, since 0.27"
    return Alignment(tokens, backend.kernel_tokens, reason)


def block_tokens(state_bytes: int, token_bytes: int, alignment: Alignment) -> int:
    """The unified block size N: a page of attention holds at least the bytes of a state (0 without one).

    ``state_bytes`` and ``token_bytes`` are those of one layer on one rank.
    """
    blocks = max(1, math.ceil(state_bytes / (alignment.tokens * token_bytes)))
    return alignment.kernel_tokens * math.ceil(alignment.tokens * blocks / alignment.kernel_tokens)


def types_of(request: PlanRequest, shape: Shape) -> Types:
    """Item sizes as vLLM chooses them.

    Raises:
        PlanRefused: naming the option whose type is not known here.
    """
    model = _one_of("dtype", request.dtype or shape.dtype or "bfloat16", _MODEL_TYPES)
    if not request.dtype and model == "float32":
        model = "bfloat16"  # vLLM does not serve float32 unless it is asked to
    cache = model if request.kv_cache_dtype == "auto" else request.kv_cache_dtype
    convolution = model if request.mamba_cache_dtype == "auto" else request.mamba_cache_dtype
    _one_of("mamba_cache_dtype", convolution, _STATE_TYPES | {"half"})
    state = request.mamba_ssm_cache_dtype
    if state == "auto":
        state = _own_state_type(request, shape, convolution)
    return Types(
        model=model,
        attention_bytes=ITEM_BYTES[_one_of("kv_cache_dtype", cache, frozenset(ITEM_BYTES))],
        convolution_bytes=ITEM_BYTES[convolution],
        state_bytes=ITEM_BYTES[_one_of("mamba_ssm_cache_dtype", state, _known_states(shape))],
    )


def _known_states(shape: Shape) -> frozenset[str]:
    if shape.recurrent is not None and shape.recurrent.form is StateForm.KDA:
        return frozenset({"float32", "bfloat16"})  # the only ones that its kernels keep
    return _STATE_TYPES | {"half"}


def _own_state_type(request: PlanRequest, shape: Shape, convolution: str) -> str:
    """What ``auto`` means: float32 for KDA and on CPUs, the configuration's own, else that of the convolution."""
    if shape.recurrent is None:
        return convolution
    if shape.recurrent.form is StateForm.KDA or request.platform is Platform.CPU:
        return "float32"
    return shape.recurrent.state_dtype or convolution


def _one_of(option: str, value: str, known: frozenset[str]) -> str:
    if value not in known:
        raise PlanRefused(
            f"The option '{option}' is '{value}', whose size is not known here; known are {', '.join(sorted(known))}.",
            field=option,
        )
    return value
