"""TTLs: global values and per-namespace overrides, changed at run time."""

from __future__ import annotations

from dataclasses import dataclass, field

TTL_NAMES = ("read_lease_ttl_seconds", "write_ttl_seconds", "session_ttl_seconds")


@dataclass(slots=True)
class Ttls:
    """The values in force. A change holds for new leases and for the next renewal of old ones."""

    read_lease_ttl_seconds: float = 300.0
    write_ttl_seconds: float = 600.0
    session_ttl_seconds: float = 600.0
    overrides: dict[tuple[str, str], float] = field(default_factory=dict)

    def get(self, name: str, namespace: str = "") -> float:
        """The value of ``name`` for a namespace, the global one if it has none of its own."""
        value: float = self.overrides.get((name, namespace), getattr(self, name))
        return value

    def set(self, name: str, value_seconds: float, namespace: str = "") -> float:
        """Change a value; returns the one before."""
        assert name in TTL_NAMES, "a TTL that nobody reads would be set"
        before = self.get(name, namespace)
        if namespace:
            self.overrides[name, namespace] = value_seconds
        else:
            setattr(self, name, value_seconds)
        return before

    def drop_override(self, name: str, namespace: str) -> None:
        """The namespace follows the global value again."""
        self.overrides.pop((name, namespace), None)
