"""The catalog's object rows against the index. They are written behind, so a difference is a note, never a finding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from appliance.catalog.queries import CatalogReader, ObjectKey, ObjectRecord
from appliance.check.findings import Findings, entry_name
from appliance.check.looks import Looks
from appliance.errors import CatalogUnavailable
from appliance.l1.space import split_address
from appliance.l1.store import Store

PAGE = 500
WAIT_SECONDS = 5.0
WAIT_STEP_SECONDS = 0.05


@dataclass(slots=True)
class _Tally:
    matching: int = 0
    stale: int = 0
    example: str = ""


def check_catalog(
    store: Store, path: Path, queued: Callable[[], int], looks: Looks, findings: Findings
) -> None:
    """Wait, bounded, for the writer's queue, then read the object rows page by page."""
    deadline = time.monotonic() + WAIT_SECONDS
    while queued() and time.monotonic() < deadline:
        time.sleep(WAIT_STEP_SECONDS)
    waiting = queued()
    if waiting:
        findings.note(f"The catalog's object rows were not compared: {waiting} rows wait to be written.")
        return
    reader = CatalogReader(path)
    try:
        for namespace in looks.take(lambda: list(store.namespaces)):
            _check_namespace(store, reader, namespace, looks, findings)
    except CatalogUnavailable as error:
        findings.note(f"The catalog's object rows were not compared: {error.message}")


def _check_namespace(
    store: Store, reader: CatalogReader, namespace: str, looks: Looks, findings: Findings
) -> None:
    tally = _Tally()
    after: ObjectKey | None = None
    while rows := reader.objects(namespace, after=after, limit=PAGE):
        findings.checked["catalog_rows"] += len(rows)
        looks.take(partial(_tally, store, rows, tally))
        after = rows[-1].key
    stored = looks.take(lambda: sum(totals.objects for totals in store.namespaces[namespace].totals))
    if tally.stale:
        findings.note(
            f"{tally.stale} object rows of namespace {namespace} in the catalog name what is not cached (first: "
            f"{tally.example}); the projection is behind."
        )
    if tally.matching < stored:
        findings.note(
            f"{stored - tally.matching} cached objects of namespace {namespace} have no row in the catalog; the "
            "projection is behind, or rows were dropped."
        )


def _tally(store: Store, rows: list[ObjectRecord], tally: _Tally) -> None:
    for each in rows:
        index = store.namespaces[each.namespace]
        row = index.find(each.chunk_key)
        address = -1
        if row >= 0 and each.group_index < index.group_count:
            bit = index.present.view[index.entry(row, each.group_index)] >> each.shard & 1
            address = index.address(row, each.group_index, each.shard) if bit else -1
        if address >= 0:
            segment, extent = split_address(address)
            space = store.arena.spaces[segment]
            if (space.lengths[extent], space.checksums[extent]) == (each.bytes, each.checksum):
                tally.matching += 1
                continue
        tally.stale += 1
        tally.example = tally.example or entry_name(index.namespace, each.chunk_key, each.group_index)
