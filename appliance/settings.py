"""Settings of the daemon: flags over ``PAGEWARDEN_*`` variables over a TOML file over defaults."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from appliance.errors import InvalidSettings
from appliance.planning.expected import PlannedBlocks
from appliance.protocol import DEFAULT_HTTP_PORT, DEFAULT_PORT
from appliance.run_dir import default_run_dir

GIB = 1 << 30
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def default_catalog() -> Path:
    """Where the catalog is kept unless it is said: under the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "pagewarden" / "catalog.db"


class Settings(BaseSettings):
    """Every setting of ``pagewarden server``; each is also a flag and a variable of the same name."""

    model_config = SettingsConfigDict(
        env_prefix="PAGEWARDEN_", extra="forbid", frozen=True, allow_inf_nan=False
    )

    host: str = Field("127.0.0.1", description="Address that engines connect to.")
    port: int = Field(
        DEFAULT_PORT, ge=0, le=65535, description="Port that engines connect to; 0 picks a free one."
    )
    bulk_port: int = Field(
        0, ge=0, le=65535, description="Port for page bytes of engines on other hosts; 0 picks a free one."
    )
    chunk_size: int = Field(
        256, ge=1, le=1 << 24, description="Least tokens in a chunk; each engine's is negotiated."
    )
    separate_object_groups: bool = Field(
        default=True, description="Accepted for LMCache's command lines; object groups are always separate."
    )
    max_workers: int = Field(4, ge=1, le=256, description="Threads for slow work.")
    l1_size_gb: float = Field(1.0, gt=0, le=1 << 20, description="Size of L1 in GiB.")
    l1_init_size_gb: float | None = Field(
        None, gt=0, description="GiB populated before ready; all by default."
    )
    eviction_policy: str = Field(
        "RETURNS", description="What goes first when memory is wanted: RETURNS or LRU."
    )
    eviction_watermark: float = Field(
        0.95, gt=0, le=1, description="Occupied share above which eviction begins."
    )
    l1_read_ttl_seconds: float = Field(
        300.0, gt=0, description="A read lease that nobody renews ends after this."
    )
    l1_write_ttl_seconds: float = Field(
        600.0, gt=0, description="A reservation not committed ends after this."
    )
    session_ttl_seconds: float = Field(600.0, gt=0, description="A silent session ends after this.")
    heartbeat_seconds: float = Field(
        2.0, ge=0.05, le=60, description="How often engines are asked to report."
    )
    engine_inflight_share: float = Field(
        0.25, gt=0, le=1, description="Share of L1 that one engine may hold unfinished (reserved and limbo)."
    )
    death_grace_seconds: float = Field(
        3.0, ge=0, le=600, description="Wait after a writer's proven death before its memory is used again."
    )
    arena_dir: Path = Field(Path("/dev/shm/pagewarden"), description="Directory of the arena's files.")  # noqa: S108
    extent_kib: int = Field(256, ge=4, le=1 << 20, description="Size of an extent in KiB; a multiple of 4.")
    catalog: Path = Field(default_factory=default_catalog, description="The SQLite catalog.")
    http_host: str = Field("127.0.0.1", description="Address of the dashboard.")
    http_port: int = Field(DEFAULT_HTTP_PORT, ge=0, le=65535, description="Port of the dashboard.")
    http_names: str = Field(
        "", description="Host names, separated by commas, under which the dashboard is reached."
    )
    no_web: bool = Field(default=False, description="Do not start the dashboard.")
    read_only: bool = Field(default=False, description="The dashboard shows and changes nothing.")
    run_dir: Path = Field(default_factory=default_run_dir, description="Directory of the admin secret.")
    admin_password_file: Path | None = Field(
        None, description="File with the first admin's password; made up and shown once by default."
    )
    insecure: bool = Field(default=False, description="Allow addresses other than loopback without keys.")
    drain_seconds: float = Field(
        10.0, ge=0, le=3600, description="Longest wait for copies under way at a stop."
    )
    planned_block_size: str = Field(
        "",
        max_length=4096,
        description="Block size planned (N, or MODEL=N,...); engines with another are named.",
    )
    log_format: Literal["text", "json"] = Field("text", description="Log lines for people or for machines.")

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("extent_kib")
    @classmethod
    def _whole_pages(cls, value: int) -> int:
        if value % 4:
            raise ValueError("must be a multiple of 4, the size of a page of memory in KiB")
        return value

    @field_validator("planned_block_size", mode="before")
    @classmethod
    def _planned(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str):
            PlannedBlocks.of(text)
        return text

    @field_validator("l1_init_size_gb")
    @classmethod
    def _init_within_size(cls, value: float | None, info: ValidationInfo) -> float | None:
        size = info.data.get("l1_size_gb")
        if value is not None and size is not None and value > size:
            raise ValueError(f"it is larger than l1_size_gb={size:g}")
        return value

    @property
    def sources(self) -> dict[str, str]:
        """Where each value is from: ``flag``, ``variable``, ``file`` or ``default``."""
        return {name: self._sources.get(name, "default") for name in type(self).model_fields}

    @property
    def l1_bytes(self) -> int:
        """Size of L1 in bytes, in whole extents."""
        return max(1, int(self.l1_size_gb * GIB) // self.extent_bytes) * self.extent_bytes

    @property
    def l1_init_bytes(self) -> int:
        """Bytes populated before the daemon is ready."""
        init = self.l1_size_gb if self.l1_init_size_gb is None else self.l1_init_size_gb
        return min(self.l1_bytes, max(self.extent_bytes, int(init * GIB)))

    @property
    def extent_bytes(self) -> int:
        """Size of an extent in bytes."""
        return self.extent_kib * 1024


def load_settings(flags: dict[str, Any], config_file: Path | None = None) -> Settings:
    """The settings in force: ``flags`` (those given) over variables over the file over defaults.

    Raises:
        InvalidSettings: one sentence that names the setting, its value and what is wrong.
    """
    from_file = _read_file(config_file) if config_file is not None else {}
    # A variable outranks the file, and only init arguments outrank variables: leave out what a variable sets.
    variables = {name.upper() for name in os.environ}
    below = {
        name: value for name, value in from_file.items() if f"PAGEWARDEN_{name.upper()}" not in variables
    }
    try:
        settings = Settings(**{**below, **flags})
        settings._sources.update(_sources(flags, below, variables))  # noqa: SLF001
        return settings
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        shown = "" if name == "settings" else f" is {first.get('input')!r}"
        raise InvalidSettings(
            f"The setting '{name}'{shown}: {first['msg']}.",
            remedy="See `pagewarden server --help`.",
            field=name,
        ) from None


def _sources(flags: dict[str, Any], below: dict[str, Any], variables: set[str]) -> dict[str, str]:
    found = dict.fromkeys(below, "file")
    found |= {name: "variable" for name in Settings.model_fields if f"PAGEWARDEN_{name.upper()}" in variables}
    return found | dict.fromkeys(flags, "flag")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise InvalidSettings(f"The settings file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"The settings file {path} is not TOML: {error}.") from error
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise InvalidSettings(
            f"The settings file {path} has unknown settings: {', '.join(unknown)}.",
            remedy="Names are those of the flags with underscores.",
        )
    return values
