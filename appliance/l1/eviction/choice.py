"""The policies that the daemon can be told to use, by name."""

from __future__ import annotations

from collections.abc import Callable

from appliance.errors import InvalidSettings
from appliance.l1.eviction.lru import LeastRecentlyUsed
from appliance.l1.eviction.marconi import Marconi
from appliance.l1.eviction.policy import EvictionPolicy
from appliance.l1.eviction.returns import ExpectedReturns
from appliance.l1.eviction.seglen import SegmentLength
from appliance.l1.eviction.simple import SimpleRule

DEFAULT_POLICY = ExpectedReturns.name
RIVALS: dict[str, Callable[[], EvictionPolicy]] = {
    rival.name: rival for rival in (LeastRecentlyUsed, SimpleRule, Marconi, SegmentLength)
}
POLICIES = (DEFAULT_POLICY, *RIVALS)


def policy_named(name: str) -> str:
    """The name as the policy itself spells it, whatever its case.

    Raises:
        InvalidSettings: naming the policies there are.
    """
    if name.upper() not in POLICIES:
        raise InvalidSettings(
            f"The eviction policy '{name}' does not exist.",
            remedy=f"Use one of {', '.join(POLICIES)}.",
            field="eviction_policy",
        )
    return name.upper()


def make_policy(name: str, clock: Callable[[], float]) -> EvictionPolicy:
    """The policy of a name, whatever its case; ``clock`` gives seconds of service.

    Raises:
        InvalidSettings: naming the policies there are.
    """
    known = policy_named(name)
    return ExpectedReturns(clock) if known == DEFAULT_POLICY else RIVALS[known]()
