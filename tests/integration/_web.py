"""The web application on a real socket, in a thread of the test process."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from tests.integration._peer import wait_for
from tests.support.access import Access
from web.app import create_app
from web.settings import WebSettings
from web.state import WebState


@dataclass(frozen=True)
class RunningWeb:
    """``client`` has the server's address as its base and an admin's token; ``state`` is the live application's."""

    app: FastAPI
    url: str
    client: httpx.Client
    access: Access

    def anonymous(self) -> httpx.Client:
        """A client that nobody knows."""
        return httpx.Client(base_url=self.url, timeout=20.0)

    @property
    def state(self) -> WebState:
        state = self.app.state.web
        assert isinstance(state, WebState)
        return state

    def wait_for_status(self) -> None:
        wait_for(lambda: self.state.poller.snapshot().reachable, "a status from the peer")

    def wait_for_failure(self) -> None:
        wait_for(lambda: self.state.poller.snapshot().failing_seconds is not None, "a failed poll")


def settings_for(daemon_port: int, **changes: object) -> WebSettings:
    return WebSettings(daemon_port=daemon_port, poll_seconds=0.1, **changes)  # type: ignore[arg-type]


@contextmanager
def running_web(settings: WebSettings, *, let_in: bool = False) -> Iterator[RunningWeb]:
    """The application; where no catalog is named it gets one with a user, and a token, of each role.

    ``let_in`` puts them into the catalog that is named.
    """
    with tempfile.TemporaryDirectory(prefix="pagewarden-web-") as directory:
        own = Path(directory) / "catalog.db"
        access = Access.made_in(settings.catalog if let_in and settings.catalog is not None else own)
        known = settings if settings.catalog is not None else replace(settings, catalog=own)
        with _serving(create_app(known)) as (app, url):
            headers = access.headers("admin") if let_in or settings.catalog is None else {}
            with httpx.Client(base_url=url, timeout=20.0, headers=headers) as client:
                yield RunningWeb(app, url, client, access)


@contextmanager
def _serving(app: FastAPI) -> Iterator[tuple[FastAPI, str]]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", proxy_headers=False)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started, "the server's start")
        yield app, url
    finally:
        server.should_exit = True
        thread.join(timeout=15)
        listener.close()
