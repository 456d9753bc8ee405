"""The connector's options: `pagewarden.*` in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import InvalidSettings

PREFIX = "pagewarden."
ALIASES = {"lmcache.mp.host": "host", "lmcache.mp.port": "port"}
"""Options of LMCache's multiprocess connector that mean the same here."""


class ConnectorOptions(BaseModel):
    """What an operator may say about one engine's use of the appliance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", min_length=1)
    """Where the daemon's control socket listens."""
    port: int = Field(default=6555, ge=1, le=65535)
    arena_dir: str | None = None
    """The arena's directory as this process sees it, where the mount point differs from the daemon's."""
    transport: Literal["auto", "shared", "inline"] = "auto"
    """How page bytes travel: through the arena where it can be mapped and else in messages, or always one of the two."""
    salt: str = ""
    """Enters every chunk key: engines with different salts share nothing."""
    store_generated: bool = True
    """Whether chunks that hold generated tokens are stored too."""
    weights_version: str = ""
    """The operator's name for the weights, in place of a digest of the checkpoint's files."""
    require_namespace: str = Field(default="", max_length=64)
    """Refuse to serve from any other namespace than this one."""
    lookup_timeout_seconds: float = Field(default=0.5, gt=0, le=60)
    """After this long without an answer a lookup is a miss; longer silence (2 s at least) is an unresponsive daemon."""
    load_timeout_seconds: float = Field(default=30.0, gt=0, le=600)
    """After this long a load has failed and its tokens are computed."""
    save_timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """After this long without an answer a save is given up; its blocks are pinned until then."""
    settle_timeout_seconds: float = Field(default=3.0, ge=0, le=60)
    """How long the first requests of an engine wait for its registration to settle."""

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any] | None) -> ConnectorOptions:
        """The options in vLLM's extra configuration; keys of other products are left alone.

        Raises:
            InvalidSettings: naming the option, its value and what is wrong with it.
        """
        values: dict[str, Any] = {}
        for key, value in (extra or {}).items():
            if key in ALIASES:
                values.setdefault(ALIASES[key], value)
        for key, value in (extra or {}).items():
            if key.startswith(PREFIX):
                values[key.removeprefix(PREFIX)] = value
        if isinstance(values.get("host"), str):
            values["host"] = values["host"].removeprefix("tcp://")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            option = PREFIX + ".".join(str(part) for part in first["loc"])
            raise InvalidSettings(
                f"The connector option '{option}' is {first.get('input')!r}: {first['msg']}.",
                remedy="See kv_connector_extra_config in the documentation of the connector.",
                option=option,
            ) from None
