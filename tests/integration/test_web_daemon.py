"""The web process as the child of a real daemon, with real engines at work."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.daemon import ADMIN_PASSWORD, DaemonProcess, free_port
from tests.support.engine import Engine, facts
from tests.support.waiting import eventually


@dataclass(frozen=True)
class Served:
    """A daemon, and a client of its dashboard."""

    daemon: DaemonProcess
    web: httpx.Client

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            return self.web.get("/api/v1/status").status_code == 200
        return False

    def status(self) -> Any:
        return self.web.get("/api/v1/status").json()


@pytest.fixture
def served(make_daemon: Callable[..., DaemonProcess]) -> Iterator[Served]:
    port = free_port()
    daemon = make_daemon(no_web=False, http_port=port, l1_size_gb=1 / 1024)
    headers = daemon.web_headers()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20.0, headers=headers) as web:
        found = Served(daemon, web)
        eventually(found.answers, "an answer of the dashboard", seconds=60)
        yield found


@pytest.fixture
def engines(served: Served) -> Iterator[tuple[Engine, Engine, Engine]]:
    with ExitStack() as stack:
        found = [
            Engine(served.daemon.port, engine_id=name, facts=facts(**changes))
            for name, changes in (("writer", {}), ("reader", {}), ("stranger", {"cache": {"dtype": "fp8"}}))
        ]
        for engine in found:
            stack.callback(engine.stop)
            engine.start()
        yield found[0], found[1], found[2]


def prompt(engine: Engine, number: int) -> list[int]:
    return [number * 1000 + token for token in range(engine.chunk_tokens * 4 + 1)]


def test_page_and_metrics_show_what_engines_did(
    served: Served, engines: tuple[Engine, Engine, Engine]
) -> None:
    writer, reader, stranger = engines
    for number in range(80):
        tokens = prompt(writer, number)
        writer.lookup(f"w-{number}", tokens)
        writer.save(tokens, number)
    found = reader.lookup("r", tokens)
    assert found.lease, "the reader hits what the writer stored"
    reader.load("r", tokens, found)
    reader.scheduler.release(found.lease)
    stranger.lookup("s", tokens)

    def told() -> bool:
        now = served.status()
        return (
            now["lease_end_causes"].get("released") == 1
            and sum(now["evictions"].values()) > 0
            and now["miss_reasons"].get("refused_fingerprint") == 1
        )

    eventually(told, "the status of what the engines did")
    html = served.web.get("/").text
    for text in (
        "writer",
        "reader",
        "stranger",
        "cache.dtype",
        "fp8",
        "Never stored",
        "Refused by fingerprint",
    ):
        assert text in html, f"the page lacks {text!r}"
    assert "serves 3 engines" in html
    eventually(
        lambda: "The latest, from the catalog" in served.web.get("/").text, "evictions from the catalog"
    )

    metrics = served.web.get("/metrics").text
    namespace = served.status()["engines"][0]["namespace"][:12]
    assert (
        f'pagewarden_group_objects{{group="0",kind="attention",name="mla",namespace="{namespace}"}}'
        in metrics
    )
    assert 'pagewarden_misses_total{reason="refused_fingerprint"} 1.0' in metrics


def test_a_stopped_daemon_is_unhealthy_and_its_page_stays(served: Served) -> None:
    assert served.web.get("/healthz").json()["healthy"] is True
    assert served.web.get("/readyz").status_code == 200
    served.daemon.signal(signal.SIGSTOP)
    try:
        assert served.web.get("/healthz").status_code == 503
        eventually(lambda: served.web.get("/readyz").status_code == 503, "readiness is withdrawn")
        assert "The data path does not answer since" in served.web.get("/").text
    finally:
        served.daemon.signal(signal.SIGCONT)
    eventually(lambda: served.web.get("/healthz").status_code == 200, "the daemon's return")
    eventually(lambda: served.web.get("/readyz").status_code == 200, "readiness returns")


def test_a_catalog_that_is_locked_delays_no_page(served: Served) -> None:
    eventually(lambda: "Starts of the daemon" in served.web.get("/").text, "the history")
    lock = sqlite3.connect(served.daemon.directory / "catalog.db", isolation_level=None)
    try:
        lock.execute("BEGIN EXCLUSIVE")
        assert served.web.get("/healthz").status_code == 200
        assert served.web.get("/").status_code == 200
    finally:
        lock.close()


def test_the_dashboard_ends_with_a_daemon_that_was_killed(served: Served) -> None:
    served.daemon.kill()
    eventually(lambda: not served.answers(), "the end of the dashboard", seconds=30)


def test_headers_of_proxies_are_not_believed(served: Served) -> None:
    """Anybody on this host could send them: the audit has the address of the connection."""
    forged = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https", "Forwarded": "for=203.0.113.9"}
    credentials = {"user": "admin", "password": ADMIN_PASSWORD}
    answer = served.web.post("/api/v1/login", json=credentials, headers=forged)
    assert answer.status_code == 200
    assert answer.json()["origin"] == "127.0.0.1"
    assert "Secure" not in answer.headers["set-cookie"]
    page = served.web.get("/api/v1/audit", params={"action": "login.open"}).json()
    assert [entry["origin"] for entry in page["entries"]] == ["127.0.0.1"]
