"""Finding a config.json: a file, a model's directory, or a name in the local hub cache. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ModelConfigUnreadable

MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A parsed configuration, where it was found, and what to call the model in a command."""

    values: dict[str, Any]
    found_at: str
    model: str


def read_model_config(source: str) -> ModelConfig:
    """The configuration that ``source`` names.

    Raises:
        ModelConfigUnreadable: saying where it was looked for, and what to give instead.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return ModelConfig(
            parse_config(_read(path / "config.json"), source), str(path / "config.json"), source
        )
    if path.is_file():
        values = parse_config(_read(path), source)
        return ModelConfig(values, source, str(values.get("_name_or_path") or ""))
    cached = _in_hub_cache(source)
    if cached is None:
        raise ModelConfigUnreadable(
            f"'{source}' is neither a file nor a directory, and no model of that name is in the hub cache "
            f"{hub_cache()}.",
            remedy="Give the path of a config.json or of the model's directory, or download the model's config.json first.",
            source=source,
        )
    return ModelConfig(parse_config(_read(cached), source), str(cached), source)


def parse_config(text: str, source: str) -> dict[str, Any]:
    """The JSON object of a configuration.

    Raises:
        ModelConfigUnreadable: if it is no JSON object.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelConfigUnreadable(f"'{source}' is not JSON: {error}.", source=source) from error
    if not isinstance(values, dict):
        raise ModelConfigUnreadable(
            f"'{source}' holds a JSON {type(values).__name__}; a model's configuration is an object.",
            source=source,
        )
    return values


def hub_cache() -> Path:
    """Where the hub keeps models on this machine, by the hub's own variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


def _in_hub_cache(name: str) -> Path | None:
    """The config.json of the revision that ``main`` points to, else of the newest one there."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    if name.count("/") != 1 or not folder.is_dir():
        return None
    main = folder / "refs" / "main"
    if main.is_file():
        pointed = folder / "snapshots" / main.read_text().strip() / "config.json"
        if pointed.is_file():
            return pointed
    found = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelConfigUnreadable(
                f"'{path}' is larger than {MAX_CONFIG_BYTES >> 20} MiB; that is no config.json.",
                source=str(path),
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelConfigUnreadable(f"'{path}' cannot be read: {reason}.", source=str(path)) from error
