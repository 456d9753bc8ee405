"""Changes: asked of the daemon over its control socket, in the name of whoever is logged in.

One thread has the one client, so that requests reach the daemon in order and no page waits for another's socket.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from appliance.errors import DaemonUnreachable, NotAuthenticated, PagewardenError
from appliance.protocol.base import Message, parse
from appliance.protocol.client import RequestClient
from appliance.run_dir import read_secret
from web.identity import Requester

TIMEOUT_SECONDS = 8.0
"""A durable change may wait 5 s for the catalog before the daemon refuses it."""

_R = TypeVar("_R", bound=BaseModel)


class AdminClient:
    """The daemon's admin client. Thread-safe; every wait is bounded."""

    def __init__(self, endpoint: str, secret_path: Path) -> None:
        self._endpoint = endpoint
        self._secret_path = secret_path
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="admin-client")
        self._client: RequestClient | None = None

    async def ask(self, op: str, model: type[Message], result: type[_R], by: Requester, **values: Any) -> _R:
        """One change, checked against its schema before it is sent.

        Raises:
            InvalidField: if a value cannot be sent.
            PagewardenError: what the daemon answered; DaemonUnreachable if it did not.
        """
        args = parse(model, {**values, "requested_by": by.actor, "requested_from": by.address})
        return await self._call(op, args, result)

    async def note(self, op: str, args: Message, result: type[_R]) -> _R:
        """One request that needs nobody's name."""
        return await self._call(op, args, result)

    def close(self) -> None:
        """Let go of the thread and the socket; waits for the request under way, at most its timeout."""
        self._executor.submit(self._drop)
        self._executor.shutdown(wait=True)

    async def _call(self, op: str, args: Message, result: type[_R]) -> _R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._exchange, op, args, result)

    def _exchange(self, op: str, args: Message, result: type[_R]) -> _R:
        if self._client is None:
            self._client = RequestClient(
                self._endpoint,
                client_name="pagewarden-web-admin",
                timeout_seconds=TIMEOUT_SECONDS,
                admin_secret=lambda: read_secret(self._secret_path),
            )
        try:
            return self._client.call(op, args, result)
        except NotAuthenticated as error:
            # Whoever is logged in is not to blame: a daemon that is away has taken its secret along.
            raise DaemonUnreachable(
                f"The daemon at {self._endpoint} cannot be asked for a change. {error.message}",
                remedy="Check that `pagewarden server` runs, as the same user and with the same --run-dir.",
            ) from error
        except PagewardenError:
            raise
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
