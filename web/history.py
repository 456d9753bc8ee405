"""The catalog's recent history for the page, read in a background thread: a locked or slow file delays nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from appliance.catalog.queries import CatalogReader, EvictionRecord, RestartRecord
from appliance.errors import PagewardenError

REFRESH_SECONDS = 5.0
ACTIVE_SECONDS = 15.0
EVICTIONS_SHOWN = 10
RESTARTS_SHOWN = 50

_log = structlog.stdlib.get_logger("web.history")


@dataclass(frozen=True, slots=True)
class History:
    """What the catalog remembers. ``unavailable`` says in a sentence why it, or its newest part, is missing."""

    evictions: tuple[EvictionRecord, ...] = ()
    restarts: tuple[RestartRecord, ...] = ()
    unavailable: str = ""
    reads: int = 0
    errors: int = 0


class HistoryReader:
    """Owns one thread that reads the catalog while somebody looks. Thread-safe."""

    def __init__(
        self,
        path: Path | None,
        *,
        refresh_seconds: float = REFRESH_SECONDS,
        open_catalog: Callable[[Path], CatalogReader] = CatalogReader,
    ) -> None:
        self._path = path
        self._refresh_seconds = refresh_seconds
        self._open_catalog = open_catalog
        self._lock = threading.Lock()
        self._kept = History(
            unavailable="No catalog was named to this page's process."
            if path is None
            else "The catalog is being read."
        )
        self._asked_at = time.monotonic()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history-reader", daemon=True)

    def start(self) -> None:
        """Start reading, where there is a catalog to read."""
        if self._path is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop reading; a read that hangs is left behind with its daemon thread."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def history(self) -> History:
        """What was read last; never waits."""
        now = time.monotonic()
        with self._lock:
            was_idle = now - self._asked_at > ACTIVE_SECONDS
            self._asked_at = now
            kept = self._kept
        if was_idle:
            self._wake.set()
        return kept

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                wanted = time.monotonic() - self._asked_at <= ACTIVE_SECONDS
            if wanted:
                self._read()
            self._wake.wait(self._refresh_seconds)
            self._wake.clear()

    def _read(self) -> None:
        assert self._path is not None, "the thread would read a catalog that nobody named"
        try:
            reader = self._open_catalog(self._path)
            evictions = tuple(reader.evictions(limit=EVICTIONS_SHOWN))
            restarts = tuple(reader.restarts(limit=RESTARTS_SHOWN))
        except PagewardenError as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever the file does to it
            self._failed(f"The catalog cannot be read ({type(error).__name__}: {error}).")
        else:
            with self._lock:
                self._kept = replace(
                    self._kept,
                    evictions=evictions,
                    restarts=restarts,
                    unavailable="",
                    reads=self._kept.reads + 1,
                )

    def _failed(self, sentence: str) -> None:
        with self._lock:
            first = self._kept.unavailable != sentence
            self._kept = replace(self._kept, unavailable=sentence, errors=self._kept.errors + 1)
        if first:
            _log.warning("the history cannot be read", reason=sentence)
