"""The state of everything in sentences, the worst first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from appliance.protocol.status import DaemonStatus, EngineStatus
from web.explain import ORDERLY_LEASE_ENDS, title_of
from web.format import (
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_percent,
    joined,
    plural,
    shortened,
)
from web.poller import Snapshot

LOOP_SILENT_SECONDS = 60.0
"""A background loop that has not gone round for this long is worth a sentence."""


class Level(IntEnum):
    """How much a sentence matters; the page shows it as a word too, never by colour alone."""

    OK = 0
    INFO = 1
    WARNING = 2
    PROBLEM = 3

    @property
    def word(self) -> str:
        """The word shown beside the sentence."""
        return {0: "OK", 1: "Note", 2: "Warning", 3: "Problem"}[self.value]


@dataclass(frozen=True, slots=True)
class Sentence:
    """One finding; ``anchor`` is the section of the page that has the details."""

    level: Level
    text: str
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """The headline and the findings, sorted: what is worst comes first."""

    headline: Sentence
    findings: tuple[Sentence, ...]

    @property
    def level(self) -> Level:
        """The worst of all."""
        return max((self.headline.level, *(finding.level for finding in self.findings)))


def health_of(snapshot: Snapshot, *, endpoint: str, now_unix: float) -> Health:
    """What there is to say about a snapshot."""
    status = snapshot.status
    if status is None:
        return Health(_never_answered(snapshot, endpoint), ())
    headline = _headline(snapshot, status, now_unix)
    findings = [
        *_gates(status),
        *_start(status),
        *_l1(status),
        *_engines(status),
        *_hits(status),
        *_refusals(status),
        *_leases(status),
        *_catalog(status),
        *_loops(status),
    ]
    return Health(headline, tuple(sorted(findings, key=lambda finding: -finding.level)))


def _never_answered(snapshot: Snapshot, endpoint: str) -> Sentence:
    if snapshot.polls == 0:
        return Sentence(Level.INFO, f"Asking the daemon at {endpoint} for its first status.")
    if snapshot.error_code == "daemon_unreachable":
        return Sentence(
            Level.PROBLEM,
            f"No daemon has answered at {endpoint} since this page's process started, "
            f"{format_duration(snapshot.failing_seconds)} ago. Start it with: pagewarden server",
        )
    return Sentence(
        Level.PROBLEM, f"The daemon at {endpoint} gives no status that can be read: {snapshot.error}"
    )


def _headline(snapshot: Snapshot, status: DaemonStatus, now_unix: float) -> Sentence:
    if snapshot.failing_seconds is not None:
        since = format_clock(now_unix - snapshot.failing_seconds)
        silent = format_duration(snapshot.failing_seconds)
        what = (
            "The data path does not answer"
            if snapshot.error_code == "daemon_unreachable"
            else f"The daemon's status cannot be read ({snapshot.error})"
        )
        return Sentence(
            Level.PROBLEM,
            f"{what} since {since}, for {silent}. Everything below is its last known state.",
        )
    l1 = status.l1
    if not status.ready:
        if l1.populated_bytes < l1.capacity_bytes and status.phase == "populating":
            return Sentence(
                Level.INFO,
                f"Populating L1: {format_bytes(l1.populated_bytes)} of {format_bytes(l1.capacity_bytes)} "
                f"({format_percent(l1.populated_bytes, l1.capacity_bytes)}). Engines can attach meanwhile.",
            )
        return Sentence(Level.WARNING, f"Not ready: the daemon is {status.phase.replace('_', ' ')}.")
    used = l1.populated_bytes - l1.free_bytes
    serving = sum(engine.state == "ready" for engine in status.engines)
    return Sentence(
        Level.OK,
        f"Ready. L1 of {format_bytes(l1.capacity_bytes)} is "
        f"{f'{format_percent(used, l1.capacity_bytes)} full' if used else 'empty'} and serves "
        f"{plural(serving, 'engine') if serving else 'no engine yet'}.",
        "l1",
    )


def _gates(status: DaemonStatus) -> Iterator[Sentence]:
    level = Level.INFO if status.phase == "populating" else Level.WARNING
    for gate in status.gates:
        if not gate.open:
            yield Sentence(level, f"Not ready because of {title_of(gate.name).lower()}: {gate.reason}")


def _start(status: DaemonStatus) -> Iterator[Sentence]:
    """A cold start that could have been warm: a gate failed. A first start has no such gate."""
    restart = status.restart
    if restart is not None and any(gate.outcome == "failed" for gate in restart.gates):
        yield Sentence(Level.INFO, f"This boot began with an empty cache: {restart.reason}", "internals")


def _l1(status: DaemonStatus) -> Iterator[Sentence]:
    l1 = status.l1
    used = l1.populated_bytes - l1.free_bytes
    if 0 < l1.watermark_bytes < used:
        yield Sentence(
            Level.INFO,
            f"L1 is above its watermark of {format_bytes(l1.watermark_bytes)}, so {l1.policy.upper()} evicts "
            "what was used least.",
            "evictions",
        )
    stuck = l1.leased_bytes + l1.pinned_bytes + l1.reserved_bytes + l1.limbo_bytes + l1.draining_bytes
    if l1.populated_bytes and stuck > 0.8 * l1.populated_bytes:
        yield Sentence(
            Level.WARNING,
            f"{format_percent(stuck, l1.populated_bytes)} of L1 is held and cannot be evicted; "
            "stores will be refused when the rest is used.",
            "l1",
        )
    if l1.limbo_bytes:
        yield Sentence(
            Level.INFO,
            f"{format_bytes(l1.limbo_bytes)} wait for proof that their writers have stopped.",
            "l1",
        )


def _engines(status: DaemonStatus) -> Iterator[Sentence]:
    for engine in status.engines:
        name = shortened(engine.engine_id, 48)
        if engine.state == "suspect":
            yield Sentence(
                Level.WARNING,
                f"Engine {name} has sent no heartbeat for {format_duration(engine.heartbeat_age_seconds)}; "
                f"it holds {plural(engine.leases, 'lease')}.",
                "engines",
            )
        elif engine.state != "ready":
            reason = f": {engine.reason}" if engine.reason else "."
            yield Sentence(_engine_level(engine), f"Engine {name} is {engine.state}{reason}", "engines")
        if engine.deviation:
            yield Sentence(
                Level.WARNING,
                f"Engine {name} registered with another block size than the planned {engine.planned_block_size}.",
                "engines",
            )
    failures = sum(engine.load_failures for engine in status.engines)
    if failures:
        loads = sum(engine.loads for engine in status.engines)
        yield Sentence(
            Level.WARNING,
            f"{plural(failures, 'load')} of {format_count(loads)} failed and were computed anew.",
            "engines",
        )


def _engine_level(engine: EngineStatus) -> Level:
    return Level.INFO if engine.state == "registering" else Level.WARNING


def _hits(status: DaemonStatus) -> Iterator[Sentence]:
    asked = sum(engine.asked_tokens for engine in status.engines)
    hit = sum(engine.hit_tokens for engine in status.engines)
    if not asked:
        return
    text = f"{format_percent(hit, asked)} of the tokens that engines asked for were found"
    if status.miss_reasons:
        top = max(status.miss_reasons, key=lambda reason: status.miss_reasons[reason])
        if status.miss_reasons[top]:
            text += f"; most lookups that fell short: {title_of(top).lower()}"
    yield Sentence(Level.OK, f"{text}.", "hits")


def _refusals(status: DaemonStatus) -> Iterator[Sentence]:
    if not status.refusals:
        return
    fields = sorted({entry.field for refusal in status.refusals for entry in refusal.differences})
    shown = fields[:3] + ([f"{len(fields) - 3} more"] if len(fields) > 3 else [])
    lookups = sum(refusal.lookups for refusal in status.refusals)
    cost = (
        f"{plural(lookups, 'lookup')} would have hit across"
        if lookups
        else "no lookup would have hit across so far"
    )
    pairs = {
        (refusal.model, *sorted((refusal.namespace, refusal.other_namespace))) for refusal in status.refusals
    }
    yield Sentence(
        Level.WARNING if lookups else Level.INFO,
        f"{plural(len(pairs), 'pair')} of fingerprints of one model {'does' if len(pairs) == 1 else 'do'} "
        f"not share because of {joined(shown)}; {cost}.",
        "refusals",
    )


def _leases(status: DaemonStatus) -> Iterator[Sentence]:
    bad = {
        cause: count
        for cause, count in status.lease_end_causes.items()
        if count and cause not in ORDERLY_LEASE_ENDS
    }
    if bad:
        parts = [f"{format_count(bad[cause])} {title_of(cause).lower()}" for cause in sorted(bad)]
        total = sum(bad.values())
        yield Sentence(
            Level.WARNING,
            f"{plural(total, 'lease')} since start {'was' if total == 1 else 'were'} not released by "
            f"{'its' if total == 1 else 'their'} engine: {joined(parts)}.",
            "lease-ends",
        )


def _catalog(status: DaemonStatus) -> Iterator[Sentence]:
    catalog = status.catalog
    if catalog.state == "ok":
        return
    reason = f": {catalog.reason}" if catalog.reason else "."
    yield Sentence(
        Level.PROBLEM if catalog.state == "down" else Level.WARNING,
        f"The catalog is {catalog.state}{reason} The cache is served; history waits or is lost.",
        "internals",
    )


def _loops(status: DaemonStatus) -> Iterator[Sentence]:
    for loop in status.loops:
        if loop.errors:
            last = f" The last: {shortened(loop.last_error)}" if loop.last_error else ""
            yield Sentence(
                Level.WARNING,
                f"Loop {loop.name} survived {plural(loop.errors, 'error')}.{last}",
                "internals",
            )
        if loop.idle_seconds > LOOP_SILENT_SECONDS:
            yield Sentence(
                Level.WARNING,
                f"Loop {loop.name} has not gone round for {format_duration(loop.idle_seconds)}.",
                "internals",
            )
