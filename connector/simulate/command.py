"""`pagewarden simulate`: options only; what it runs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.protocol import DEFAULT_PORT


def simulate(
    model: Annotated[
        str, typer.Option(help="kimi-linear-48b, kimi-k3, qwen3-next or llama-8b.")
    ] = "kimi-linear-48b",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each engine.")] = 1,
    engines: Annotated[int, typer.Option(help="Engines of this kind, all in this process.")] = 1,
    engine_id: Annotated[
        str, typer.Option(help="Id of the engine; with several, a number is added.")
    ] = "simulated",
    attention_backend: Annotated[
        str, typer.Option(help="Name of the attention backend; engines with different ones never share.")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Requests of a trace file; made-up conversations by default.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Made-up requests a second and engine, before --speed.")] = 2.0,
    speed: Annotated[float, typer.Option(help="How many times faster than the trace requests come.")] = 1.0,
    scale: Annotated[int, typer.Option(help="Divides the bytes of every page.")] = 64,
    align: Annotated[
        int, typer.Option(help="Tokens that the block size is aligned to; 0 is vLLM 0.32's rule.")
    ] = 0,
    cache_tokens: Annotated[int, typer.Option(help="Tokens that an engine's own pages hold.")] = 65536,
    concurrency: Annotated[int, typer.Option(help="Requests of an engine at one time.")] = 4,
    abort_share: Annotated[float, typer.Option(help="Share of requests aborted around their load.")] = 0.0,
    seconds: Annotated[float, typer.Option(help="End after so many seconds; 0 never.")] = 0.0,
    requests: Annotated[int, typer.Option(help="End after so many requests an engine; 0 never.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the order of made-up requests and of aborts.")] = 0,
    processes: Annotated[bool, typer.Option("--processes", help="One process per rank.")] = False,  # noqa: FBT002
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,  # noqa: FBT002
    host: Annotated[str, typer.Option(help="Address of the daemon.", envvar="PAGEWARDEN_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the daemon.", envvar="PAGEWARDEN_PORT")] = DEFAULT_PORT,
    arena_dir: Annotated[
        str, typer.Option(help="Where the daemon's arena is mounted here, if elsewhere than there.")
    ] = "",
) -> None:
    """Run simulated engines against a daemon and compare every loaded byte. Exit status 3 if one is wrong."""
    from connector.simulate.run import Plan, run

    status = run(
        Plan(
            model=model,
            tensor=tp,
            engines=engines,
            engine_id=engine_id,
            attention_backend=attention_backend,
            trace=trace,
            requests_per_second=rate,
            speed=speed,
            scale=scale,
            alignment_tokens=align,
            cache_tokens=cache_tokens,
            concurrency=concurrency,
            abort_share=abort_share,
            seconds=seconds,
            most_requests=requests,
            seed=seed,
            rank_processes=processes,
            as_json=json,
            host=host,
            port=port,
            arena_dir=arena_dir or None,
        )
    )
    raise typer.Exit(status)
