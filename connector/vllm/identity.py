"""Who may share a request's chunks: its salt, its adapter and its media, as they enter the chunk keys."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.hashing import Extra, PromptIdentity
from connector.vllm.weights import directory_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


FileStates = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change (ns) of each file of a directory."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter as it was when it was digested."""

    files: FileStates
    identity: str


class IdentityReader:
    """Reads identities of requests. An adapter is digested once, and again when it is loaded again."""

    def __init__(self, salt: str) -> None:
        self._salt = salt
        self._adapters: dict[tuple[str, str, int, bool], _Adapter] = {}

    def identity(self, request: Request) -> PromptIdentity | None:
        """The request's identity, or None where it holds something that cannot be named: it is then not cached."""
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            return None
        adapter = ""
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request)
            if not adapter:
                return None
        extras = []
        for feature in request.mm_features:
            if not feature.identifier:
                return None
            place = feature.mm_position
            extras.append(Extra(f"media:{feature.modality}", feature.identifier, place.offset, place.length))
        return PromptIdentity(salt=self.salt_of(request), adapter=adapter, extras=tuple(extras))

    def salt_of(self, request: Request) -> str:
        """The engine's salt and the request's own, told apart by their lengths."""
        own = request.cache_salt or ""
        return f"{len(self._salt)}:{self._salt}{own}" if self._salt or own else ""

    def _adapter(self, lora: LoRARequest) -> str:
        """The adapter's name, path, layout and digest, or "" where its content is not certain.

        When files change under an adapter that is in use, vLLM computes with the old ones as long as it keeps it in memory
        and with the new ones after that. So they have no name until they are loaded in place.
        """
        key = (lora.lora_name, lora.lora_path, lora.lora_int_id, lora.is_3d_lora_weight)
        directory = Path(lora.lora_path)
        files = _file_states(directory)
        if not files:
            return ""
        known = self._adapters.get(key)
        if known is None or (lora.load_inplace and known.files != files):
            parts = [*key[:2], lora.is_3d_lora_weight, directory_digest(directory)]
            known = self._adapters[key] = _Adapter(files, json.dumps(parts))
        return known.identity if known.files == files else ""


def _file_states(directory: Path) -> FileStates:
    """What tells that a directory's files are still the same; nothing where there is no such directory."""
    try:
        entries = [(path.name, path.stat()) for path in directory.iterdir() if path.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in entries))


def salt_label(salt: str) -> bytes:
    """The tenant's label in the daemon's records: never the salt itself."""
    return hashlib.sha256(salt.encode()).digest()[:16] if salt else b""
