"""The fingerprint: the canonical record of everything that changes page bytes.

The record is a tree of maps, lists, strings, integers, floats, booleans and nulls. Its digest is the *namespace*: two
engines share bytes if and only if their records are equal, field by field. The scheduler knows the engine-wide part,
each worker knows the part of its layers (the attention backend and kernel block size are known there only), and the
daemon adds the chunk size it negotiated.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.errors import PartialFingerprint, RanksDisagree

FORMAT = 1
NAMESPACE_BYTES = 16

REQUIRED_FIELDS: tuple[str, ...] = (
    "model.name",
    "model.architecture",
    "model.weights",
    "model.dtype",
    "model.config",
    "cache.dtype",
    "cache.layout",
    "engine.name",
    "engine.version",
    "engine.platform",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.decode_context",
    "draft",
    "pages.layout",
    "pages.checksum",
)
"""Paths that every engine-wide record has, with a value that is neither null nor empty."""

REQUIRED_GROUP_FIELDS: tuple[str, ...] = ("kind", "block_tokens", "page_bytes", "spec")
REQUIRED_LAYER_FIELDS: tuple[str, ...] = (
    "backend",
    "kernel_block_tokens",
    "dtype",
    "shape",
    "strides",
    "page_bytes",
)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two records differ; an absent field has the value ``None``."""

    field: str
    ours: Any
    theirs: Any


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """A complete record with its canonical text and namespace; compare namespaces, not records."""

    record: Mapping[str, Any]
    canonical: str
    namespace: str

    @property
    def model(self) -> str:
        """The model's name: namespaces are compared within one model."""
        return str(self.record["model"]["name"])

    def fields(self) -> dict[str, Any]:
        """The record's leaves by their dotted path."""
        return dict(flatten(self.record))


def canonical_text(record: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces; equal records give equal text in every process.

    Raises:
        PartialFingerprint: if a value has no canonical form.
    """
    _check_value("", record)
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _check_value(path: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise PartialFingerprint(
                    f"The fingerprint has the key {key!r} under '{path}', which is no string."
                )
            _check_value(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            _check_value(f"{path}[{position}]", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise PartialFingerprint(f"The fingerprint field '{path}' is {value}, which equals nothing.")
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        raise PartialFingerprint(
            f"The fingerprint field '{path}' is a {type(value).__name__}, which has no canonical form."
        )


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a record by dotted path; empty maps and lists are leaves, so that they are compared too."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from flatten(value[key], f"{path}.{key}" if path else str(key))
    elif (
        isinstance(value, (list, tuple))
        and value
        and any(isinstance(inner, (Mapping, list, tuple)) for inner in value)
    ):
        for position, inner in enumerate(value):
            yield from flatten(inner, f"{path}[{position}]")
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[FieldDifference]:
    """Every field in which two records differ, in path order."""
    left, right = dict(flatten(ours)), dict(flatten(theirs))
    absent = object()
    return [
        FieldDifference(path, left.get(path), right.get(path))
        for path in sorted(left.keys() | right.keys())
        if not _same(left.get(path, absent), right.get(path, absent))
    ]


def _same(ours: Any, theirs: Any) -> bool:
    """Equal in canonical text, where 1, 1.0 and true are three values."""
    return type(ours) is type(theirs) and ours == theirs and repr(ours) == repr(theirs)


def merge_layers(per_rank: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The layers of all ranks as one map: pipeline ranks bring different layers, tensor ranks the same ones.

    Raises:
        RanksDisagree: if two ranks describe the same layer differently.
    """
    merged: dict[str, dict[str, Any]] = {}
    owner: dict[str, int] = {}
    for rank in sorted(per_rank):
        for name, facts in per_rank[rank].items():
            fields = [entry.field for entry in differences(merged[name], facts)] if name in merged else []
            if fields:
                raise RanksDisagree(
                    f"Ranks {owner[name]} and {rank} describe layer '{name}' differently in {', '.join(fields)}.",
                    remedy="Start every rank of the engine with the same settings.",
                    layer=name,
                    fields=fields,
                )
            merged[name] = dict(facts)
            owner.setdefault(name, rank)
    return merged


def assemble(
    engine_facts: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layers: Mapping[str, Mapping[str, Any]],
    chunk_tokens: int,
) -> Fingerprint:
    """The whole record and its namespace.

    Raises:
        PartialFingerprint: naming the first required field that is missing, null or empty.
    """
    record: dict[str, Any] = {
        **engine_facts,
        "format": FORMAT,
        "chunk_tokens": chunk_tokens,
        "groups": [dict(group) for group in groups],
        "layers": {name: dict(facts) for name, facts in layers.items()},
    }
    _require_complete(record)
    text = canonical_text(record)
    namespace = hashlib.sha256(text.encode()).hexdigest()[: NAMESPACE_BYTES * 2]
    return Fingerprint(record=json.loads(text), canonical=text, namespace=namespace)


def _require_complete(record: Mapping[str, Any]) -> None:
    for path in REQUIRED_FIELDS:
        _require(record, path, path)
    _require(record, "groups", "groups")
    _require(record, "layers", "layers")
    for position, group in enumerate(record["groups"]):
        for name in REQUIRED_GROUP_FIELDS:
            _require(group, name, f"groups[{position}].{name}")
        if type(group["page_bytes"]) is not int or group["page_bytes"] < 1:
            raise PartialFingerprint(
                f"The fingerprint field 'groups[{position}].page_bytes' is {group['page_bytes']!r}; it counts bytes.",
                field=f"groups[{position}].page_bytes",
            )
    for layer, facts in record["layers"].items():
        for name in REQUIRED_LAYER_FIELDS:
            _require(facts, name, f"layers.{layer}.{name}")


def _require(record: Mapping[str, Any], path: str, shown: str) -> None:
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None or value in ("", [], {}):
        raise PartialFingerprint(
            f"The fingerprint field '{shown}' is missing or empty.",
            remedy="An engine that cannot say what its bytes are is served nothing; use a connector of this version.",
            field=shown,
        )
