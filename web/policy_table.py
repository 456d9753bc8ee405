"""The eviction policies side by side, as the Policies page shows them."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.protocol.status import DaemonStatus, PolicyShadow

ABOUT: dict[str, str] = {
    "RETURNS": "Keeps what prompts are expected to come back to, per byte; chooses snapshots.",
    "LRU": "Keeps what was used last; a snapshot at every boundary.",
    "SIMPLE": "States at ends and forks first, the rest least recently used.",
    "SEGLEN": "Length of the segment against recency, as in SGLang.",
    "MARCONI": "Recency against FLOPs saved per byte (MLSys 2025). Not followed here: its search takes too long.",
}


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy. ``rate`` is ``None`` before its first prompt; ``ahead`` is the difference to the one that evicts."""

    name: str
    about: str
    shadow: PolicyShadow | None
    active: bool
    rate: float | None
    ahead: float | None


def policy_rows(status: DaemonStatus) -> list[PolicyRow]:
    """Every policy the daemon can be told to use."""
    shadows = {shadow.policy: shadow for shadow in status.retention.policies}
    rates = {
        name: shadow.hit_chunks / shadow.asked_chunks
        for name, shadow in shadows.items()
        if shadow.asked_chunks
    }
    mine = rates.get(status.l1.policy)
    return [
        PolicyRow(
            name=name,
            about=about,
            shadow=shadows.get(name),
            active=name == status.l1.policy,
            rate=rates.get(name),
            ahead=None if mine is None or name not in rates else rates[name] - mine,
        )
        for name, about in ABOUT.items()
    ]
