"""The identity of a model's weights: what tells one checkpoint from another of the same name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 16
WHOLE_FILES = (".json", ".jinja", ".model", ".txt")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_identity(vllm_config: VllmConfig, weights_version: str) -> str:
    """What identifies the weights, or "" where nothing does; the daemon then refuses the engine and says why.

    In this order: the operator's own name for them, the seed of dummy weights, a digest of a local checkpoint's
    files, the commit of a model hub.
    """
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    if weights_version:
        return f"operator:{weights_version}"
    if load_format == "dummy":
        return f"dummy:seed={model.seed}"
    directory = Path(model.model)
    if directory.is_dir():
        return f"files:{directory_digest(directory)}"
    if directory.is_file():
        return f"files:{file_digest(directory)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"commit:{commit}" if commit else ""


def directory_digest(directory: Path) -> str:
    """Digest of a checkpoint's configuration files in whole and of its shards' names, sizes and sampled bytes.

    Reads at most 16 samples of 64 KiB from each shard, so that a checkpoint of terabytes costs milliseconds a shard.
    """
    state = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        if path.suffix in WHOLE_FILES:
            entry = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.suffix in WEIGHT_FILES:
            entry = file_digest(path)
        else:
            continue
        state.update(json.dumps([path.name, path.stat().st_size, entry]).encode())
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a large file's size and of evenly spaced samples, first and last bytes included."""
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    last = max(0, size - SAMPLE_BYTES)
    offsets = {last * step // (SAMPLES_PER_FILE - 1) for step in range(SAMPLES_PER_FILE)}
    with path.open("rb") as file:
        for offset in sorted(offsets):
            file.seek(offset)
            state.update(file.read(SAMPLE_BYTES))
    return state.hexdigest()
