"""What the web process needs to know to start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from appliance.protocol import DEFAULT_HTTP_PORT, DEFAULT_PORT
from appliance.protocol.client import endpoint_of


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Where the daemon is, where to listen, and how often to look.

    ``catalog`` is the daemon's SQLite file, ``None`` where its history is not to be shown. ``log_format`` is ``text``
    or ``json``. With ``parent_pid`` the process stops by itself once that process is no longer its parent.
    """

    daemon_host: str = "127.0.0.1"
    daemon_port: int = DEFAULT_PORT
    http_host: str = "127.0.0.1"
    http_port: int = DEFAULT_HTTP_PORT
    catalog: str | os.PathLike[str] | None = None
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
    def http_netloc(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.http_host}]" if ":" in self.http_host else self.http_host
        return f"{host}:{self.http_port}"
