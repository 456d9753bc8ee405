"""``pagewarden plan``: options only; what it runs is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer


def plan(
    config: Annotated[
        str, typer.Option(help="A config.json, a model's directory, or a name in the local hub cache.")
    ],
    model: Annotated[str, typer.Option(help="Name of the model in the commands.")] = "",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.")] = 1,
    dcp: Annotated[int, typer.Option(help="Decode-context-parallel size.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Experts are parallel.")] = False,  # noqa: FBT002
    vllm: Annotated[str, typer.Option(help="vLLM version whose rules count.")] = "0.32",
    align: Annotated[int, typer.Option(help="Tokens that N is aligned to; 0 is the version's rule.")] = 0,
    platform: Annotated[str, typer.Option(help="cuda, rocm or cpu.")] = "cuda",
    attention_backend: Annotated[
        str, typer.Option(help="Attention backend; the platform's by default.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Type of the model; its own by default.")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(help="Type of the attention cache.")] = "auto",
    mamba_cache_dtype: Annotated[str, typer.Option(help="Type of convolution states.")] = "auto",
    mamba_ssm_cache_dtype: Annotated[str, typer.Option(help="Type of recurrent states.")] = "auto",
    chunk_size: Annotated[int, typer.Option(help="Least tokens in a chunk.")] = 256,
    regime: Annotated[
        str, typer.Option(help="Token budget of the vLLM command: fine or throughput.")
    ] = "fine",
    users: Annotated[int, typer.Option(help="Conversations that L1 should hold.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of each of them.")] = 32768,
    snapshots: Annotated[int, typer.Option(help="Recurrent states kept of each of them.")] = 4,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Say block size, bytes, token budgets, L1 size and the commands for a model, before it is started."""
    given = {name: value for name, value in locals().items() if name not in ("config", "json")}
    from appliance.errors import PagewardenError
    from appliance.planning import PlanRequest, make_plan
    from appliance.planning.source import read_model_config
    from appliance.planning.text import plan_text

    try:
        found = read_model_config(config)
        made = make_plan(found.values, PlanRequest.of({**given, "model": model or found.model}))
    except PagewardenError as error:
        typer.echo(f"pagewarden: {error.code}: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(made.model_dump_json(indent=2) if json else plan_text(made))
