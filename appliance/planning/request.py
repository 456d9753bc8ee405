"""What is planned for: the options of ``pagewarden plan`` and the body of ``POST /api/v1/plan``."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import PlanRefused
from appliance.geometry import MAX_CHUNK_TOKENS, MAX_SHARDS


class Regime(StrEnum):
    """Which token budget the vLLM command gets."""

    FINE = "fine"
    THROUGHPUT = "throughput"


class Platform(StrEnum):
    """Where the engine computes; it decides the default attention backend and block size."""

    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"


class PlanRequest(BaseModel):
    """The engine and its users. Empty strings and zeros mean: what vLLM does by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field("", max_length=512, description="Name of the model in the commands.")
    tp: int = Field(1, ge=1, le=1024, description="Tensor-parallel size.")
    pp: int = Field(1, ge=1, le=MAX_SHARDS, description="Pipeline-parallel size.")
    dcp: int = Field(1, ge=1, le=MAX_SHARDS, description="Decode-context-parallel size.")
    ep: bool = Field(default=False, description="Experts are parallel; changes no cache bytes.")
    vllm: str = Field("0.32", max_length=32, description="vLLM version whose rules count.")
    align: int = Field(0, ge=0, le=65536, description="Tokens that N is aligned to; 0 is the version's rule.")
    platform: Platform = Field(Platform.CUDA, description="cuda, rocm or cpu.")
    attention_backend: str = Field(
        "", max_length=64, description="Attention backend; the platform's by default."
    )
    dtype: str = Field("", max_length=32, description="Type of the model; its own by default.")
    kv_cache_dtype: str = Field("auto", max_length=32, description="Type of the attention cache.")
    mamba_cache_dtype: str = Field("auto", max_length=32, description="Type of convolution states.")
    mamba_ssm_cache_dtype: str = Field("auto", max_length=32, description="Type of recurrent states.")
    chunk_size: int = Field(256, ge=1, le=MAX_CHUNK_TOKENS, description="Least tokens in a chunk.")
    regime: Regime = Field(Regime.FINE, description="Which token budget the vLLM command gets.")
    users: int = Field(32, ge=1, le=10_000_000, description="Conversations that L1 should hold.")
    context: int = Field(32768, ge=1, le=1 << 31, description="Tokens of each of them.")
    snapshots: int = Field(4, ge=1, le=65536, description="Recurrent states kept of each of them.")

    @classmethod
    def of(cls, values: dict[str, Any]) -> PlanRequest:
        """The request of plain values, such as parsed options.

        Raises:
            PlanRefused: naming the first value that cannot be used.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            raise PlanRefused(
                f"The option '{name}' is {first.get('input')!r}: {first['msg']}.", field=name
            ) from None
