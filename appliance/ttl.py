"""TTLs: global values and per-namespace overrides, changed at run time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

TTL_NAMES = ("read_lease_ttl_seconds", "write_ttl_seconds", "session_ttl_seconds")


@dataclass(slots=True)
class Ttls:
    """The values in force. A change holds for new leases and for the next renewal of old ones.

    The values given at the start are the ones that :meth:`reset` returns to.
    """

    read_lease_ttl_seconds: float = 300.0
    write_ttl_seconds: float = 600.0
    session_ttl_seconds: float = 600.0
    overrides: dict[tuple[str, str], float] = field(default_factory=dict)
    configured: dict[str, float] = field(init=False)
    changed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.configured = {name: getattr(self, name) for name in TTL_NAMES}

    def get(self, name: str, namespace: str = "") -> float:
        """The value of ``name`` for a namespace, the global one if it has none of its own."""
        value: float = self.overrides.get((name, namespace), getattr(self, name))
        return value

    def changed_value(self, name: str, namespace: str = "") -> float | None:
        """The value that was set at run time for exactly this scope, ``None`` where none was."""
        if namespace:
            return self.overrides.get((name, namespace))
        return self.get(name) if name in self.changed else None

    def set(self, name: str, value_seconds: float | None, namespace: str = "") -> float:
        """Change a value, or with ``None`` take its change back; returns the one that held before."""
        assert name in TTL_NAMES, "a TTL that nobody reads would be set"
        before = self.get(name, namespace)
        if value_seconds is None:
            self._reset(name, namespace)
        elif namespace:
            self.overrides[name, namespace] = value_seconds
        else:
            setattr(self, name, value_seconds)
            self.changed.add(name)
        return before

    def _reset(self, name: str, namespace: str) -> None:
        if namespace:
            self.overrides.pop((name, namespace), None)
        else:
            setattr(self, name, self.configured[name])
            self.changed.discard(name)

    @property
    def version(self) -> str:
        """A digest of every value and override: equal exactly while nothing was changed."""
        values = [[getattr(self, name), name in self.changed] for name in TTL_NAMES]
        overrides = sorted([*key, value] for key, value in self.overrides.items())
        text = json.dumps([values, overrides], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
