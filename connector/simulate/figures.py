"""What a simulation counts, and how it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MIB = 1 << 20
WRONG_KEPT = 100
LATENCIES_KEPT = 200_000


@dataclass(slots=True)
class Figures:
    """Counts of one engine, or of several added up; latencies are in seconds."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    loads: int = 0
    loads_failed: int = 0
    pages_compared: int = 0
    objects_stored: int = 0
    objects_skipped: int = 0
    objects_refused: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    wrong_pages: int = 0
    wrong: list[str] = field(default_factory=list)
    misses: Counter[str] = field(default_factory=Counter)
    load_failures: Counter[str] = field(default_factory=Counter)
    lookup_seconds: list[float] = field(default_factory=list)
    load_seconds: list[float] = field(default_factory=list)

    def found_wrong(self, sentences: list[str]) -> None:
        """Pages that held other bytes than were stored."""
        self.wrong_pages += len(sentences)
        self.wrong += sentences[: WRONG_KEPT - len(self.wrong)]

    def took(self, latencies: list[float], seconds: float) -> None:
        """Keep a latency, bounded: later ones replace every other earlier one."""
        if len(latencies) >= LATENCIES_KEPT:
            del latencies[::2]
        latencies.append(seconds)

    @classmethod
    def total(cls, parts: Iterable[Figures]) -> Figures:
        """The sum of several engines' figures."""
        total = cls()
        for part in parts:
            for name in cls.__dataclass_fields__:
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    def summary(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "requests": self.requests,
            "finished": self.finished,
            "aborted": self.aborted,
            "asked_tokens": self.asked_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": round(self.hit_tokens / self.asked_tokens, 4) if self.asked_tokens else 0.0,
            "loads": self.loads,
            "loads_failed": self.loads_failed,
            "load_failures": dict(self.load_failures),
            "pages_compared": self.pages_compared,
            "wrong_pages": self.wrong_pages,
            "wrong": self.wrong,
            "objects_stored": self.objects_stored,
            "objects_skipped": self.objects_skipped,
            "objects_refused": self.objects_refused,
            "bytes_loaded": self.bytes_loaded,
            "bytes_stored": self.bytes_stored,
            "misses": dict(self.misses),
            "lookup_ms": _percentiles(self.lookup_seconds),
            "load_ms": _percentiles(self.load_seconds),
        }

    def line(self, seconds: float) -> str:
        """One line of progress."""
        rate = 100 * self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0
        return (
            f"{seconds:6.0f} s  {self.requests} requests  {rate:.0f} % of tokens hit  "
            f"{self.bytes_loaded / MIB:.0f} MiB in  {self.bytes_stored / MIB:.0f} MiB out  "
            f"{self.loads_failed} loads failed  {self.wrong_pages} wrong pages"
        )

    def text(self) -> str:
        """The summary for people."""
        told = self.summary()
        misses = ", ".join(f"{reason} {count}" for reason, count in self.misses.most_common()) or "none"
        failures = ", ".join(f"{reason} {count}" for reason, count in self.load_failures.most_common())
        return "\n".join(
            (
                f"requests        {self.requests} ({self.finished} finished, {self.aborted} aborted)",
                f"tokens hit      {100 * told['hit_rate']:.1f} % of {self.asked_tokens}",
                (
                    f"loaded          {self.bytes_loaded / MIB:.1f} MiB in {self.loads} loads, "
                    f"{self.pages_compared} pages compared"
                ),
                f"loads failed    {self.loads_failed}{f' ({failures})' if failures else ''}",
                (
                    f"stored          {self.bytes_stored / MIB:.1f} MiB in {self.objects_stored} objects, "
                    f"{self.objects_skipped} there already, {self.objects_refused} refused"
                ),
                f"shortfalls      {misses}",
                f"lookup          p50 {told['lookup_ms']['p50']} ms, p99 {told['lookup_ms']['p99']} ms",
                f"load            p50 {told['load_ms']['p50']} ms, p99 {told['load_ms']['p99']} ms",
                f"wrong pages     {self.wrong_pages}",
                *(f"  {sentence}" for sentence in self.wrong),
            )
        )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(np.array(seconds), (50, 99)) * 1000
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}
