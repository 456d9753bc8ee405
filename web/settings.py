"""What the web process needs to know to start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from appliance.protocol import DEFAULT_HTTP_PORT, DEFAULT_PORT
from appliance.protocol.client import endpoint_of
from appliance.run_dir import default_run_dir, secret_path


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Where the daemon is, where to listen, and how often to look.

    ``catalog`` is the daemon's SQLite file; without it nobody can log in. ``run_dir`` holds the secret that lets this
    process ask the daemon for changes. ``http_names`` are the host names, separated by commas, that requests may carry
    besides addresses and ``localhost``. With ``read_only`` nothing can be changed. ``log_format`` is ``text`` or ``json``. With ``parent_pid`` the process stops by itself once that process is no longer its parent.
    """

    daemon_host: str = "127.0.0.1"
    daemon_port: int = DEFAULT_PORT
    http_host: str = "127.0.0.1"
    http_port: int = DEFAULT_HTTP_PORT
    catalog: str | os.PathLike[str] | None = None
    run_dir: str | os.PathLike[str] | None = None
    http_names: str = ""
    read_only: bool = False
    poll_seconds: float = 1.0
    log_format: str = "text"
    parent_pid: int | None = None

    @property
    def endpoint(self) -> str:
        """The daemon's ZeroMQ endpoint."""
        return endpoint_of(self.daemon_host, self.daemon_port)

    @property
    def catalog_path(self) -> Path | None:
        """``catalog`` as a path."""
        return Path(self.catalog) if self.catalog else None

    @property
    def secret_path(self) -> Path:
        """The file of the daemon's admin secret."""
        return secret_path(Path(self.run_dir) if self.run_dir else default_run_dir(), self.daemon_port)

    @property
    def host_names(self) -> frozenset[str]:
        """Names that a Host header may carry, in lower case."""
        names = {each.strip().lower() for each in self.http_names.split(",")} | {"localhost"}
        return frozenset((names | {self.http_host.lower()}) - {""})

    @property
    def cookie_name(self) -> str:
        """The login's cookie; browsers share cookies between the ports of a host, so it carries the port."""
        return f"pagewarden_login_{self.http_port}"

    @property
    def http_netloc(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.http_host}]" if ":" in self.http_host else self.http_host
        return f"{host}:{self.http_port}"
