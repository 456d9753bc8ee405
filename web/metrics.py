"""Prometheus metrics, made of the last status when they are scraped; docs/metrics.md has each one.

Labels are bounded: namespace (short id), group, kind, state, cause, reason, gate and loop. Engine and request ids are
never labels: each restart of an engine would leave a series behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.protocol.status import DaemonStatus
from web.format import short_namespace
from web.poller import Snapshot
from web.totals import EngineCounters

Samples = Mapping[tuple[str, ...], float]


class _Total(NamedTuple):
    field: str
    metric: str
    help: str


NAMESPACE_TOTALS: tuple[_Total, ...] = (
    _Total("lookups", "pagewarden_lookups", "Lookups answered."),
    _Total("asked_tokens", "pagewarden_lookup_tokens", "Prompt tokens that lookups asked for."),
    _Total("hit_tokens", "pagewarden_hit_tokens", "Prompt tokens that lookups found."),
    _Total("loads", "pagewarden_loads", "Loads that workers reported, failed ones included."),
    _Total("load_failures", "pagewarden_load_failures", "Loads that failed and were computed anew."),
    _Total("bytes_loaded", "pagewarden_loaded_bytes", "Bytes that engines read from L1."),
    _Total("bytes_stored", "pagewarden_stored_bytes", "Bytes that engines wrote to L1."),
    _Total("objects_stored", "pagewarden_stored_objects", "Objects that engines committed."),
)


class StatusCollector(Collector):
    """Yields the metrics of one snapshot.

    While the daemon does not answer only ``pagewarden_up`` and the web process's own metrics remain: the last known
    values would look like a healthy daemon that stands still.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Every metric, in the order of docs/metrics.md."""
        yield from _web(self._snapshot)
        status = self._snapshot.status
        if status is None or not self._snapshot.reachable:
            return
        yield from _daemon(status)
        yield from _l1(status)
        yield from _groups(status)
        yield from _engines(status, self._snapshot.totals.by_namespace)
        yield from _holds(status)
        yield from _evictions(status)
        yield from _inline(status)
        yield from _catalog(status)
        yield from _loops(status)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in sorted(samples.items()):
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _counters(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in sorted(samples.items()):
        family.add_metric(values, value)
    return family


def _by_word(counts: Mapping[str, int]) -> Samples:
    return {(word,): count for word, count in counts.items()}


def _web(snapshot: Snapshot) -> Iterator[Metric]:
    yield _gauge("pagewarden_up", "1 while the daemon answers with its status, else 0.", snapshot.reachable)
    if snapshot.age_seconds is not None:
        yield _gauge(
            "pagewarden_status_age_seconds",
            "Age of the daemon's last status.",
            snapshot.age_seconds,
        )
    yield _counter("pagewarden_web_polls", "Tries to read the daemon's status.", snapshot.polls)
    yield _counter("pagewarden_web_poll_errors", "Tries that failed.", snapshot.errors)


def _daemon(status: DaemonStatus) -> Iterator[Metric]:
    yield _gauges(
        "pagewarden_build_info", "Always 1; the version is a label.", ("version",), {(status.version,): 1}
    )
    yield _gauge("pagewarden_ready", "1 while every gate of readiness is open, else 0.", status.ready)
    yield _gauges(
        "pagewarden_gate_open",
        "1 for each gate of readiness that is open, else 0.",
        ("gate",),
        {(gate.name,): gate.open for gate in status.gates},
    )
    yield _gauge(
        "pagewarden_start_time_seconds", "When the daemon started, in unix time.", status.started_unix
    )


def _l1(status: DaemonStatus) -> Iterator[Metric]:
    l1 = status.l1
    yield _gauge("pagewarden_l1_capacity_bytes", "Bytes that L1 may grow to.", l1.capacity_bytes)
    yield _gauge("pagewarden_l1_populated_bytes", "Bytes of L1 backed by memory.", l1.populated_bytes)
    yield _gauges(
        "pagewarden_l1_bytes",
        "Populated bytes by what they are used for; the states add up to pagewarden_l1_populated_bytes.",
        ("state",),
        {
            ("free",): l1.free_bytes,
            ("occupied",): l1.occupied_bytes,
            ("reserved",): l1.reserved_bytes,
            ("limbo",): l1.limbo_bytes,
            ("draining",): l1.draining_bytes,
        },
    )
    yield _gauge("pagewarden_l1_leased_bytes", "Occupied bytes under a read lease.", l1.leased_bytes)
    yield _gauge("pagewarden_l1_pinned_bytes", "Occupied bytes pinned by an admin.", l1.pinned_bytes)
    yield _gauge(
        "pagewarden_l1_watermark_bytes", "Use above which the background evicts.", l1.watermark_bytes
    )
    yield _gauge("pagewarden_l1_objects", "Objects in the index.", l1.objects)
    yield _gauge("pagewarden_l1_chunks", "Chunks in the index.", l1.chunks)


def _groups(status: DaemonStatus) -> Iterator[Metric]:
    columns = (
        ("objects", "pagewarden_group_objects", "Objects of one object group."),
        ("bytes", "pagewarden_group_bytes", "Bytes of one object group, in whole extents."),
        ("leased_bytes", "pagewarden_group_leased_bytes", "Bytes of one object group under a read lease."),
        ("reserved_bytes", "pagewarden_group_reserved_bytes", "Bytes lent to writers of one object group."),
    )
    for field, name, text in columns:
        samples: Counter[tuple[str, ...]] = Counter()
        for group in status.groups:
            key = (short_namespace(group.namespace), str(group.group), group.name, group.kind)
            samples[key] += getattr(group, field)
        yield _gauges(name, text, ("namespace", "group", "name", "kind"), samples)


def _engines(status: DaemonStatus, totals: Mapping[str, EngineCounters]) -> Iterator[Metric]:
    states: Counter[tuple[str, ...]] = Counter((engine.state,) for engine in status.engines)
    yield _gauges("pagewarden_engines", "Engines by the state of their session.", ("state",), states)
    yield _gauge(
        "pagewarden_refusals",
        "Engines times namespaces of the same model that they must not read.",
        len(status.refusals),
    )
    for total in NAMESPACE_TOTALS:
        samples: Counter[tuple[str, ...]] = Counter()
        for namespace, counters in totals.items():
            samples[short_namespace(namespace) or "none",] += getattr(counters, total.field)
        yield _counters(total.metric, total.help, ("namespace",), samples)
    yield _counters(
        "pagewarden_misses",
        "Lookups that fell short of the hit their prompt could have had, by reason.",
        ("reason",),
        _by_word(status.miss_reasons),
    )


def _holds(status: DaemonStatus) -> Iterator[Metric]:
    yield _gauge("pagewarden_leases", "Read leases held now.", status.leases_total)
    yield _counters(
        "pagewarden_lease_ends", "Ended read leases by cause.", ("cause",), _by_word(status.lease_end_causes)
    )
    yield _counters(
        "pagewarden_reservation_ends",
        "Ended write reservations by cause.",
        ("cause",),
        _by_word(status.reservation_end_causes),
    )


def _evictions(status: DaemonStatus) -> Iterator[Metric]:
    yield _counters(
        "pagewarden_evictions",
        "Pairs of chunk and group that left the cache, by cause.",
        ("cause",),
        _by_word(status.evictions),
    )
    yield _counters(
        "pagewarden_evicted_bytes",
        "Bytes that left the cache, by cause.",
        ("cause",),
        _by_word(status.evicted_bytes),
    )


def _inline(status: DaemonStatus) -> Iterator[Metric]:
    inline = status.inline
    yield _counters(
        "pagewarden_inline_bytes",
        "Page bytes of engines that cannot map the arena, by direction.",
        ("direction",),
        {("in",): inline.bytes_in, ("out",): inline.bytes_out},
    )
    yield _counters(
        "pagewarden_inline_frames",
        "Frames that carried them.",
        ("direction",),
        {("in",): inline.frames_in, ("out",): inline.frames_out},
    )
    yield _counter(
        "pagewarden_inline_stalls",
        "Answers that found no room because their engine did not read.",
        inline.stalls,
    )
    yield _counter("pagewarden_inline_refusals", "Bulk requests answered with an error.", inline.refusals)


def _catalog(status: DaemonStatus) -> Iterator[Metric]:
    catalog = status.catalog
    yield _gauge(
        "pagewarden_catalog_ok", "1 while the catalog writes without trouble, else 0.", catalog.state == "ok"
    )
    yield _gauge("pagewarden_catalog_queued_rows", "Rows that wait to be written.", catalog.queued)
    yield _counter("pagewarden_catalog_written_rows", "Rows written.", catalog.written)
    yield _counter("pagewarden_catalog_dropped_rows", "Rows lost to a full queue.", catalog.dropped)
    if catalog.last_commit_age_seconds is not None:
        yield _gauge(
            "pagewarden_catalog_last_commit_age_seconds",
            "Seconds since the last commit.",
            catalog.last_commit_age_seconds,
        )


def _loops(status: DaemonStatus) -> Iterator[Metric]:
    yield _gauges(
        "pagewarden_loop_idle_seconds",
        "Seconds since a background loop last went round.",
        ("loop",),
        {(loop.name,): loop.idle_seconds for loop in status.loops},
    )
    yield _counters(
        "pagewarden_loop_errors",
        "Exceptions that a background loop survived.",
        ("loop",),
        {(loop.name,): loop.errors for loop in status.loops},
    )
