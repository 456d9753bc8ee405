"""``pagewarden doctor``: options only; what it runs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="The daemon's TOML file; its variables and these flags count too.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the daemon.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the daemon.")] = None,
    bulk_port: Annotated[int | None, typer.Option(help="Port for page bytes, if it is fixed.")] = None,
    http_host: Annotated[str | None, typer.Option(help="Address of the dashboard.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the dashboard.")] = None,
    l1_size_gb: Annotated[float | None, typer.Option(help="Size of L1 in GiB.")] = None,
    extent_kib: Annotated[int | None, typer.Option(help="Size of an extent in KiB.")] = None,
    arena_dir: Annotated[
        Path | None, typer.Option(help="Directory of the arena; with --engine, as it is mounted here.")
    ] = None,
    catalog: Annotated[Path | None, typer.Option(help="The SQLite catalog.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="As the daemon's.")] = None,
    engine: Annotated[  # noqa: FBT002
        bool, typer.Option("--engine", help="Try what an engine's process here can reach, and nothing else.")
    ] = False,
    vllm_url: Annotated[str, typer.Option(help="Address of a running vLLM, to read its flags.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as problems.")] = False,  # noqa: FBT002
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Look for what will go wrong, before a start or beside a running daemon. Exit status 1 if something is."""
    own = ("config", "engine", "vllm_url", "strict", "json")
    given = {
        name: value for name, value in locals().items() if name not in (*own, "own") and value is not None
    }
    from appliance.doctor.asking import running_status
    from appliance.doctor.findings import Severity
    from appliance.doctor.run import examine
    from appliance.doctor.subject import Subject
    from appliance.doctor.text import report_text
    from appliance.errors import InvalidSettings
    from appliance.settings import load_settings

    try:
        settings = load_settings(given, config)
    except InvalidSettings as error:
        typer.echo(f"pagewarden: {error.code}: {error}", err=True)
        raise typer.Exit(error.exit_status) from None
    running = running_status(settings.host, settings.port)
    in_force = settings.model_dump(mode="json")
    if running is not None:
        in_force |= {name: value for name, value in running.settings.items() if name not in ("host", "port")}
    subject = Subject.of_settings(
        in_force,
        running=running,
        engine_side=engine,
        arena_here=arena_dir if engine else None,
        vllm_url=vllm_url,
    )
    report = examine(subject)
    typer.echo(report.model_dump_json(indent=2) if json else report_text(report))
    bad = Severity.WARNING if strict else Severity.PROBLEM
    raise typer.Exit(1 if report.worst.rank >= bad.rank else 0)
