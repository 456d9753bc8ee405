"""Chunk keys: a sha-256 chain over everything that tells one prompt prefix from another.

``key[i] = sha256(key[i-1] || tokens of chunk i as little-endian uint32 || extras that overlap chunk i)`` and
``key[-1] = sha256(domain || chunk_tokens || salt || adapter)``. Keys hold no fingerprint: the same tokens have the same
key in every namespace, so that a refusal across namespaces can be seen and counted. They are the same in every
process and on every host, whatever the interpreter's hash seed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEY_BYTES = 32
_DOMAIN = b"pagewarden/chunk-key/1"
_U64 = struct.Struct("<Q")


def _framed(*parts: bytes) -> bytes:
    """Parts with their lengths, so that no two lists of parts give the same bytes."""
    return b"".join(_U64.pack(len(part)) + part for part in parts)


@dataclass(frozen=True, slots=True)
class Extra:
    """Something besides token ids that fills a span of the prompt: a medium or prompt embeddings.

    ``identity`` is the full identifier, never a shortened one; ``offset`` and ``length`` are in tokens of the prompt.
    """

    kind: str
    identity: str
    offset: int
    length: int

    def encode(self) -> bytes:
        """The bytes that enter the keys of every chunk this extra overlaps."""
        return _framed(
            self.kind.encode(), self.identity.encode(), _U64.pack(self.offset), _U64.pack(self.length)
        )


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """What belongs to the whole prompt: who may share it and which adapter computed it."""

    salt: str = ""
    adapter: str = ""
    extras: tuple[Extra, ...] = ()


class ChunkHasher:
    """The keys of one growing token sequence."""

    __slots__ = ("_chunk_tokens", "_extras", "_keys", "_root")

    def __init__(self, chunk_tokens: int, identity: PromptIdentity) -> None:
        assert chunk_tokens > 0, "a chunk of no tokens would give every prompt the same keys"
        self._chunk_tokens = chunk_tokens
        self._extras = tuple(
            sorted(
                identity.extras, key=lambda extra: (extra.offset, extra.length, extra.kind, extra.identity)
            )
        )
        self._root = hashlib.sha256(
            _framed(_DOMAIN, _U64.pack(chunk_tokens), identity.salt.encode(), identity.adapter.encode())
        ).digest()
        self._keys: list[bytes] = []

    @property
    def root(self) -> bytes:
        """The parent of the first chunk."""
        return self._root

    def keys(self, tokens: Sequence[int], chunks: int | None = None) -> list[bytes]:
        """Keys of the first ``chunks`` whole chunks of ``tokens`` (all of them by default).

        Keys already computed are kept: ``tokens`` may only have grown since the last call.
        """
        whole = len(tokens) // self._chunk_tokens
        wanted = whole if chunks is None else min(chunks, whole)
        start = len(self._keys)
        if wanted > start:
            first_token = start * self._chunk_tokens
            packed = np.asarray(tokens[first_token : wanted * self._chunk_tokens], dtype="<u4").tobytes()
            width = self._chunk_tokens * 4
            for chunk in range(start, wanted):
                begin = (chunk - start) * width
                self._keys.append(self._next(chunk, packed[begin : begin + width]))
        return self._keys[:wanted]

    def parent(self, chunk_index: int) -> bytes:
        """The key before ``chunk_index``: the root for the first chunk."""
        return self._root if chunk_index == 0 else self._keys[chunk_index - 1]

    def _next(self, chunk: int, packed_tokens: bytes) -> bytes:
        state = hashlib.sha256(self._keys[-1] if self._keys else self._root)
        state.update(packed_tokens)
        begin = chunk * self._chunk_tokens
        end = begin + self._chunk_tokens
        for extra in self._extras:
            if extra.offset < end and extra.offset + extra.length > begin:
                state.update(extra.encode())
        return state.digest()


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Keys as one byte string, the form they have on the wire."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[bytes]:
    """The keys of a byte string made by :func:`join_keys`."""
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
