"""How the commands ask the daemon: as an admin with its secret, in the name of the user of this shell."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from appliance import __version__
from appliance.errors import PagewardenError
from appliance.protocol.base import Message
from appliance.protocol.client import RequestClient, endpoint_of
from appliance.run_dir import default_run_dir, read_secret, secret_path

_R = TypeVar("_R", bound=BaseModel)

HOST = Annotated[str, typer.Option(help="Address of the daemon.", envvar="PAGEWARDEN_HOST")]
PORT = Annotated[int, typer.Option(help="Port of the daemon.", envvar="PAGEWARDEN_PORT")]
RUN_DIR = Annotated[
    Path | None, typer.Option(help="Directory of the admin secret.", envvar="PAGEWARDEN_RUN_DIR")
]


def admin_client(host: str, port: int, run_dir: Path | None) -> RequestClient:
    """A client that shows the secret of the daemon on ``port``, read when it is first needed."""
    path = secret_path(run_dir or default_run_dir(), port)
    return RequestClient(
        endpoint_of(host, port),
        client_name=f"pagewarden-cli/{__version__}",
        timeout_seconds=8.0,  # a durable change may wait 5 s for the catalog
        admin_secret=lambda: read_secret(path),
    )


def ask(
    host: str, port: int, run_dir: Path | None, op: str, args: Message | dict[str, Any], result: type[_R]
) -> _R:
    """One request; what the daemon refuses is printed, and ends the command with status 1."""
    with admin_client(host, port, run_dir) as client:
        try:
            return client.call(op, args, result)
        except PagewardenError as error:
            typer.echo(f"pagewarden: {error.code}: {error}", err=True)
            raise typer.Exit(1) from None


def requester() -> dict[str, str]:
    """Who runs this command, for the audit."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in a container
        user = "unknown"
    return {"requested_by": f"cli:{user}", "requested_from": socket.gethostname()[:256]}
