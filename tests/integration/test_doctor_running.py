"""Every finding about a running daemon, its engines and their side, with real daemons, engines and sockets."""

from __future__ import annotations

import http.server
import socket
import socketserver
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.doctor.asking import running_status
from appliance.doctor.findings import Code, Report, Severity
from appliance.doctor.run import examine
from appliance.doctor.subject import Subject
from appliance.protocol.arena_layout import SegmentLayout
from tests.integration._doctor import absent, beside, found, place, provoked, subject
from tests.integration._peer import degraded_status, full_status, populating_status, serving
from tests.support.daemon import DaemonProcess
from tests.support.engine import HYBRID, Engine
from tests.support.waiting import eventually

__all__ = ["place", "subject"]  # fixtures

Make = Callable[..., DaemonProcess]


def engine(daemon: DaemonProcess, **options: Any) -> Engine:
    """An engine of a test's own; the caller stops it."""
    return Engine(daemon.port, "doctors-engine", HYBRID, **options)


def test_nothing_is_wrong_beside_a_daemon_that_serves(make_daemon: Make):
    daemon = make_daemon()
    running = engine(daemon).start()
    try:
        report = examine(beside(daemon))
        assert report.running
        assert {finding.severity for finding in report.findings if finding.area in ("daemon", "engines")} == {
            Severity.OK
        }
        absent(beside(daemon), Code.PORT_TAKEN, Code.ARENA_IN_USE, Code.ARENA_LEFT_OVER)
    finally:
        running.stop()


# --- the daemon ----------------------------------------------------------------------------------------------------------


@contextmanager
def asked(status: dict[str, Any], subject: Subject) -> Iterator[Subject]:
    """The subject of a peer that answers with a status document, on a real socket."""
    with serving(status) as peer:
        answer = running_status("127.0.0.1", peer.port)
        assert answer is not None
        yield replace(subject, port=peer.port, running=answer)


def test_gates_that_are_closed(subject: Subject):
    with asked(populating_status(), subject) as populating:
        provoked(populating, Code.DAEMON_NOT_READY, Severity.NOTE, "gate")
        draining = populating.running.model_copy(update={"phase": "draining"})  # type: ignore[union-attr]
        provoked(replace(populating, running=draining), Code.DAEMON_NOT_READY, Severity.WARNING)


def test_a_daemon_of_another_version(subject: Subject):
    with asked(full_status(version="0.0.7"), subject) as other:
        provoked(other, Code.DAEMON_VERSION, Severity.WARNING, "0.0.7")


def test_loops_that_survived_errors_or_hang(subject: Subject):
    with asked(degraded_status(), subject) as degraded:
        report = examine(degraded)
    told = [finding.message for finding in report.findings if finding.code is Code.LOOP_TROUBLE]
    assert any("evictor" in message for message in told)
    assert any("scrubber" in message for message in told)
    assert not any("router" in message for message in told)


def test_a_clock_that_jumped(make_daemon: Make):
    well = beside(make_daemon())
    absent(well, Code.CLOCK_JUMPED)
    assert well.running is not None
    moved = well.running.model_copy(update={"started_unix": well.running.started_unix - 3600})
    provoked(replace(well, running=moved), Code.CLOCK_JUMPED, Severity.WARNING, "+3600 s")


def test_a_catalog_that_somebody_locks(make_daemon: Make):
    daemon = make_daemon()
    holder = sqlite3.connect(daemon.settings["catalog"], isolation_level=None, timeout=10)
    holder.execute("BEGIN EXCLUSIVE")
    running = engine(daemon).start()  # which is history to write
    try:
        eventually(lambda: daemon.status().catalog.state != "ok", "the lock shows in the catalog's health")
        finding = found(examine(beside(daemon)), Code.CATALOG_STATE)
        assert finding.severity in (Severity.WARNING, Severity.PROBLEM)
        assert "rows wait" in finding.evidence
    finally:
        running.stop()
        holder.execute("ROLLBACK")
        holder.close()


def test_leases_that_nobody_renewed(make_daemon: Make):
    daemon = make_daemon(l1_read_ttl_seconds=0.3, heartbeat_seconds=2)
    running = engine(daemon).start()
    try:
        tokens = list(range(64))
        running.save(tokens, 1)
        assert running.lookup("r", [*tokens, 64]).hit_chunks
        eventually(lambda: daemon.status().lease_end_causes.get("expired"), "the lease expires")
        provoked(beside(daemon), Code.LEASES_EXPIRED, Severity.WARNING, "1 expired", "pagewarden ttl")
    finally:
        running.stop()


def test_loads_that_failed(make_daemon: Make):
    daemon = make_daemon()
    running = engine(daemon).start()
    try:
        tokens = list(range(64))
        running.save(tokens, 1)
        [segment] = daemon.arena_dir.glob("segment-*.arena")
        l1 = daemon.status().l1
        data = SegmentLayout(l1.capacity_bytes // l1.extent_bytes, l1.extent_bytes).data_offset
        with segment.open("r+b") as file:
            file.seek(data)
            file.write(b"\xa5" * l1.occupied_bytes)
        running.load("r", tokens, running.lookup("r", [*tokens, 64]))
        eventually(lambda: daemon.status().engines[0].load_failures, "the failure is counted")
        provoked(beside(daemon), Code.LOADS_FAILED, Severity.WARNING, "doctors-engine: 1")
    finally:
        running.stop()


# --- engines --------------------------------------------------------------------------------------------------------------


def test_an_engine_whose_ranks_are_missing(make_daemon: Make):
    daemon = make_daemon()
    running = engine(daemon)
    running.scheduler.start()
    try:
        eventually(lambda: daemon.status().engines, "the scheduler registers")
        provoked(beside(daemon), Code.ENGINE_WAITING, Severity.WARNING, "registering", "ranks [0]")
    finally:
        running.stop()


def test_an_engine_that_is_refused(make_daemon: Make):
    daemon = make_daemon()
    running = engine(daemon, require_namespace="0" * 32).start(settled=False)
    try:
        eventually(lambda: [e for e in daemon.status().engines if e.state == "refused"], "the refusal")
        provoked(beside(daemon), Code.ENGINE_REFUSED, Severity.PROBLEM, "0" * 32)
    finally:
        running.stop()


def test_an_engine_that_is_not_as_planned(make_daemon: Make):
    daemon = make_daemon(planned_block_size="tests/tiny=944")
    running = engine(daemon).start()
    try:
        provoked(beside(daemon), Code.ENGINE_DEVIATES, Severity.WARNING, "944", "16")
    finally:
        running.stop()


def test_an_engine_that_sends_its_pages_though_it_is_here(make_daemon: Make):
    daemon = make_daemon()
    running = engine(daemon, rank_options={"transport": "inline"}).start()
    try:
        provoked(beside(daemon), Code.ENGINE_INLINE, Severity.WARNING, "doctor --engine")
    finally:
        running.stop()


# --- from an engine's side --------------------------------------------------------------------------------------------------


def engine_side(daemon: DaemonProcess, **changes: Any) -> Subject:
    return beside(daemon, engine_side=True, **changes)


def test_an_engine_could_work_here(make_daemon: Make):
    daemon = make_daemon()
    report = examine(engine_side(daemon))
    assert {finding.severity for finding in report.findings if finding.area == "engine side"} == {Severity.OK}
    assert report.engine_side
    eventually(lambda: not daemon.status().engines, "the doctor has said goodbye")
    assert not list(daemon.arena_dir.glob("attach-*"))


def test_no_daemon(subject: Subject):
    nobody = replace(subject, engine_side=True)
    provoked(nobody, Code.DAEMON_UNREACHABLE, Severity.PROBLEM, "pagewarden.port")


def test_an_arena_that_is_not_mounted_here(make_daemon: Make, tmp_path: Path):
    daemon = make_daemon()
    finding = provoked(
        engine_side(daemon, arena_here=tmp_path / "missing"), Code.ARENA_UNREACHABLE, Severity.WARNING
    )
    assert "No such file" in finding.evidence
    linked = tmp_path / "linked"  # the daemon's directory, but for its segments
    linked.mkdir()
    provoked(engine_side(daemon, arena_here=linked), Code.LOCK_NOT_SEEN, Severity.WARNING, str(linked))


def test_a_segment_that_is_another_one(make_daemon: Make):
    daemon = make_daemon()
    [segment] = daemon.arena_dir.glob("segment-*.arena")
    kept = segment.rename(segment.with_suffix(".kept"))
    try:
        side = engine_side(daemon)
        assert "cannot be read here" in provoked(side, Code.ARENA_UNREACHABLE, Severity.WARNING).evidence
        segment.write_bytes(bytes(8192))
        assert "is not the segment" in provoked(side, Code.ARENA_UNREACHABLE, Severity.WARNING).evidence
    finally:
        kept.rename(segment)


class Relay(socketserver.ThreadingTCPServer):
    """Passes on one port of 127.0.0.1 at another address, as a firewall that knows only that port."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.2", port), _Passing)


class _Passing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.server_address[1])) as inner:
            other = threading.Thread(target=_pump, args=(inner, self.request), daemon=True)
            other.start()
            _pump(self.request, inner)
            other.join(10)


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def test_a_bulk_port_behind_a_firewall(make_daemon: Make):
    daemon = make_daemon()
    with Relay(daemon.port) as relay:
        thread = threading.Thread(target=relay.serve_forever, daemon=True)
        thread.start()
        through = engine_side(daemon, host="127.0.0.2")
        finding = provoked(through, Code.BULK_UNREACHABLE, Severity.WARNING, "--bulk-port")
        assert "refused" in finding.evidence
        relay.shutdown()
        thread.join(10)


def test_an_environment_without_numba(make_daemon: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    provoked(engine_side(make_daemon()), Code.NO_NUMBA, Severity.NOTE, "pagewarden[connector]")


# --- a running vLLM -----------------------------------------------------------------------------------------------------------


@contextmanager
def vllm(*, connector: bool = True, **changes: str) -> Iterator[str]:
    """An API server's metrics as vLLM writes them: the cache's configuration as labels, the connector's counters."""
    labels = {
        "block_size": "16",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "mamba_block_size": "None",
        "mamba_cache_mode": "none",
        "engine": "0",
        **changes,
    }
    registry = CollectorRegistry()
    Gauge("vllm:cache_config_info", "The cache's configuration", list(labels), registry=registry).labels(
        **labels
    ).set(1)
    if connector:
        Counter("vllm:pagewarden_loads", "Loads", ["engine"], registry=registry).labels("0").inc()

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(generate_latest(registry) if self.path == "/metrics" else b"# EOF\n")

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def test_a_vllm_as_it_should_be(subject: Subject):
    with vllm() as url:
        report = examine(replace(subject, vllm_url=url))
    assert [finding.code for finding in report.findings if finding.area == "vllm"] == [Code.OK]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:1", "refused"),
        ("file:///etc/passwd", "no http address"),
        ("{url}/other", "no metric"),
    ],
)
def test_no_vllm(subject: Subject, url: str, told: str):
    with vllm() as real:
        gone = replace(subject, vllm_url=url.format(url=real))
        provoked(gone, Code.VLLM_UNREACHABLE, Severity.PROBLEM, told)


def test_a_vllm_without_prefix_caching_or_connector(subject: Subject):
    with vllm(enable_prefix_caching="False", connector=False) as url:
        asked_for = replace(subject, vllm_url=url)
        provoked(asked_for, Code.VLLM_NO_PREFIX_CACHING, Severity.PROBLEM, "enable_prefix_caching=False")
        provoked(asked_for, Code.VLLM_NO_CONNECTOR, Severity.PROBLEM, "--kv-transfer-config")


def test_a_vllm_beside_the_daemon(make_daemon: Make):
    daemon = make_daemon()
    running = engine(daemon).start()
    try:
        with vllm(block_size="16", mamba_cache_mode="none") as url:
            provoked(beside(daemon, vllm_url=url), Code.VLLM_MAMBA_MODE, Severity.PROBLEM, "=none")
        with vllm(block_size="16", mamba_cache_mode="align") as url:
            absent(beside(daemon, vllm_url=url), Code.VLLM_MAMBA_MODE, Code.VLLM_BLOCK_SIZE)
        with vllm(block_size="944", mamba_cache_mode="align") as url:
            provoked(beside(daemon, vllm_url=url), Code.VLLM_BLOCK_SIZE, Severity.WARNING, "944", "[16]")
    finally:
        running.stop()


# --- the command ------------------------------------------------------------------------------------------------------------------


def command(*flags: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *flags])


def test_the_command_finds_the_daemon_and_its_settings(make_daemon: Make):
    daemon = make_daemon()
    done = command(f"--port={daemon.port}", "--json")
    report = Report.model_validate_json(done.stdout)
    assert done.exit_code == 0
    assert report.running
    assert any(str(daemon.arena_dir) in finding.message for finding in report.findings)
    text = command(f"--port={daemon.port}").stdout
    assert f"beside the daemon that answers at 127.0.0.1:{daemon.port}" in text
    assert text.strip().splitlines()[-1].endswith(" ok")


def test_exit_statuses(subject: Subject, tmp_path: Path):
    flags = [f"--port={subject.port}", f"--http-port={subject.http_port}", f"--catalog={subject.catalog}"]
    fits = [*flags, f"--arena-dir={subject.arena_dir}", "--l1-size-gb=0.01"]
    warned = [*fits, "--host=0.0.0.0", "--insecure"]
    assert command(*fits).exit_code == 0
    assert command(*warned).exit_code == 0
    assert command(*warned, "--strict").exit_code == 1
    assert command(*fits, "--host=0.0.0.0").exit_code == 1
    assert command(*fits, "--engine").exit_code == 1
    assert command("--extent-kib=3").exit_code == 2
    broken = tmp_path / "settings.toml"
    broken.write_text("l1_size = 1\n")
    assert command(f"--config={broken}").exit_code == 2
