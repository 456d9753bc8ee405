"""The schema of the operation that changes the eviction policy. Its result tells what held before and what holds now."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from appliance.protocol.accounts import ACCOUNT_REQUESTS, Origin
from appliance.protocol.base import Lenient, Message
from appliance.protocol.bounds import Name


class SetPolicy(Message):
    """Another eviction policy (null: the configured one), if ``if_policy`` still evicts. Durable like a clear."""

    policy: Annotated[str | None, Field(max_length=64)]
    if_policy: Annotated[str, Field(max_length=64)] = ""
    requested_by: Name = "unknown"
    requested_from: Origin = ""


class SetPolicyResult(Lenient):
    """The policies before and after, and whether the one after is a change of what was configured."""

    before: str
    after: str
    changed: bool


ADMIN_REQUESTS: dict[str, type[Message]] = {"set_policy": SetPolicy, **ACCOUNT_REQUESTS}
"""Operations of admins beside those of the messages."""
