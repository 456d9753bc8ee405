"""Planning: from a model's config.json to block size, bytes, budgets, L1 size and the commands to start with.

Pure arithmetic over published facts of the model and rules read from vLLM's source. It needs neither torch nor vLLM
and imports of the appliance only its geometry and errors, so that the command, the dashboard and the connector's
simulated engines can all stand on it. The number that vLLM logs at its start is the authority, never the plan.
"""

from appliance.planning.plan import AUTHORITY, Plan, make_plan
from appliance.planning.request import PlanRequest

__all__ = ["AUTHORITY", "Plan", "PlanRequest", "make_plan"]
