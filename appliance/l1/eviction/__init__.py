"""Which entry goes first when memory is wanted."""

from appliance.l1.eviction.policy import EvictionPolicy, make_policy

__all__ = ["EvictionPolicy", "make_policy"]
