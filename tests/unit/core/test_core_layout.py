"""The bytes of a segment file: every process that maps one relies on them, so a change must be meant."""

from __future__ import annotations

import itertools
import os
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from appliance.l1.extents import ExtentAllocator
from appliance.l1.segment import HeadRecord
from appliance.protocol import arena_layout as layout
from appliance.protocol.arena_layout import SegmentLayout
from tests.support.core_store import World, attention, chain, namespace_id


def offsets(dtype: np.dtype) -> dict[str, tuple[int, int]]:
    assert dtype.fields is not None
    return {name: (field[1], field[0].itemsize) for name, field in dtype.fields.items()}


def test_header_is_pinned():
    assert offsets(layout.HEADER) == {
        "magic": (0, 8),
        "layout": (8, 4),
        "clean": (12, 4),
        "nonce": (16, 16),
        "segment": (32, 4),
        "extent_count": (36, 4),
        "extent_bytes": (40, 8),
        "records_offset": (48, 8),
        "links_offset": (56, 8),
        "data_offset": (64, 8),
        "file_bytes": (72, 8),
        "boot": (80, 16),
        "boot_count": (96, 8),
        "global_clear_epoch": (104, 4),
        "epoch_rows": (108, 4),
    }
    assert layout.HEADER.itemsize == layout.HEADER_BYTES == 4096
    assert (layout.MAGIC, layout.POISONED, layout.LAYOUT_VERSION) == (b"PWARENA1", b"PWPOISON", 1)


def test_record_is_pinned():
    assert offsets(layout.RECORD) == {
        "commit_word": (0, 8),
        "key": (8, 32),
        "parent": (40, 32),
        "namespace": (72, 16),
        "salt": (88, 16),
        "length": (104, 8),
        "checksum": (112, 8),
        "attach_id": (120, 8),
        "stored_unix_ms": (128, 8),
        "clear_epoch": (136, 4),
        "extent_count": (140, 4),
        "chunk_index": (144, 4),
        "group": (148, 2),
        "shard": (150, 2),
        "state": (152, 1),
        "crc": (160, 4),
    }
    assert layout.RECORD.itemsize == layout.RECORD_BYTES == 192
    assert layout.RECORD_BYTES % 64 == 0, "a commit word would straddle two cache lines"
    assert (layout.STATE_FREE, layout.STATE_WRITING, layout.STATE_COMMITTED) == (0, 1, 2)
    assert offsets(layout.RECORD)["state"][0] == layout.STATE_OFFSET


def test_links_and_epochs_are_pinned():
    assert offsets(layout.LINK) == {"count": (0, 4), "next": (4, 4)}
    assert offsets(layout.EPOCH_ROW) == {"namespace": (0, 16), "clear_epoch": (16, 4)}
    assert (layout.LINK.itemsize, layout.EPOCH_ROW.itemsize) == (8, 32)
    assert (layout.LINK_BYTES, layout.MAX_EPOCH_ROWS, layout.NO_LINK) == (8, 2048, 0xFFFFFFFF)


def test_names_and_words_are_pinned():
    assert layout.lock_name(0xABC) == "attach-0000000000000abc.lock"
    assert layout.segment_name(bytes(range(16)), 3) == "segment-000102030405060708090a0b0c0d0e0f-0003.arena"
    assert layout.word_of(5, committed=True) == 11
    assert layout.word_of(5, committed=False) == 10


@given(st.integers(1, 10_000), st.sampled_from([4096, 65536, 262144]))
@settings(max_examples=60, deadline=None)
def test_regions_follow_one_another_without_overlap(extents, extent_bytes):
    shape = SegmentLayout(extents, extent_bytes)
    assert shape.records_offset == 4096 + 65536
    assert shape.record_offset(extents) == shape.links_offset
    assert shape.links_offset + extents * 8 <= shape.data_offset
    assert shape.data_offset % (2 << 20) == 0
    assert shape.data_offset - (shape.links_offset + extents * 8) < 2 << 20
    assert shape.extent_offset(extents) == shape.file_bytes
    assert shape.record_offset(0) % 64 == 0, "commit words must be aligned"


def test_records_as_packed_read_back_field_by_field():
    record = HeadRecord(
        key=b"k" * 32,
        parent=b"p" * 32,
        namespace=b"n" * 16,
        salt=b"s" * 16,
        length=2**40 + 1,
        checksum=2**64 - 1,
        attach_id=2**63 - 1,
        stored_unix_ms=1_800_000_000_123,
        clear_epoch=2**32 - 1,
        extent_count=2**32 - 2,
        chunk_index=2**32 - 3,
        group=63,
        shard=62,
        state=layout.STATE_COMMITTED,
    )
    raw = record.pack(layout.word_of(7, committed=True))
    assert len(raw) == layout.RECORD_BYTES
    read = np.frombuffer(raw, dtype=layout.RECORD)[0]
    assert int(read["commit_word"]) == 15
    for name in ("key", "parent", "namespace", "salt"):
        assert read[name].tobytes() == getattr(record, name)
    for name in HeadRecord.__slots__[4:]:
        assert int(read[name]) == getattr(record, name), name
    assert int(read["crc"]) == zlib.crc32(raw[8:160])
    assert raw[164:] == bytes(28)


def test_a_committed_object_stands_in_the_file_as_documented():
    world = World(segments=(8,))
    try:
        index = world.namespace(5, attention(0, shards=2))
        keys = chain(1, 2)
        world.put(index, keys, 1, 0, 1, length=3 * 4096 - 5)
        path = world.arena.spaces[0].segment.path
        raw = path.read_bytes()
        header = np.frombuffer(raw[:4096], dtype=layout.HEADER)[0]
        shape = SegmentLayout(int(header["extent_count"]), int(header["extent_bytes"]))
        assert len(raw) == shape.file_bytes == int(header["file_bytes"])
        record = np.frombuffer(raw[shape.record_offset(0) :][:192], dtype=layout.RECORD)[0]
        assert record["key"].tobytes() == keys[1]
        assert record["parent"].tobytes() == keys[0]
        assert record["namespace"].tobytes().hex() == namespace_id(5)
        assert (int(record["commit_word"]), int(record["shard"]), int(record["length"])) == (1, 1, 12283)
        link = np.frombuffer(raw[shape.links_offset :][:8], dtype=layout.LINK)[0]
        assert (int(link["count"]), int(link["next"])) == (3, layout.NO_LINK)
        assert os.stat(path).st_mode & 0o077 == 0, "cached bytes are nobody else's to read"
    finally:
        world.close()


# --- extents ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_an_extent_is_free_or_handed_out_never_both(steps):
    allocator = ExtentAllocator(40)
    allocator.release([(0, 40)])
    out: list[list[tuple[int, int]]] = []
    for take, count in steps:
        if take or not out:
            runs = allocator.allocate(count)
            owned = {e for each in out for first, n in each for e in range(first, first + n)}
            assert (runs is None) == (40 - len(owned) < count)
            if runs is not None:
                mine = [e for first, n in runs for e in range(first, first + n)]
                assert mine == sorted(set(mine)), "runs ascend"
                assert len(mine) == count
                assert not owned & set(mine)
                assert all(b[0] > a[0] + a[1] for a, b in itertools.pairwise(runs)), "runs are whole"
                out.append(runs)
        else:
            allocator.release(out.pop(count % len(out)))
        free = 40 - sum(n for each in out for _, n in each)
        assert allocator.free_extents == free
        assert sum(allocator.is_free(extent) for extent in range(40)) == free


def test_freeing_twice_is_caught_before_two_objects_share_memory():
    allocator = ExtentAllocator(8)
    allocator.release([(0, 8)])
    runs = allocator.allocate(2)
    assert runs == [(0, 2)]
    allocator.release(runs)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.release(runs)
    assert allocator.allocate(9) is None
    assert allocator.allocate(0) is None
