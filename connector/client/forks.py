"""A forked child must not touch its parent's sockets, threads or locks: every client turns into "miss" there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that must be told that it woke up in a forked child."""

    def after_fork_in_child(self) -> None:
        """From now on answer everything with a miss."""


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(client: Forkable) -> None:
    """Have ``client`` told in every child that this process forks."""
    _known.add(client)


def _tell() -> None:
    for client in list(_known):
        client.after_fork_in_child()


os.register_at_fork(after_in_child=_tell)
