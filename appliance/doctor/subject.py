"""What is examined: the settings of the daemon as they will be, or are, in force, and its status if it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.protocol.arena_layout import SegmentLayout
from appliance.protocol.status import DaemonStatus
from appliance.settings import Settings


@dataclass(frozen=True, slots=True)
class Subject:
    """Settings of the daemon that the machine must fit.

    ``running`` is the status of the daemon that answers at ``host`` and ``port``; then its own settings count.
    ``same_host`` is false where only the daemon's own words can be judged, since it runs elsewhere.
    ``engine_side`` asks for what an engine's process here can reach. ``vllm_url`` is a running vLLM's address.
    """

    host: str
    port: int
    bulk_port: int
    http_host: str
    http_port: int
    web: bool
    insecure: bool
    l1_bytes: int
    extent_bytes: int
    arena_dir: Path
    catalog: Path
    running: DaemonStatus | None = None
    engine_side: bool = False
    arena_here: Path | None = None
    vllm_url: str = ""
    same_host: bool = True

    @property
    def arena_bytes(self) -> int:
        """Size of the segment file, tables included."""
        return SegmentLayout(max(1, self.l1_bytes // self.extent_bytes), self.extent_bytes).file_bytes

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], **more: Any) -> Subject:
        """From settings by name, as ``Settings.model_dump`` and the status document's ``settings`` give them.

        What a daemon of another version does not name has its default.
        """
        fields = Settings.model_fields.items()
        settings = {
            **{name: info.get_default(call_default_factory=True) for name, info in fields},
            **settings,
        }
        extent_bytes = int(settings["extent_kib"]) * 1024
        return cls(
            host=str(settings["host"]),
            port=int(settings["port"]),
            bulk_port=int(settings["bulk_port"]),
            http_host=str(settings["http_host"]),
            http_port=int(settings["http_port"]),
            web=not settings["no_web"],
            insecure=bool(settings["insecure"]),
            l1_bytes=max(extent_bytes, int(float(settings["l1_size_gb"]) * (1 << 30))),
            extent_bytes=extent_bytes,
            arena_dir=Path(str(settings["arena_dir"])),
            catalog=Path(str(settings["catalog"])),
            **more,
        )
