"""What a namespace's objects are, kept beside the arena: without it a record's group and shard mean nothing.

One small file a namespace, written when it is settled and so before the first object of it can be stored. Each proves
itself: the namespace is the digest of the fingerprint in it, and the groups must say what the fingerprint says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from appliance.errors import PagewardenError
from appliance.fingerprint import NAMESPACE_BYTES, Fingerprint
from appliance.geometry import GroupKind, ObjectGroup, check_groups

_log = structlog.get_logger(__name__)

NAMESPACE_FILES = "namespace-*.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class NamespaceDescriptor:
    """Everything that an index of the namespace is made of."""

    fingerprint: Fingerprint
    groups: tuple[ObjectGroup, ...]
    chunk_tokens: int

    @property
    def namespace(self) -> bytes:
        """As records have it."""
        return bytes.fromhex(self.fingerprint.namespace)

    def to_text(self) -> str:
        """The file's content: one line of JSON."""
        groups = [
            {
                "name": group.name,
                "kind": group.kind.value,
                "block_tokens": group.block_tokens,
                "shards": group.shards,
                "replicas": group.replicas,
                "context_shards": group.context_shards,
                "window_tokens": group.window_tokens,
                "absent_shards": list(group.absent_shards),
            }
            for group in self.groups
        ]
        return json.dumps(
            {
                "format": FORMAT,
                "chunk_tokens": self.chunk_tokens,
                "groups": groups,
                "fingerprint": self.fingerprint.canonical,
            }
        )


def parse_descriptor(namespace: str, text: str) -> NamespaceDescriptor:
    """The descriptor of ``namespace`` from its file's content.

    Raises:
        ValueError: if it is not what it says it is.
    """
    try:
        content = json.loads(text)
        canonical = str(content["fingerprint"])
        record = json.loads(canonical)
        groups = tuple(_group(number, each) for number, each in enumerate(content["groups"]))
        chunk_tokens = int(content["chunk_tokens"])
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, this daemon reads {FORMAT}")
        if hashlib.sha256(canonical.encode()).hexdigest()[: NAMESPACE_BYTES * 2] != namespace:
            raise ValueError("its fingerprint is that of another namespace")
        if record["chunk_tokens"] != chunk_tokens or not _agree(groups, record["groups"]):
            raise ValueError("its groups are not those of its fingerprint")
        check_groups(groups)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__}: {error})") from error
    except PagewardenError as error:
        raise ValueError(str(error)) from error
    return NamespaceDescriptor(Fingerprint(record, canonical, namespace), groups, chunk_tokens)


def _group(number: int, content: dict[str, Any]) -> ObjectGroup:
    return ObjectGroup(
        index=number,
        name=str(content["name"]),
        kind=GroupKind(content["kind"]),
        block_tokens=int(content["block_tokens"]),
        shards=int(content["shards"]),
        replicas=int(content["replicas"]),
        context_shards=int(content["context_shards"]),
        window_tokens=int(content["window_tokens"]),
        absent_shards=tuple(int(shard) for shard in content["absent_shards"]),
    )


def _agree(groups: Sequence[ObjectGroup], facts: Sequence[dict[str, Any]]) -> bool:
    return len(groups) == len(facts) and all(
        (
            group.kind.value,
            group.block_tokens,
            group.shards,
            group.context_shards,
            group.window_tokens,
            list(group.absent_shards),
        )
        == (
            told["kind"],
            told["block_tokens"],
            told["shards"],
            told["context_shards"],
            told["window_tokens"],
            told["absent_shards"],
        )
        for group, told in zip(groups, facts, strict=True)
    )


@dataclass(slots=True)
class NamespaceFiles:
    """The descriptors of one arena directory. ``undescribed`` are namespaces whose file could not be written."""

    directory: Path
    described: set[str] = field(default_factory=set)
    undescribed: set[str] = field(default_factory=set)

    def describe(self, descriptor: NamespaceDescriptor) -> bool:
        """Keep a namespace; ``False``, and logged, if the mount is full: a restart would then lose its objects."""
        namespace = descriptor.fingerprint.namespace
        if namespace in self.described:
            return True
        path = self._path(namespace)
        unfinished = path.with_suffix(".unfinished")
        try:
            unfinished.write_text(descriptor.to_text())
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if namespace not in self.undescribed:
                _log.error(
                    "a namespace cannot be described; a restart will lose its objects",
                    namespace=namespace,
                    error=error.strerror,
                )
            self.undescribed.add(namespace)
            return False
        self.described.add(namespace)
        self.undescribed.discard(namespace)
        return True

    def read(self) -> tuple[dict[bytes, NamespaceDescriptor], dict[str, str]]:
        """Descriptors by namespace, and for each file that is none why, in words."""
        found: dict[bytes, NamespaceDescriptor] = {}
        refused: dict[str, str] = {}
        for path in sorted(self.directory.glob(NAMESPACE_FILES)):
            try:
                descriptor = parse_descriptor(path.stem.removeprefix("namespace-"), path.read_text())
            except (ValueError, OSError) as error:
                refused[path.name] = str(error)
                continue
            found[descriptor.namespace] = descriptor
        return found, refused

    def keep_only(self, namespaces: set[str]) -> None:
        """Remove the files of all other namespaces: nothing of them is in the arena."""
        for path in self.directory.glob("namespace-*"):
            if path.suffix != ".json" or path.stem.removeprefix("namespace-") not in namespaces:
                path.unlink(missing_ok=True)
        self.described = {each for each in namespaces if self._path(each).exists()}

    def _path(self, namespace: str) -> Path:
        return self.directory / f"namespace-{namespace}.json"
