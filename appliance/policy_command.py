"""What `pagewarden policy` prints: the policies side by side, and what became of stored bytes."""

from __future__ import annotations

from appliance.protocol.status import DaemonStatus, GroupUsage, PolicyShadow


def compared(status: DaemonStatus) -> str:
    """A line a policy, then a line a group."""
    retention = status.retention
    lines = ["policy      hit rate   prompts"]
    for shadow in retention.policies:
        marks = [word for word, holds in (("evicts", shadow.active), ("default", shadow.default)) if holds]
        lines.append(
            f"{shadow.policy:<10}{_rate(shadow):>10}{shadow.prompts:>10}  {', '.join(marks)}".rstrip()
        )
    if retention.share < 1:
        lines.append(f"Followed: the prompts of {retention.share:.2%} of first chunks.")
    lines.append("")
    lines.append("group                    stored   read again   evicted   asked for after")
    lines += [_group(group) for group in status.groups]
    if not status.groups:
        lines.append("Nothing was stored yet: start an engine with the connector.")
    return "\n".join(lines)


def _rate(shadow: PolicyShadow) -> str:
    return f"{shadow.hit_chunks / shadow.asked_chunks:.1%}" if shadow.asked_chunks else "-"


def _group(group: GroupUsage) -> str:
    def share(part: int, whole: int) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    stored = f"{group.stored_bytes / (1 << 30):.2f} GiB"
    evicted = f"{group.evicted_bytes / (1 << 30):.2f} GiB"
    read, regret = share(group.read_bytes, group.stored_bytes), share(group.regret_bytes, group.evicted_bytes)
    return f"{group.name:<18}{stored:>13}{read:>13}{evicted:>10}{regret:>18}"
