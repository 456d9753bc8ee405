"""The plan: everything put together, as a document that is printed, served and compared with what registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from appliance.geometry import GroupKind, negotiate_chunk_tokens
from appliance.planning import rules
from appliance.planning.commands import server_command, vllm_command
from appliance.planning.families import shape_of
from appliance.planning.groups import CacheGroup, cache_groups, check_split, state_bytes
from appliance.planning.request import PlanRequest, Regime
from appliance.planning.shape import Shape
from appliance.planning.sizing import Budgets, budgets_of, l1_size

AUTHORITY = (
    "The authority is the number in vLLM's startup log, 'Setting attention block size to N tokens': read it, and plan "
    "again after a change of parallel sizes, types, backend or vLLM version. The daemon warns when an engine registers "
    "with another N than planned."
)


EXAMPLE_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""What a configuration needs at least, for the examples of the API."""


def _with_example(schema: dict[str, Any]) -> None:
    schema["examples"] = [make_plan(EXAMPLE_CONFIG, PlanRequest(tp=2, model="org/model")).model_dump()]


class PlannedGroup(BaseModel):
    """One cache group. ``unit_tokens`` is what one manager block covers over the context ranks.

    ``page_bytes`` is a page of one layer on one rank, ``stored_page_bytes`` what of it is stored (a state without its
    padding), ``chunk_bytes`` one chunk over all layers and shards; of a recurrent group that is one snapshot.
    ``bytes_per_1k_tokens`` counts a recurrent group with a snapshot at every chunk.
    """

    index: int
    name: str
    kind: str
    layers: int
    block_tokens: int
    unit_tokens: int
    window_tokens: int
    shards: int
    replicas: int
    page_bytes: int
    stored_page_bytes: int
    chunk_bytes: int
    bytes_per_1k_tokens: int


class PlannedBudgets(BaseModel):
    """``--max-num-batched-tokens`` for every boundary cached by vLLM itself, and for large prefill steps."""

    fine: int
    throughput: int


class PlannedL1(BaseModel):
    """The L1 for ``users`` conversations of ``context_tokens``, each with ``snapshots`` recurrent states."""

    users: int
    context_tokens: int
    snapshots: int
    chunks_per_user: int
    bytes_per_user: int
    bytes_total: int
    size_gb: int
    extent_kib: int


class PlannedCommands(BaseModel):
    """What to run, for a shell."""

    server: str
    vllm: str


class Plan(BaseModel):
    """A plan. ``block_size`` is N in tokens of one rank; ``max_num_batched_tokens`` is that of the regime asked for."""

    model_config = ConfigDict(json_schema_extra=_with_example)

    model: str
    model_type: str
    vllm: str
    tp: int
    pp: int
    dcp: int
    ep: bool
    attention_backend: str
    alignment_tokens: int
    alignment_reason: str
    block_size: int
    chunk_tokens: int
    max_num_batched_tokens: int
    budgets: PlannedBudgets
    attention_token_bytes: int
    page_bytes: int
    state_bytes: int
    groups: list[PlannedGroup]
    l1: PlannedL1
    commands: PlannedCommands
    notices: list[str]
    authority: str = AUTHORITY


def make_plan(config: Mapping[str, Any], request: PlanRequest) -> Plan:
    """The plan for a configuration.

    Raises:
        UnsupportedModel: naming the field of the configuration. PlanRefused: naming the option.
        UnsupportedGeometry: if the daemon could not serve the groups.
    """
    shape = shape_of(config)
    rules.parse_version(request.vllm)
    check_split(request, shape)
    backend, assumed = rules.backend_of(request, shape)
    alignment = rules.alignment_of(request, shape, backend)
    types = rules.types_of(request, shape)
    token_bytes = max(each.token_items(request.tp) for each in shape.attention) * types.attention_bytes
    state = state_bytes(shape.recurrent, request.tp, types) if shape.recurrent else 0
    block_tokens = rules.block_tokens(state, token_bytes, alignment)
    groups = cache_groups(request, shape, types, block_tokens)
    chunk_tokens = negotiate_chunk_tokens(request.chunk_size, [each.group for each in groups])
    budgets = budgets_of(block_tokens, hybrid=shape.recurrent is not None)
    budget = budgets.fine if request.regime is Regime.FINE else budgets.throughput
    size = l1_size(request, groups, chunk_tokens)
    page_bytes = block_tokens * token_bytes
    return Plan(
        model=request.model,
        model_type=shape.model_type,
        vllm=request.vllm,
        tp=request.tp,
        pp=request.pp,
        dcp=request.dcp,
        ep=request.ep,
        attention_backend=backend.name,
        alignment_tokens=alignment.tokens,
        alignment_reason=alignment.reason,
        block_size=block_tokens,
        chunk_tokens=chunk_tokens,
        max_num_batched_tokens=budget,
        budgets=PlannedBudgets(fine=budgets.fine, throughput=budgets.throughput),
        attention_token_bytes=token_bytes,
        page_bytes=page_bytes,
        state_bytes=state,
        groups=[_planned_group(each, page_bytes, chunk_tokens) for each in groups],
        l1=PlannedL1(
            users=request.users,
            context_tokens=request.context,
            snapshots=request.snapshots,
            chunks_per_user=size.chunks,
            bytes_per_user=size.bytes_per_user,
            bytes_total=size.bytes_total,
            size_gb=size.size_gb,
            extent_kib=size.extent_kib,
        ),
        commands=PlannedCommands(
            server=server_command(request, size, request.model, block_tokens),
            vllm=vllm_command(request, shape, request.model, budget),
        ),
        notices=_notices(
            request, shape, budgets, assumed_backend=backend.name if assumed else "", groups=groups
        ),
    )


def _planned_group(each: CacheGroup, page_bytes: int, chunk_tokens: int) -> PlannedGroup:
    group = each.group
    chunk_bytes = each.chunk_bytes(chunk_tokens)
    return PlannedGroup(
        index=group.index,
        name=group.name,
        kind=group.kind.value,
        layers=len(each.layers),
        block_tokens=group.block_tokens,
        unit_tokens=group.unit_tokens,
        window_tokens=group.window_tokens,
        shards=group.shards,
        replicas=group.replicas,
        page_bytes=page_bytes,
        stored_page_bytes=each.layer_bytes,
        chunk_bytes=chunk_bytes,
        bytes_per_1k_tokens=round(chunk_bytes * 1024 / chunk_tokens),
    )


def _notices(
    request: PlanRequest, shape: Shape, budgets: Budgets, *, assumed_backend: str, groups: list[CacheGroup]
) -> list[str]:
    """What whoever follows the plan should know of it."""
    found = []
    version = rules.parse_version(request.vllm)
    if assumed_backend and not request.align:
        found.append(
            f"The attention backend was assumed to be {assumed_backend}; another may align N otherwise: give "
            "--attention-backend with the name in vLLM's log."
        )
    if version > rules.LAST_READ:
        last = ".".join(map(str, rules.LAST_READ))
        found.append(
            f"The rules are those of vLLM {last}, the newest that was read; {request.vllm} may differ."
        )
    if version < rules.CONNECTOR_SINCE:
        since = ".".join(map(str, rules.CONNECTOR_SINCE))
        found.append(f"The connector needs vLLM {since} or newer; with {request.vllm} only the numbers hold.")
    if shape.recurrent is not None:
        found += _hybrid_notices(request, budgets, version)
    if any(group.group.kind is GroupKind.SLIDING for group in groups):
        found.append("Sliding windows are sized as if every chunk were kept; a hit needs only the last ones.")
    if not (request.dtype or shape.dtype):
        found.append("The configuration names no type (dtype, torch_dtype); bfloat16 was assumed.")
    if not request.model:
        found.append("The configuration names no model: put its name in place of MODEL.")
    return found


def _hybrid_notices(request: PlanRequest, budgets: Budgets, version: tuple[int, int]) -> list[str]:
    n = (budgets.fine + 1) // 2
    found = [
        (
            f"A budget in [{n}, {2 * n}) makes vLLM end each prefill step on a block boundary, so it keeps every state. A "
            "larger one raises throughput; the daemon then names the boundaries that deserve a state, and vLLM keeps those."
        )
    ]
    if version >= rules.SMALL_BUDGETS_SINCE:
        found.append(f"A budget below {n} works since vLLM 0.28, with more than one step a block.")
    else:
        found.append(
            f"A budget below {n} never completes a block on vLLM {request.vllm}: stay at or above it."
        )
    if request.dcp > 1:
        found.append(
            f"Attention is divided over {request.dcp} context ranks, so its blocks cover {n * request.dcp} tokens while "
            f"states stand every {n}: vLLM alone offers no state at a chunk's end, the daemon asks for it."
        )
    return found
