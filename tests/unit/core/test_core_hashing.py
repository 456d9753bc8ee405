"""Chunk keys: the same everywhere, and different wherever two prompts are."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from hashlib import sha256

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from appliance.hashing import KEY_BYTES, ChunkHasher, Extra, PromptIdentity, join_keys, split_keys

CHUNK = 4
TOKENS = list(range(100, 100 + 6 * CHUNK + 2))
MEDIA = (Extra("image", "a" * 64, 2, 3), Extra("audio", "b" * 64, 13, 6))
IDENTITY = PromptIdentity(salt="tenant", adapter="lora-1", extras=MEDIA)


def keys(tokens: list[int] = TOKENS, identity: PromptIdentity = IDENTITY, chunk: int = CHUNK) -> list[bytes]:
    return ChunkHasher(chunk, identity).keys(tokens)


def first_difference(ours: list[bytes], theirs: list[bytes]) -> int:
    """The first chunk whose keys differ; from there on all must."""
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    at = same.index(False) if False in same else len(same)
    assert not any(same[at:]), "a chain never joins again"
    return at


def test_pinned():
    """A changed key format would silently lose every cache: change it on purpose only."""
    assert keys()[0].hex() == "a90707c2b68cd36d53716f584c44b1a6395ab443eccdcd495b03bb94f39ac5ba"
    assert keys()[-1].hex() == "af188f2aa5d833ad9770eaa46a61c14816ebbce0ae10af424de927bb85d8ecb1"
    assert len(keys()) == 6
    assert {len(key) for key in keys()} == {KEY_BYTES}


def test_keys_follow_their_definition():
    def framed(*parts: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(part)) + part for part in parts)

    parent = sha256(
        framed(b"pagewarden/chunk-key/1", struct.pack("<Q", CHUNK), b"tenant", b"lora-1")
    ).digest()
    assert parent == ChunkHasher(CHUNK, IDENTITY).root
    encoded = [
        framed(
            each.kind.encode(),
            each.identity.encode(),
            struct.pack("<Q", each.offset),
            struct.pack("<Q", each.length),
        )
        for each in MEDIA
    ]
    overlapping = [[0], [0], [], [1], [1], []]
    for chunk, key in enumerate(keys()):
        tokens = struct.pack("<4I", *TOKENS[chunk * CHUNK : (chunk + 1) * CHUNK])
        parent = sha256(parent + tokens + b"".join(encoded[each] for each in overlapping[chunk])).digest()
        assert key == parent


@pytest.mark.parametrize("seed", ["0", "1", "424242"])
def test_same_in_every_process(seed):
    program = (
        "from appliance.hashing import *\n"
        "i = PromptIdentity('tenant', 'lora-1', (Extra('image', 'a' * 64, 2, 3), Extra('audio', 'b' * 64, 13, 6)))\n"
        "print(join_keys(ChunkHasher(4, i).keys(list(range(100, 126)))).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.strip() == join_keys(keys()).hex()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=5))
@settings(max_examples=100, deadline=None)
def test_incremental_is_the_same_as_at_once(tokens, stops):
    whole = keys(tokens)
    growing = ChunkHasher(CHUNK, IDENTITY)
    for stop in sorted(stops):
        part = growing.keys(tokens[:stop])
        assert part == whole[: len(part)]
    assert growing.keys(tokens) == whole
    assert growing.keys(tokens, 1) == whole[:1]


def test_token_containers_do_not_matter():
    assert keys() == ChunkHasher(CHUNK, IDENTITY).keys(tuple(TOKENS))
    assert keys() == ChunkHasher(CHUNK, IDENTITY).keys(np.array(TOKENS))


def test_partial_chunks_have_no_key_and_parents_form_the_chain():
    hasher = ChunkHasher(CHUNK, IDENTITY)
    assert hasher.keys(TOKENS[:3]) == []
    found = hasher.keys(TOKENS, chunks=2)
    assert len(found) == 2
    assert hasher.parent(0) == hasher.root
    assert hasher.parent(1) == found[0]


@given(st.integers(0, 6 * CHUNK - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_token_changes_the_keys_from_its_chunk_on(at, token):
    changed = list(TOKENS)
    changed[at] = token
    expected = 6 if token == TOKENS[at] else at // CHUNK
    assert first_difference(keys(), keys(changed)) == expected


@pytest.mark.parametrize(
    "identity",
    [
        dataclasses.replace(IDENTITY, salt="tenan"),
        dataclasses.replace(IDENTITY, salt=""),
        dataclasses.replace(IDENTITY, adapter="lora-2"),
        dataclasses.replace(IDENTITY, salt="tenantlora-1", adapter=""),
        dataclasses.replace(IDENTITY, salt="lora-1", adapter="tenant"),
    ],
)
def test_salt_and_adapter_change_every_key(identity):
    assert first_difference(keys(), keys(identity=identity)) == 0
    assert ChunkHasher(CHUNK, identity).root != ChunkHasher(CHUNK, IDENTITY).root


def test_chunk_size_changes_every_key():
    assert not set(keys()) & set(keys(chunk=2 * CHUNK))


def with_second(**changes: object) -> PromptIdentity:
    return dataclasses.replace(IDENTITY, extras=(MEDIA[0], dataclasses.replace(MEDIA[1], **changes)))


@pytest.mark.parametrize(
    "identity, first",
    [
        (with_second(identity="b" * 60 + "bbbc"), 3),
        (with_second(identity="cbbb" + "b" * 60), 3),
        (with_second(identity="b" * 63), 3),
        (with_second(kind="video"), 3),
        (with_second(offset=14), 3),
        (with_second(offset=12), 3),
        (with_second(offset=9), 2),
        (with_second(length=7), 3),
        (with_second(offset=16), 3),
        (dataclasses.replace(IDENTITY, extras=MEDIA[:1]), 3),
        (dataclasses.replace(IDENTITY, extras=()), 0),
        (dataclasses.replace(IDENTITY, extras=(*MEDIA, Extra("image", "c", 21, 1))), 5),
    ],
)
def test_media_change_the_keys_of_the_chunks_they_overlap(identity, first):
    assert first_difference(keys(), keys(identity=identity)) == first


def test_identifiers_that_differ_only_in_their_last_or_first_bits():
    base = "%064x" % (1 << 200)
    last, first = "%064x" % ((1 << 200) + 0xBEEF), "beef" + base[4:]
    found = {keys(identity=with_second(identity=each))[3] for each in (base, last, first)}
    assert len(found) == 3


def test_swapped_media_are_another_prompt():
    one, two = Extra("image", "a" * 64, 4, 4), Extra("image", "b" * 64, 8, 4)
    swapped = dataclasses.replace(one, identity=two.identity), dataclasses.replace(two, identity=one.identity)
    ours = keys(identity=PromptIdentity(extras=(one, two)))
    assert first_difference(ours, keys(identity=PromptIdentity(extras=swapped))) == 1


def test_order_in_which_media_are_named_does_not_matter():
    extras = (*MEDIA, Extra("image", "x", 2, 5), Extra("image", "x", 2, 6))
    ours = keys(identity=PromptIdentity(extras=extras))
    assert ours == keys(identity=PromptIdentity(extras=extras[::-1]))


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), min_size=2, max_size=2, unique=True))
@settings(max_examples=80, deadline=None)
def test_parts_cannot_be_shifted_into_one_another(pairs):
    (salt, adapter), (salt2, adapter2) = pairs
    assert (
        keys(identity=PromptIdentity(salt, adapter))[0] != keys(identity=PromptIdentity(salt2, adapter2))[0]
    )
    ours = PromptIdentity(extras=(Extra(salt, adapter, 0, 4),))
    theirs = PromptIdentity(extras=(Extra(salt2, adapter2, 0, 4),))
    assert keys(identity=ours)[0] != keys(identity=theirs)[0]


def test_joined_keys_come_apart_again():
    assert split_keys(join_keys(keys())) == keys()
    assert split_keys(b"") == []
