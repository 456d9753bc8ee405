"""Taking objects back: from the tables of an earlier boot into this boot's indexes.

The store's own primitives do it, shallow chunks before deep ones, so that what comes out is what commits would have made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.hashing import KEY_BYTES
from appliance.l1.index import NamespaceIndex
from appliance.l1.moving import used_ago
from appliance.l1.namespaces import NamespaceDescriptor
from appliance.l1.space import address_of
from appliance.l1.store import Store
from appliance.l1.taking import Taken

_Used = tuple[NamespaceIndex, NDArray[np.int64], NDArray[np.int64]]
"""Entries of one index, each once, and for how many seconds each was not used."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """Objects of all segments as one table, with their addresses and how long ago they were last used, in seconds."""

    records: NDArray[np.void]
    addresses: NDArray[np.int64]
    stored_ago: NDArray[np.float64]
    used_ago: NDArray[np.float64]


def rebuild(
    store: Store, taken: Sequence[Taken], descriptors: Mapping[bytes, NamespaceDescriptor], *, now_unix: float
) -> int:
    """Enter what was taken back into the store's indexes and its eviction policy; returns the objects entered.

    Before anybody is served. The store's clock must already be at least :func:`oldest_age` seconds on.
    """
    placed = _place(taken, now_unix)
    touched: list[_Used] = []
    for namespace, descriptor in descriptors.items():
        mine = np.flatnonzero(placed.records["namespace"] == np.void(namespace))
        if len(mine):
            touched.append(_enter(store, descriptor, placed, mine))
    for index, entries in _by_recency(touched):
        store.policy.touched(index, entries)
    return len(placed.records)


def oldest_age(taken: Sequence[Taken], now_unix: float) -> float:
    """Whole seconds in which every object was stored and used, 0 without any.

    Whole, since times in an index are: a fraction would be lost anew at each restart, and change the order in the end.
    """
    if not taken:
        return 0.0
    placed = _place(taken, now_unix)
    return float(math.ceil(max(placed.stored_ago.max(initial=0.0), placed.used_ago.max(initial=0.0))) + 1)


def _place(taken: Sequence[Taken], now_unix: float) -> _Placed:
    records = np.concatenate([each.records for each in taken])
    addresses = np.concatenate([address_of(each.segment, 0) + each.heads for each in taken])
    stored_ago = np.maximum(0.0, now_unix - records["stored_unix_ms"] / 1000.0)
    idle = np.concatenate([used_ago(each, now_unix) for each in taken])
    return _Placed(records, addresses, stored_ago, idle)


def _enter(store: Store, descriptor: NamespaceDescriptor, placed: _Placed, mine: NDArray[np.int64]) -> _Used:
    """One namespace's objects into its index."""
    index = store.make_namespace(
        descriptor.fingerprint.namespace,
        descriptor.fingerprint.model,
        descriptor.groups,
        descriptor.chunk_tokens,
    )
    # Parents first: a row is linked to its parent's when it is made.
    mine = mine[np.argsort(placed.records["chunk_index"][mine], kind="stable")]
    entries = _enter_objects(index, placed, mine, store.now_seconds)
    unique, places = np.unique(entries, return_inverse=True)
    idle = np.full(len(unique), np.inf)
    np.minimum.at(idle, places, placed.used_ago[mine])  # of an entry's shards, the one used last
    index.used_at.array[unique] = (store.now_seconds - idle).clip(min=0).astype(np.uint32)
    store.taken_back(index)
    return index, unique, idle.astype(np.int64)


def _enter_objects(
    index: NamespaceIndex, placed: _Placed, mine: NDArray[np.int64], now_seconds: int
) -> NDArray[np.int64]:
    """Make each object present; returns their entries."""
    records = placed.records[mine]
    keys, parents = records["key"].tobytes(), records["parent"].tobytes()
    columns = zip(
        range(0, len(keys), KEY_BYTES),
        records["chunk_index"].tolist(),
        records["group"].tolist(),
        records["shard"].tolist(),
        placed.addresses[mine].tolist(),
        records["extent_count"].tolist(),
        (now_seconds - placed.stored_ago[mine]).clip(min=0).astype(np.int64).tolist(),
        strict=True,
    )
    entries = []
    for at, chunk, group, shard, address, extents, stored_at in columns:
        row = index.ensure_row(keys[at : at + KEY_BYTES], parents[at : at + KEY_BYTES], chunk)
        index.set_present(row, group, shard, address, extents, stored_at)
        entries.append(index.entry(row, group))
    return np.array(entries, dtype=np.int64)


def _by_recency(touched: Sequence[_Used]) -> Iterator[tuple[NamespaceIndex, NDArray[np.int64]]]:
    """Entries of all namespaces, the longest unused first and deep chunks before shallow ones, in runs of one index."""
    if not touched:
        return
    slots = np.concatenate([np.full(len(entries), n) for n, (_, entries, _) in enumerate(touched)])
    entries = np.concatenate([entries for _, entries, _ in touched])
    idle = np.concatenate([ages for _, _, ages in touched])
    depth = np.concatenate(
        [index.chunk_index.array[each // index.group_count].astype(np.int64) for index, each, _ in touched]
    )
    order = np.lexsort((-depth, slots, -idle))
    changes = np.flatnonzero(np.diff(slots[order]) != 0) + 1
    for piece in np.split(order, changes):
        yield touched[int(slots[piece[0]])][0], entries[piece]
