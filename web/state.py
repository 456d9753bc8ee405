"""What the routes share: one poller, one probe, one history reader, and the templates."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

from fastapi import Request
from jinja2 import Environment

from appliance import __version__
from web.admin import AdminClient
from web.attempts import Attempts
from web.history import HistoryReader
from web.identity import Identities
from web.poller import StatusPoller
from web.probe import LoopProbe
from web.settings import WebSettings
from web.templating import environment

_NETLOC = re.compile(r"[A-Za-z0-9.\-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class WebState:
    """The parts of one running application.

    ``hashing`` bounds how many passwords are hashed at a time: each takes 64 MiB.
    """

    settings: WebSettings
    poller: StatusPoller
    probe: LoopProbe
    history: HistoryReader
    identities: Identities
    admin: AdminClient
    attempts: Attempts
    hashing: asyncio.Semaphore
    templates: Environment
    started_unix: float
    version: str

    @classmethod
    def of_settings(cls, settings: WebSettings) -> WebState:
        """The parts, not yet started."""
        return cls(
            settings=settings,
            poller=StatusPoller(settings.endpoint, poll_seconds=settings.poll_seconds),
            probe=LoopProbe(settings.endpoint),
            history=HistoryReader(settings.catalog_path),
            identities=Identities(settings.catalog_path, settings.cookie_name),
            admin=AdminClient(settings.endpoint, settings.secret_path),
            attempts=Attempts(),
            hashing=asyncio.Semaphore(2),
            templates=environment(),
            started_unix=time.time(),
            version=__version__,
        )

    def start(self) -> None:
        """Start the background threads."""
        self.poller.start()
        self.history.start()

    def stop(self) -> None:
        """Stop the background threads; bounded."""
        self.history.stop()
        self.poller.stop()
        self.probe.close()
        self.admin.close()


def state_of(request: Request) -> WebState:
    """The parts of the application that serves ``request``."""
    state = request.app.state.web
    assert isinstance(state, WebState), "a route would run without the parts it needs"
    return state


def base_url(request: Request) -> str:
    """The address under which the client reached this process, for the commands shown to it.

    It comes from the client's own Host header; one that is no host and port is replaced by the configured address,
    since it would be pasted into a shell.
    """
    netloc = request.url.netloc
    if not _NETLOC.fullmatch(netloc):
        netloc = state_of(request).settings.http_netloc
    return f"{request.url.scheme}://{netloc}"
