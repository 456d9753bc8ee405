"""Clients when the daemon is absent, slow, restarted, unreachable, or when their own process forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from connector.client import LoadJob, SaveJob
from kernels import Backend, Direction, Spans, reference_backend
from tests.support.daemon import DaemonProcess
from tests.support.engine import Engine
from tests.support.waiting import eventually

PROMPT = list(range(5000, 5000 + 32 * 4 + 5))


def test_an_engine_may_start_before_its_daemon(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(start=False)
    engine = Engine(daemon.port).start(settled=False)
    keys = [b"k" * 32]
    pending = engine.scheduler.lookup("early", keys, prompt_tokens=100, local_tokens=0)
    found = pending.poll()
    assert found is not None
    assert (found.hit_chunks, found.settled) == (0, False)
    engine.ranks[0].client.save(SaveJob(1000, ()))
    engine.ranks[0].poll()
    assert engine.ranks[0].saved[1000].stored == 0
    daemon.start()
    engine.wait_settled()
    [saved] = engine.save(PROMPT, seed=1)
    assert saved.stored == 5
    engine.stop()


def test_a_slow_daemon_is_a_miss_and_its_late_lease_is_given_back(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port, lookup_timeout_seconds=0.3).start()
    engine.save(PROMPT, seed=1)
    eventually(lambda: engine.scheduler.link.usable, "usable")
    daemon.signal(signal.SIGSTOP)
    try:
        assert engine.lookup("slow", PROMPT).hit_chunks == 0
        keys, _ = engine.keys(PROMPT)

        def missed_at_once() -> bool:
            pending = engine.scheduler.lookup("r", keys, prompt_tokens=len(PROMPT), local_tokens=0)
            found = pending.poll()
            pending.cancel()
            return found is not None and found.hit_chunks == 0

        eventually(missed_at_once, "a daemon that is known to be slow costs no further wait")
    finally:
        daemon.signal(signal.SIGCONT)
    eventually(lambda: engine.scheduler.link.usable, "it answers again")
    eventually(lambda: daemon.status().leases_total == 0, "the late lease is released")
    assert engine.lookup("again", PROMPT).hit_chunks == 4
    engine.stop()


def test_a_restarted_daemon_is_noticed_and_registered_with_again(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    boot = engine.scheduler.health.boot
    for stop in (daemon.kill, daemon.stop):
        stop()
        daemon.start()
        eventually(lambda: engine.scheduler.health.boot not in (b"", boot), "the restart is noticed")  # noqa: B023
        engine.wait_settled()
        eventually(
            lambda: engine.ranks[0].client.health.boot == engine.scheduler.health.boot, "by the worker too"
        )
        [saved] = engine.save(PROMPT, seed=1)
        assert (saved.stored, saved.skipped) == (0, 5), "what was stored is there again"
        boot = engine.scheduler.health.boot
    engine.stop()


def test_loads_and_saves_end_in_bounded_time_without_a_daemon(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon()
    engine = Engine(
        daemon.port, rank_options={"load_timeout_seconds": 0.5, "save_timeout_seconds": 0.5}
    ).start()
    engine.save(PROMPT, seed=1)
    found = engine.lookup("r", PROMPT)
    job = engine.load_job("r", PROMPT, found)
    items = engine.save_items(PROMPT, seed=3)
    daemon.signal(signal.SIGSTOP)
    [rank] = engine.ranks
    rank.client.load(job)
    rank.client.load(LoadJob("behind", job.lease, job.hit_chunks, job.keys, job.items))
    rank.client.save(SaveJob(99, items))

    def all_reported() -> bool:
        rank.poll()
        return {"r", "behind"} <= rank.loaded.keys() and 99 in rank.saved

    eventually(all_reported, "everything is reported")
    assert not rank.loaded["r"].ok
    assert not rank.loaded["behind"].ok
    assert rank.saved[99].failed == 5
    daemon.signal(signal.SIGCONT)
    eventually(
        lambda: daemon.status().l1.reserved_bytes + daemon.status().l1.limbo_bytes == 0,
        "nothing is left behind",
    )
    daemon.kill()
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < 30


class WaitingCopy:
    """Copies like the reference backend, but only after the test says so."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def backend(self) -> Backend:
        """The backend to give to a worker."""
        return replace(reference_backend(), copy_spans_checksummed=self._copy)

    def _copy(self, spans: Spans, direction: Direction, object_count: int) -> Any:
        self.begun.set()
        assert self.may_go_on.wait(30)
        return reference_backend().copy_spans_checksummed(spans, direction, object_count)


def test_a_hold_that_a_load_restored_is_kept_until_the_load_has_ended(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon, copy = make_daemon(), WaitingCopy()
    engine = Engine(daemon.port, rank_options={"backend": copy.backend()}).start()
    engine.save(PROMPT, seed=1)
    found = engine.lookup("r", PROMPT)
    engine.scheduler.release(found.lease)
    eventually(lambda: daemon.status().leases_total == 0, "the lease has ended")
    copy.begun.clear()
    copy.may_go_on.clear()
    job = engine.load_job("r", PROMPT, found)
    engine.ranks[0].client.load(job)
    assert copy.begun.wait(20)
    [lease] = daemon.status().leases
    assert lease.lease != found.lease
    eventually(lambda: daemon.status().leases[0].renewals > 5, "its holder names it in every heartbeat")
    copy.may_go_on.set()
    eventually(lambda: daemon.status().leases_total == 0, "it is released after the load")
    assert daemon.status().lease_end_causes == {"released": 2}
    assert engine.ranks[0].client.finished_loads()[0].ok
    engine.check_loaded(4, seed=1)
    engine.stop()


def test_a_forked_child_gets_misses_and_the_parent_goes_on(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    engine = Engine(daemon.port).start()
    engine.save(PROMPT, seed=1)
    keys, _ = engine.keys(PROMPT)
    job = LoadJob("child", 0, 1, (keys[0],), ())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found = engine.scheduler.lookup("child", keys, prompt_tokens=len(PROMPT), local_tokens=0).poll()
            engine.ranks[0].client.save(SaveJob(50, ()))
            engine.ranks[0].client.load(job)
            [saved] = engine.ranks[0].client.finished_saves()
            [loaded] = engine.ranks[0].client.finished_loads()
            engine.scheduler.release(1)
            engine.scheduler.stop()
            engine.ranks[0].client.stop()
            missed = found is not None and found.hit_chunks == 0
            status = (
                0
                if missed and saved.stored == 0 and not loaded.ok and engine.scheduler.chunk_tokens is None
                else 2
            )
        finally:
            os._exit(status)
    _, wait_status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(wait_status) == 0
    time.sleep(1.5)
    assert daemon.status().counters.get("sessions_ended_died", 0) == 0, (
        "the child's end is not the parent's death"
    )
    found = engine.lookup("parent", PROMPT)
    assert found.hit_chunks == 4
    [loaded] = engine.load("parent", PROMPT, found)
    assert loaded.ok, loaded.reason
    engine.check_loaded(4, seed=1)
    engine.stop()


def test_an_arena_mounted_elsewhere_is_used_and_a_missing_one_is_named(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = make_daemon()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(daemon.arena_dir)
    engine = Engine(daemon.port, "elsewhere", rank_options={"arena_dir": str(elsewhere)}).start()
    assert engine.save(PROMPT, seed=1)[0].stored == 5
    engine.stop()
    options = {"arena_dir": str(tmp_path / "missing"), "transport": "shared"}
    missing = Engine(daemon.port, "missing", rank_options=options).start(settled=False)
    health = missing.ranks[0].client
    eventually(lambda: "pagewarden.arena_dir" in health.health.reason, "the reason names the remedy")
    assert missing.scheduler.chunk_tokens is None
    missing.stop()
