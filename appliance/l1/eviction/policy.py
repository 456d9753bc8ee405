"""The interface of an eviction policy. It sees prompts, chains and groups through the index, not only keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.l1.index import NamespaceIndex, Rows

Entries = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as a lookup saw it.

    ``keys`` are those of its whole chunks, ``rows`` their rows in the index (-1: none); ``hit`` and ``attention`` are in
    chunks from the start: how much can be loaded, and how far attention alone would reach.
    """

    keys: Sequence[bytes]
    rows: Rows
    hit: int
    attention: int


class EvictionPolicy(Protocol):
    """Orders entries (chunk, group) of all namespaces for eviction, and says where a snapshot is worth its bytes.

    The store skips what is held or pinned; a candidate it skipped stays in the policy's memory and comes again later.
    """

    @property
    def name(self) -> str:
        """As in ``--eviction-policy``."""

    def add_namespace(self, index: NamespaceIndex) -> None:
        """A namespace appeared; its ``slot`` names it from now on. What it already holds is taken over."""

    def asked(self, index: NamespaceIndex, prompt: Prompt) -> Sequence[int]:
        """A prompt came, for the first time. Returns the boundaries, in chunks, that deserve a snapshot.

        The prompt's last boundary is always stored and need not be named; one at or before the hit means nothing.
        """

    def touched(self, index: NamespaceIndex, entries: Entries) -> None:
        """These entries were used or stored, the first to go first."""

    def stored(self, index: NamespaceIndex, entries: Entries) -> None:
        """The first object of each of these entries was committed, shallow chunks before deep ones."""

    def demoted(self, index: NamespaceIndex, entries: Entries) -> None:
        """These entries cannot be hit any more: they go before all others."""

    def removed(self, index: NamespaceIndex, entries: Entries) -> None:
        """These distinct entries are in the cache no more; their rows still lead to their parents."""

    def covers(self, index: NamespaceIndex, entries: Entries) -> NDArray[np.bool_]:
        """Whether each of these entries can still come up as a candidate; for the consistency check."""

    def candidates(self, extents: int) -> Iterator[tuple[int, Entries]]:
        """Batches of entries of one namespace slot, first to go first; each goes on to about so many extents.

        Ends after a bounded number of looks. The consumer takes a batch in order and may leave its rest.
        """
