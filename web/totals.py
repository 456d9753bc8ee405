"""Per-namespace counters that only ever grow, made of per-engine counters that vanish with their engine.

An engine's numbers leave the status when the engine does, so their plain sum would fall, and a falling counter reads
as a restart: the rate computed from it would jump by everything the remaining engines ever did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from appliance.protocol.status import DaemonStatus, EngineStatus


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What is summed up: the counters of one engine, or of all that ever served one namespace."""

    lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    loads: int = 0
    load_failures: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    objects_stored: int = 0

    @classmethod
    def of(cls, engine: EngineStatus) -> EngineCounters:
        """The counters of one engine."""
        return cls(**{name: getattr(engine, name) for name in COUNTER_NAMES})

    def plus(self, other: EngineCounters) -> EngineCounters:
        """The sum, counter by counter."""
        return EngineCounters(*(getattr(self, name) + getattr(other, name) for name in COUNTER_NAMES))

    def since(self, earlier: EngineCounters) -> EngineCounters:
        """What was added since ``earlier``; a counter that fell began again at 0."""
        values = []
        for name in COUNTER_NAMES:
            now, before = getattr(self, name), getattr(earlier, name)
            values.append(now - before if now >= before else now)
        return EngineCounters(*values)


COUNTER_NAMES: tuple[str, ...] = tuple(entry.name for entry in fields(EngineCounters))


@dataclass(frozen=True, slots=True)
class NamespaceTotals:
    """The totals of every namespace seen since this process started, by namespace."""

    by_namespace: Mapping[str, EngineCounters] = field(default_factory=lambda: MappingProxyType({}))


class EngineTotals:
    """Adds up what each engine did between two looks. Not thread-safe: the poller owns it.

    Whatever engines had counted before the first look belongs to an earlier web process and is left out, so that a
    restart of this process is seen as a counter's restart and not as a burst of work.
    """

    def __init__(self) -> None:
        self._last: dict[str, EngineCounters] | None = None
        self._totals: dict[str, EngineCounters] = {}

    def update(self, status: DaemonStatus) -> NamespaceTotals:
        """The totals after one more look."""
        seen: dict[str, EngineCounters] = {}
        for engine in status.engines:
            counters = EngineCounters.of(engine)
            seen[engine.engine_id] = counters
            before = counters if self._last is None else self._last.get(engine.engine_id, EngineCounters())
            total = self._totals.get(engine.namespace, EngineCounters())
            self._totals[engine.namespace] = total.plus(counters.since(before))
        self._last = seen
        return NamespaceTotals(MappingProxyType(dict(self._totals)))
