"""A daemon that is absent, stops answering or comes back: the pages go on, and say so."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tests.integration._peer import Peer, empty_status, full_status, serving, wait_for
from tests.integration._web import running_web, settings_for
from tests.support.access import Access


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_no_daemon_at_all() -> None:
    with running_web(settings_for(unused_port())) as web:
        first = web.client.get("/")
        assert first.status_code == 200, "the page waited for a daemon or failed without one"
        web.wait_for_failure()
        html = web.client.get("/").text
        status = web.client.get("/api/v1/status")
        health = web.client.get("/healthz")
        ready = web.client.get("/readyz")
        metrics = web.client.get("/metrics").text
    assert "No daemon has answered at" in html
    assert "pagewarden server" in html
    assert (status.status_code, status.json()["code"]) == (503, "daemon_unreachable")
    assert status.json()["retryable"] is True
    assert (health.status_code, health.json()["code"]) == (503, "daemon_unreachable")
    assert ready.status_code == 503
    assert "pagewarden_up 0.0" in metrics


def test_pages_answer_while_the_health_check_waits_for_a_stuck_daemon() -> None:
    with serving(full_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        peer.silent = True
        with ThreadPoolExecutor(20) as pool:
            checks = [pool.submit(web.client.get, "/healthz") for _ in range(20)]
            wait_for(lambda: peer.requests[-1] == "ping" or "ping" in peer.requests, "a ping")
            page = web.client.get("/")
            unfinished = [check for check in checks if not check.done()]
            assert page.status_code == 200
            assert unfinished, "the page waited for the health checks"
            done, late = wait(checks, timeout=30)
        assert not late, "a health check of a stuck daemon waits without bound"
        assert {check.result().status_code for check in done} == {503}
        assert "did not answer within" in checks[0].result().json()["reason"]
        assert peer.requests.count("ping") < 20, "each of a flood of health checks cost the daemon a ping"


def test_last_known_state_stays_with_its_age_and_the_daemon_may_return() -> None:
    with serving(full_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        peer.silent = True
        web.wait_for_failure()
        html = web.client.get("/").text
        status = web.client.get("/api/v1/status")
        ready = web.client.get("/readyz").json()
        metrics = web.client.get("/metrics").text
        assert "The data path does not answer since" in html
        assert "last known state" in html
        assert "vllm-a-3f9c1e" in html
        assert status.status_code == 200
        assert status.json()["web"]["daemon_reachable"] is False
        assert status.json()["web"]["unreachable_seconds"] > 0
        assert status.json()["web"]["last_error_code"] == "daemon_unreachable"
        assert [gate["name"] for gate in ready["gates"]] == ["daemon", "arena", "catalog"]
        assert (ready["ready"], ready["gates"][0]["open"]) == (False, False)
        assert "pagewarden_up 0.0" in metrics
        assert "pagewarden_l1_bytes" not in metrics, "stale values look like a daemon that stands still"

        peer.silent = False
        web.wait_for_status()
        assert "The data path does not answer" not in web.client.get("/").text
        again = web.client.get("/api/v1/status").json()["web"]
        assert again["daemon_reachable"] is True
        assert again["poll_errors"] >= 1


def test_a_daemon_that_restarts_on_its_port_is_found_again() -> None:
    first = Peer(empty_status(boot="aa" * 16))
    with running_web(settings_for(first.port)) as web:
        web.wait_for_status()
        first.close()
        web.wait_for_failure()
        second = Peer(empty_status(boot="bb" * 16), port=first.port)
        try:
            wait_for(
                lambda: web.client.get("/api/v1/status").json()["boot"] == "bb" * 16,
                "the second boot's status",
            )
        finally:
            second.close()


def test_nobody_looking_means_fewer_polls() -> None:
    with serving(empty_status()) as peer, running_web(settings_for(peer.port)) as web:
        web.wait_for_status()
        poller = web.state.poller
        with poller._lock:
            poller._asked_at -= 3600
        before = peer.requests.count("status")
        reached = threading.Event()
        reached.wait(0.4)
        idle = peer.requests.count("status") - before
        answer = web.client.get("/api/v1/status").json()
        wait_for(lambda: peer.requests.count("status") > before + idle + 3, "the full rate after a look")
    assert idle <= 2, "an unwatched page polls the daemon at full rate"
    assert answer["web"]["data_age_seconds"] >= 0


def test_health_does_not_touch_the_catalog(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.db"
    headers = Access.made_in(catalog).headers("viewer")
    with serving(empty_status()) as peer, running_web(settings_for(peer.port, catalog=catalog)) as web:
        web.wait_for_status()
        assert web.client.get("/", headers=headers).status_code == 200
        for path in tmp_path.iterdir():
            path.unlink()
        catalog.write_bytes(b"this is no database")
        assert web.client.get("/healthz").status_code == 200

        def failed() -> bool:
            return "cannot be read" in web.state.history.history().unavailable

        wait_for(failed, "a failed read of the catalog")
        html = web.client.get("/", headers=headers).text
        assert web.client.get("/healthz").status_code == 200
    assert "The history on disk is not shown: The catalog cannot be read." in html
