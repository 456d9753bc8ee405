"""A plan for people."""

from __future__ import annotations

from appliance.planning.plan import Plan, PlannedGroup

_HEADS = ("group", "kind", "layers", "shards", "replicas", "stored page", "chunk", "per 1K tokens")


def plan_text(plan: Plan) -> str:
    """Lines of the plan, the numbers first, the commands last."""
    lines = [
        f"{plan.model or plan.model_type}: vLLM {plan.vllm}, {_sizes(plan)}, {plan.attention_backend}",
        "",
        f"block size N            {plan.block_size:,} tokens (a multiple of {plan.alignment_tokens}: {plan.alignment_reason})",
        f"chunk                   {plan.chunk_tokens:,} tokens",
        f"attention, a token      {plan.attention_token_bytes:,} bytes a layer and rank",
        f"attention page          {plan.page_bytes:,} bytes a layer and rank",
    ]
    if plan.state_bytes:
        lines.append(f"recurrent state         {plan.state_bytes:,} bytes a layer and rank")
    fine, throughput = plan.budgets.fine, plan.budgets.throughput
    either = f"{fine:,} for the finest reuse, {throughput:,} for throughput"
    kept = f"{plan.l1.chunks_per_user:,} chunks" + (
        f", {plan.l1.snapshots:,} snapshots" if plan.state_bytes else ""
    )
    lines += [
        f"token budget            {either if fine != throughput else f'{fine:,}'}",
        "",
        *_table([_HEADS, *(_row(group) for group in plan.groups)]),
        "",
        (
            f"L1 for {plan.l1.users:,} users x {plan.l1.context_tokens:,} tokens: {plan.l1.size_gb:,} GiB "
            f"({size(plan.l1.bytes_per_user)} each: {kept}; extents of {plan.l1.extent_kib} KiB)"
        ),
        "",
        *(f"note: {notice}" for notice in plan.notices),
        plan.authority,
        "",
        plan.commands.server,
        "",
        plan.commands.vllm,
    ]
    return "\n".join(lines)


def size(value: float) -> str:
    """Bytes with a binary unit, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.3g} TiB"


def _sizes(plan: Plan) -> str:
    parts = [f"TP {plan.tp}"]
    parts += [f"PP {plan.pp}"] if plan.pp > 1 else []
    parts += [f"DCP {plan.dcp}"] if plan.dcp > 1 else []
    parts += ["EP"] if plan.ep else []
    return " ".join(parts)


def _row(group: PlannedGroup) -> tuple[str, ...]:
    return (
        str(group.index),
        group.kind,
        str(group.layers),
        str(group.shards),
        str(group.replicas),
        size(group.stored_page_bytes),
        size(group.chunk_bytes),
        size(group.bytes_per_1k_tokens),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
