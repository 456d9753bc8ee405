"""Who may share a request's chunks: its salt, its adapter and its media, as they enter the chunk keys."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.hashing import Extra, PromptIdentity
from connector.vllm.weights import directory_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


class IdentityReader:
    """Reads identities of requests. Adapters are digested once."""

    def __init__(self, salt: str) -> None:
        self._salt = salt
        self._adapters: dict[tuple[str, str, int], str] = {}

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
        """The adapter's name, path and digest. vLLM reads an adapter once unless told to load it again, and so do we."""
        key = (lora.lora_name, lora.lora_path, lora.lora_int_id)
        if lora.load_inplace or key not in self._adapters:
            directory = Path(lora.lora_path)
            digest = directory_digest(directory) if directory.is_dir() else ""
            self._adapters[key] = f"{lora.lora_name}|{lora.lora_path}|{digest}" if digest else ""
        return self._adapters[key]


def salt_label(salt: str) -> bytes:
    """The tenant's label in the daemon's records: never the salt itself."""
    return hashlib.sha256(salt.encode()).digest()[:16] if salt else b""
