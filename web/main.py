"""The web process: ``pagewarden web``, or the child of ``pagewarden server``."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog
import uvicorn

from appliance.errors import PortInUse, StartupError
from web.app import create_app
from web.logs import configure_logging
from web.settings import WebSettings

__all__ = ["WebSettings", "run"]

PARENT_CHECK_SECONDS = 0.5
GRACEFUL_SECONDS = 3
IMPATIENT_SECONDS = 1.0

_log = structlog.stdlib.get_logger("web")


def run(settings: WebSettings) -> None:
    """Serve until SIGTERM or SIGINT, or until the parent named in ``settings`` is gone.

    Raises:
        PortInUse, StartupError: where the address cannot be listened on.
    """
    listener = _listen(settings.http_host, settings.http_port)
    configure_logging(settings.log_format)
    try:
        asyncio.run(_serve(settings, listener))
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Another process listens on {host}:{port}.", remedy="Choose another --http-port."
            ) from error
        raise StartupError(
            f"The web process cannot listen on {host}:{port} ({error.strerror}).",
            remedy="Choose another --http-host or --http-port.",
        ) from error
    return listener


async def _serve(settings: WebSettings, listener: socket.socket) -> None:
    server = _Server(
        uvicorn.Config(
            create_app(settings),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # anybody on this host could send them: the audit has the connection's address
            lifespan="on",
            timeout_graceful_shutdown=GRACEFUL_SECONDS,
        )
    )
    watch = (
        None
        if settings.parent_pid is None
        else asyncio.create_task(_stop_with_parent(server, settings.parent_pid))
    )
    host, port = listener.getsockname()[:2]
    _log.info("dashboard listens", host=host, port=port, daemon=settings.endpoint)
    try:
        await server.serve(sockets=[listener])
    finally:
        if watch is not None:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
    _log.info("dashboard stopped")


async def _stop_with_parent(server: uvicorn.Server, parent_pid: int) -> None:
    """Ask the kernel again and again: its own signal follows the parent's thread, not its process."""
    while os.getppid() == parent_pid:  # noqa: ASYNC110 - nothing but asking tells
        await asyncio.sleep(PARENT_CHECK_SECONDS)
    _log.warning("the parent process is gone", parent_pid=parent_pid)
    server.should_exit = True


class _Server(uvicorn.Server):
    """Exits with status 0 when it is asked to stop; uvicorn itself would raise the signal again afterwards."""

    _asked_at = 0.0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal, at once at one that comes later."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        now = time.monotonic()
        if self.should_exit:
            # Ctrl-C reaches the whole group and the daemon then asks too: that is one wish, not an impatient second.
            self.force_exit = now - self._asked_at > IMPATIENT_SECONDS
        else:
            self._asked_at = now
        self.should_exit = True
