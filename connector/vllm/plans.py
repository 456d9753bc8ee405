"""Which blocks of a request's tables make which objects: for a load after a hit, and for a save of whole chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from appliance.geometry import GroupKind, ObjectGroup
from connector.client import LoadItem, SaveItem

NULL_BLOCK = 0
"""vLLM's block that belongs to nobody. In a load it receives the pages that the request already has."""

BlockTables = Sequence[Sequence[int]]


class UnusableTable(Exception):
    """vLLM's block table lacks a block that the load needs."""


def load_items(
    groups: Sequence[ObjectGroup],
    tables: BlockTables,
    *,
    chunk_tokens: int,
    local_tokens: int,
    hit_chunks: int,
) -> list[LoadItem]:
    """The objects that bring a request from its local hit to `hit_chunks`.

    Blocks below `local_tokens` may be in use by other requests and are not written: their pages go to the null block.

    Raises:
        UnusableTable: naming the group whose table has no block at the boundary.
    """
    items = []
    for group in groups:
        table = tables[group.index]
        if group.kind is GroupKind.RECURRENT:
            place = hit_chunks * chunk_tokens // group.unit_tokens - 1
            if place >= len(table) or table[place] == NULL_BLOCK:
                raise UnusableTable(
                    f"{group.name} has no block for the state at token {hit_chunks * chunk_tokens}"
                )
            items.append(LoadItem(group.index, hit_chunks - 1, (table[place],)))
            continue
        first = local_tokens // chunk_tokens
        if group.kind is GroupKind.SLIDING:
            first = max(first, hit_chunks - group.window_chunks(chunk_tokens))
        for chunk in range(first, hit_chunks):
            block_ids = _chunk_blocks(group, table, chunk, chunk_tokens)
            if len(block_ids) < group.blocks_per_object(chunk_tokens):
                raise UnusableTable(f"{group.name} has no block for chunk {chunk}")
            begin = chunk * chunk_tokens
            wanted = tuple(
                NULL_BLOCK if begin + position * group.unit_tokens < local_tokens else block_id
                for position, block_id in enumerate(block_ids)
            )
            if group.kind is GroupKind.ATTENTION and NULL_BLOCK in block_ids:
                raise UnusableTable(f"{group.name} has a null block in chunk {chunk}")
            if any(wanted):
                items.append(LoadItem(group.index, chunk, wanted))
    return items


def save_items(
    groups: Sequence[ObjectGroup],
    tables: BlockTables,
    keys: Sequence[bytes],
    root: bytes,
    *,
    chunk_tokens: int,
    first_chunk: int,
) -> Iterator[SaveItem]:
    """The attention and sliding objects of the chunks from `first_chunk` to the last key.

    A chunk that a sliding window has partly left has null blocks and is not stored.
    """
    for chunk in range(first_chunk, len(keys)):
        for group in groups:
            if group.kind is GroupKind.RECURRENT:
                continue
            block_ids = _chunk_blocks(group, tables[group.index], chunk, chunk_tokens)
            if len(block_ids) == group.blocks_per_object(chunk_tokens) and NULL_BLOCK not in block_ids:
                parent = keys[chunk - 1] if chunk else root
                yield SaveItem(group.index, chunk, keys[chunk], parent, block_ids)


def _chunk_blocks(group: ObjectGroup, table: Sequence[int], chunk: int, chunk_tokens: int) -> tuple[int, ...]:
    count = group.blocks_per_object(chunk_tokens)
    return tuple(table[chunk * count : (chunk + 1) * count])
