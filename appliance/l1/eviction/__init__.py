"""Which entry goes first when memory is wanted, and which snapshots are worth making."""

from appliance.l1.eviction.choice import DEFAULT_POLICY, POLICIES, make_policy, policy_named
from appliance.l1.eviction.policy import EvictionPolicy, Prompt

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "Prompt", "make_policy", "policy_named"]
