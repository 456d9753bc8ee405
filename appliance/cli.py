"""The ``pagewarden`` command."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from appliance import __version__, accounts_cli
from appliance.asking import HOST as _HOST
from appliance.asking import PORT as _PORT
from appliance.asking import RUN_DIR as _RUN_DIR
from appliance.asking import admin_client, ask, requester
from appliance.check.asking import check_text, run_check
from appliance.doctor.command import doctor
from appliance.errors import PagewardenError, StartupError
from appliance.logs import configure_logging
from appliance.planning.command import plan
from appliance.protocol import DEFAULT_HTTP_PORT, DEFAULT_PORT
from appliance.protocol.messages import Clear, ClearResult, SetTtlResult
from appliance.protocol.retention import SetPolicyResult
from appliance.protocol.status import DaemonStatus
from appliance.replay.command import trace
from appliance.run_dir import default_run_dir
from appliance.settings import Settings, default_catalog, load_settings

app = typer.Typer(
    name="pagewarden",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A KV-cache appliance for LLM serving.",
)

bench = typer.Typer(
    no_args_is_help=True, help="Measure on this machine, side by side with what it is compared with."
)
app.add_typer(bench, name="bench")
bench.command()(trace)


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
    http_names: Annotated[str | None, typer.Option(help=_help("http_names"))] = None,
    no_web: Annotated[bool | None, typer.Option("--no-web", help=_help("no_web"))] = None,
    read_only: Annotated[bool | None, typer.Option("--read-only", help=_help("read_only"))] = None,
    run_dir: Annotated[Path | None, typer.Option(help=_help("run_dir"))] = None,
    admin_password_file: Annotated[Path | None, typer.Option(help=_help("admin_password_file"))] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help=_help("insecure"))] = None,
    drain_seconds: Annotated[float | None, typer.Option(help=_help("drain_seconds"))] = None,
    planned_block_size: Annotated[str | None, typer.Option(help=_help("planned_block_size"))] = None,
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
    run_dir: _RUN_DIR = None,
    http_names: Annotated[str, typer.Option(help=_help("http_names"), envvar="PAGEWARDEN_HTTP_NAMES")] = "",
    read_only: Annotated[  # noqa: FBT002
        bool, typer.Option("--read-only", help=_help("read_only"), envvar="PAGEWARDEN_READ_ONLY")
    ] = False,
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
            run_dir=run_dir or default_run_dir(),
            http_names=http_names,
            read_only=read_only,
            log_format=log_format,
            parent_pid=parent_pid or None,
        )
    )


@app.command()
def status(host: _HOST = "127.0.0.1", port: _PORT = DEFAULT_PORT) -> None:
    """Print the daemon's status document as JSON."""
    document = ask(host, port, None, "status", {}, DaemonStatus)
    typer.echo(document.model_dump_json(indent=2))


@app.command()
def clear(
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    namespace: Annotated[str, typer.Option(help="Only this namespace; all of them by default.")] = "",
    run_dir: _RUN_DIR = None,
) -> None:
    """Forget every object, or those of one namespace. Acknowledged only when it is durable."""
    args = Clear(namespace=namespace, **requester())
    done = ask(host, port, run_dir, "clear", args, ClearResult)
    typer.echo(
        f"Removed {done.removed_objects} objects ({done.removed_bytes} bytes) in epoch {done.epoch}; "
        f"{done.held_bytes} bytes wait for their readers."
    )


@app.command()
def ttl(
    name: Annotated[
        str, typer.Argument(help="read_lease_ttl_seconds, write_ttl_seconds or session_ttl_seconds.")
    ],
    value_seconds: Annotated[
        float | None, typer.Argument(help="The new value; without it the change is taken back.")
    ] = None,
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    namespace: Annotated[str, typer.Option(help="Only for this namespace.")] = "",
    run_dir: _RUN_DIR = None,
) -> None:
    """Change a TTL at run time, or take the change back: it holds for new leases and the next renewal of old ones."""
    args = {"name": name, "value_seconds": value_seconds, "namespace": namespace, **requester()}
    done = ask(host, port, run_dir, "set_ttl", args, SetTtlResult)
    typer.echo(f"{name}: {done.before_seconds:g} s before, {done.after_seconds:g} s now.")


@app.command()
def policy(
    name: Annotated[
        str | None,
        typer.Argument(help="The policy to use from now on; without it the policies are compared."),
    ] = None,
    configured: Annotated[  # noqa: FBT002
        bool, typer.Option("--configured", help="Back to the policy that was configured.")
    ] = False,
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,  # noqa: FBT002
    run_dir: _RUN_DIR = None,
) -> None:
    """Show what each eviction policy would have hit on the live traffic, or use another one from now on."""
    from appliance.policy_command import compared

    if name is None and not configured:
        status = ask(host, port, run_dir, "status", {}, DaemonStatus)
        typer.echo(status.retention.model_dump_json(indent=2) if json else compared(status))
        return
    args = {"policy": None if configured else name, **requester()}
    done = ask(host, port, run_dir, "set_policy", args, SetPolicyResult)
    typer.echo(done.model_dump_json(indent=2) if json else f"{done.before} before, {done.after} now.")


@app.command()
def check(
    host: _HOST = "127.0.0.1",
    port: _PORT = DEFAULT_PORT,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,  # noqa: FBT002
    run_dir: _RUN_DIR = None,
) -> None:
    """Compare arena, index, holds and catalog of the running daemon. Exit status 0 only if all adds up."""
    with admin_client(host, port, run_dir) as client:
        try:
            result = run_check(client)
        except PagewardenError as error:
            typer.echo(f"pagewarden: {error.code}: {error}", err=True)
            raise typer.Exit(1) from None
    typer.echo(result.model_dump_json(indent=2) if json else check_text(result))
    raise typer.Exit(0 if result.clean else 1)


app.command()(plan)
app.command()(doctor)


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


app.add_typer(accounts_cli.user, name="user")
app.add_typer(accounts_cli.token, name="token")


def add_commands_of_packages() -> None:
    """Take in commands of packages that stand on this one: entry points of ``pagewarden.commands`` and ``pagewarden.bench``.

    Loading one must be cheap, since every command pays for it: what it runs is imported when it runs.
    """
    for group, parent in (("pagewarden.commands", app), ("pagewarden.bench", bench)):
        for point in entry_points(group=group):
            try:
                command = point.load()
            except ImportError:  # its package is not whole here; the daemon needs none of them
                continue
            parent.command(name=point.name)(command)


add_commands_of_packages()


def main() -> None:
    """The entry point of the command."""
    app()


if __name__ == "__main__":
    main()
