"""The interface of an eviction policy. It sees chains and groups through the index, not only keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from appliance.errors import InvalidSettings
from appliance.l1.eviction.lru import LeastRecentlyUsed
from appliance.l1.index import NamespaceIndex

Entries = NDArray[np.int64]


class EvictionPolicy(Protocol):
    """Orders entries (chunk, group) of all namespaces for eviction.

    ``candidates`` yields (namespace slot, entry), first to go first. The store skips what is held or pinned; a candidate
    it skipped keeps its place in the policy's memory and comes again later.
    """

    @property
    def name(self) -> str:
        """As in ``--eviction-policy``."""

    def add_namespace(self, index: NamespaceIndex) -> None:
        """A namespace appeared; its ``slot`` names it from now on."""

    def touched(self, index: NamespaceIndex, entries: Entries) -> None:
        """These entries were used or stored, the first to go first."""

    def demoted(self, index: NamespaceIndex, entries: Entries) -> None:
        """These entries cannot be hit any more: they go before all others."""

    def removed(self, index: NamespaceIndex, entry: int) -> None:
        """This entry is in the cache no more."""

    def covers(self, index: NamespaceIndex, entries: Entries) -> NDArray[np.bool_]:
        """Whether each of these entries can still come up as a candidate; for the consistency check."""

    def candidates(self) -> Iterator[tuple[int, int]]:
        """Entries in the order in which they should go; ends after a bounded number of looks."""


def make_policy(name: str) -> EvictionPolicy:
    """The policy of a name, whatever its case.

    Raises:
        InvalidSettings: naming the policies there are.
    """
    if name.lower() == LeastRecentlyUsed.name.lower():
        return LeastRecentlyUsed()
    raise InvalidSettings(
        f"The eviction policy '{name}' does not exist.",
        remedy=f"Use {LeastRecentlyUsed.name}.",
        field="eviction_policy",
    )
