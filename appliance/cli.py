"""The ``pagewarden`` command."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance import __version__
from appliance.check.asking import check_text, run_check
from appliance.errors import PagewardenError, StartupError
from appliance.logs import configure_logging
from appliance.protocol import DEFAULT_HTTP_PORT, DEFAULT_PORT
from appliance.protocol.client import RequestClient, endpoint_of
from appliance.protocol.messages import Clear, ClearResult, SetTtlResult
from appliance.protocol.status import DaemonStatus
from appliance.settings import Settings, default_catalog, load_settings

app = typer.Typer(
    name="pagewarden",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A KV-cache appliance for LLM serving.",
)

_HOST = Annotated[str, typer.Option(help="Address of the daemon.", envvar="PAGEWARDEN_HOST")]
_PORT = Annotated[int, typer.Option(help="Port of the daemon.", envvar="PAGEWARDEN_PORT")]


def _help(name: str) -> str:
    return Settings.model_fields[name].description or ""


@app.command()
def server(
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings; names as the flags, with underscores.")
    ] = None,
    host: Annotated[str | None, typer.Option(help=_help("host"))] = None,
    port: Annotated[int | None, typer.Option(help=_help("port"))] = None,
    bulk_port: Annotated[int | None, typer.Option(help=_help("bulk_port"))] = None,
    chunk_size: Annotated[int | None, typer.Option(help=_help("chunk_size"))] = None,
    separate_object_groups: Annotated[
        bool | None, typer.Option("--separate-object-groups", help=_help("separate_object_groups"))
    ] = None,
    max_workers: Annotated[int | None, typer.Option(help=_help("max_workers"))] = None,
    l1_size_gb: Annotated[float | None, typer.Option(help=_help("l1_size_gb"))] = None,
    l1_init_size_gb: Annotated[float | None, typer.Option(help=_help("l1_init_size_gb"))] = None,
    eviction_policy: Annotated[str | None, typer.Option(help=_help("eviction_policy"))] = None,
    eviction_watermark: Annotated[float | None, typer.Option(help=_help("eviction_watermark"))] = None,
    l1_read_ttl_seconds: Annotated[float | None, typer.Option(help=_help("l1_read_ttl_seconds"))] = None,
    l1_write_ttl_seconds: Annotated[float | None, typer.Option(help=_help("l1_write_ttl_seconds"))] = None,
    session_ttl_seconds: Annotated[float | None, typer.Option(help=_help("session_ttl_seconds"))] = None,
    heartbeat_seconds: Annotated[float | None, typer.Option(help=_help("heartbeat_seconds"))] = None,
    engine_inflight_share: Annotated[float | None, typer.Option(help=_help("engine_inflight_share"))] = None,
    death_grace_seconds: Annotated[float | None, typer.Option(help=_help("death_grace_seconds"))] = None,
    arena_dir: Annotated[Path | None, typer.Option(help=_help("arena_dir"))] = None,
    extent_kib: Annotated[int | None, typer.Option(help=_help("extent_kib"))] = None,
    catalog: Annotated[Path | None, typer.Option(help=_help("catalog"))] = None,
    http_host: Annotated[str | None, typer.Option(help=_help("http_host"))] = None,
    http_port: Annotated[int | None, typer.Option(help=_help("http_port"))] = None,
    no_web: Annotated[bool | None, typer.Option("--no-web", help=_help("no_web"))] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help=_help("insecure"))] = None,
    drain_seconds: Annotated[float | None, typer.Option(help=_help("drain_seconds"))] = None,
    log_format: Annotated[str | None, typer.Option(help=_help("log_format"))] = None,
) -> None:
    """Run the daemon, and the dashboard beside it."""
    given = {name: value for name, value in locals().items() if name != "config" and value is not None}
    from appliance.server.daemon import Daemon

    try:
        settings = load_settings(given, config)
        configure_logging(settings.log_format)
        status = Daemon(settings).run()
    except StartupError as error:
        typer.echo(f"pagewarden: {error.code}: {error}", err=True)
        raise typer.Exit(error.exit_status) from None
    raise typer.Exit(status)


@app.command()
def web(
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    http_host: Annotated[
        str, typer.Option(help=_help("http_host"), envvar="PAGEWARDEN_HTTP_HOST")
    ] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(help=_help("http_port"), envvar="PAGEWARDEN_HTTP_PORT")
    ] = DEFAULT_HTTP_PORT,
    catalog: Annotated[Path | None, typer.Option(help=_help("catalog"), envvar="PAGEWARDEN_CATALOG")] = None,
    log_format: Annotated[
        str, typer.Option(help=_help("log_format"), envvar="PAGEWARDEN_LOG_FORMAT")
    ] = "text",
    parent_pid: Annotated[int, typer.Option(help="End when this process has ended.", hidden=True)] = 0,
) -> None:
    """Run the dashboard alone, beside a daemon that runs elsewhere on this host."""
    from web.main import WebSettings, run

    configure_logging("json" if log_format == "json" else "text")
    run(
        WebSettings(
            daemon_host=host,
            daemon_port=port,
            http_host=http_host,
            http_port=http_port,
            catalog=catalog or default_catalog(),
            log_format=log_format,
            parent_pid=parent_pid or None,
        )
    )


def _ask(host: str, port: int, op: str, args: Any, result: Any) -> Any:
    with RequestClient(endpoint_of(host, port), client_name=f"pagewarden-cli/{__version__}") as client:
        try:
            return client.call(op, args, result)
        except PagewardenError as error:
            typer.echo(f"pagewarden: {error.code}: {error}", err=True)
            raise typer.Exit(1) from None


@app.command()
def status(host: _HOST = "127.0.0.1", port: _PORT = DEFAULT_PORT) -> None:
    """Print the daemon's status document as JSON."""
    document: DaemonStatus = _ask(host, port, "status", {}, DaemonStatus)
    typer.echo(document.model_dump_json(indent=2))


@app.command()
def clear(
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    namespace: Annotated[str, typer.Option(help="Only this namespace; all of them by default.")] = "",
) -> None:
    """Forget every object, or those of one namespace. Acknowledged only when it is durable."""
    args = Clear(namespace=namespace, requested_by="cli")
    done: ClearResult = _ask(host, port, "clear", args, ClearResult)
    typer.echo(
        f"Removed {done.removed_objects} objects ({done.removed_bytes} bytes) in epoch {done.epoch}; "
        f"{done.held_bytes} bytes wait for their readers."
    )


@app.command()
def ttl(
    name: Annotated[
        str, typer.Argument(help="read_lease_ttl_seconds, write_ttl_seconds or session_ttl_seconds.")
    ],
    value_seconds: Annotated[float, typer.Argument(help="The new value.")],
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    namespace: Annotated[str, typer.Option(help="Only for this namespace.")] = "",
) -> None:
    """Change a TTL at run time: it holds for new leases and the next renewal of old ones."""
    args = {"name": name, "value_seconds": value_seconds, "namespace": namespace, "requested_by": "cli"}
    done: SetTtlResult = _ask(host, port, "set_ttl", args, SetTtlResult)
    typer.echo(f"{name}: {done.before_seconds:g} s before, {done.after_seconds:g} s now.")


@app.command()
def check(
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Compare arena, index, holds and catalog of the running daemon. Exit status 0 only if all adds up."""
    with RequestClient(endpoint_of(host, port), client_name=f"pagewarden-cli/{__version__}") as client:
        try:
            result = run_check(client)
        except PagewardenError as error:
            typer.echo(f"pagewarden: {error.code}: {error}", err=True)
            raise typer.Exit(1) from None
    typer.echo(result.model_dump_json(indent=2) if json else check_text(result))
    raise typer.Exit(0 if result.clean else 1)


class ArenaAction(StrEnum):
    """What ``pagewarden arena`` does."""

    STATUS = "status"
    CLEAR = "clear"


@app.command()
def arena(
    action: Annotated[
        ArenaAction, typer.Argument(help="status: what a start would find. clear: remove every file.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings, as for `pagewarden server`.")
    ] = None,
    arena_dir: Annotated[Path | None, typer.Option(help=_help("arena_dir"))] = None,
    catalog: Annotated[Path | None, typer.Option(help=_help("catalog"))] = None,
    l1_size_gb: Annotated[float | None, typer.Option(help=_help("l1_size_gb"))] = None,
    extent_kib: Annotated[int | None, typer.Option(help=_help("extent_kib"))] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,  # noqa: FBT002
) -> None:
    """Look at the arena's files, or remove them, while no daemon uses them. Settings as for `pagewarden server`."""
    given = {"arena_dir": arena_dir, "catalog": catalog, "l1_size_gb": l1_size_gb, "extent_kib": extent_kib}
    from appliance.arena_command import clear_text, status_text

    run = status_text if action is ArenaAction.STATUS else clear_text
    try:
        settings = load_settings({name: value for name, value in given.items() if value is not None}, config)
        typer.echo(run(settings, as_json=json))
    except StartupError as error:
        typer.echo(f"pagewarden: {error.code}: {error}", err=True)
        raise typer.Exit(error.exit_status) from None


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def add_commands_of_packages() -> None:
    """Take in commands of packages that stand on this one: entry points of the group ``pagewarden.commands``.

    Loading one must be cheap, since every command pays for it: what it runs is imported when it runs.
    """
    for point in entry_points(group="pagewarden.commands"):
        try:
            command = point.load()
        except ImportError:  # its package is not whole here; the daemon needs none of them
            continue
        app.command(name=point.name)(command)


add_commands_of_packages()


def main() -> None:
    """The entry point of the command."""
    app()


if __name__ == "__main__":
    main()
