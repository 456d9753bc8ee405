"""Proof of death: each attached process holds a POSIX record lock on a file of its own beside the arena.

The lock is held while its process is stopped, is released by its death even with forked children alive, and is visible
across pid namespaces. A process that *misses heartbeats* is suspect, never dead; only the lock proves death.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from appliance.protocol.arena_layout import lock_name

INLINE_ATTACH_IDS = 2**62
"""Attach ids from here on are those of inline clients: they have no lock, and only the daemon writes for them."""

# struct flock on 64-bit Linux: type, whence, start, length, pid (with the padding the ABI has).
_FLOCK = struct.Struct("hhqqi4x")


def is_inline(attach_id: int) -> bool:
    """Whether an attach id is an inline client's."""
    return attach_id >= INLINE_ATTACH_IDS


def is_alive(directory: Path, attach_id: int) -> bool:
    """Whether some process holds the lock of ``attach_id``. An unreadable file counts as alive: never guess death."""
    return is_locked(directory / lock_name(attach_id))


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file; one that cannot be read counts as locked, a missing one not."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, probe)
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK
    finally:
        os.close(descriptor)


def former_attachments(directory: Path) -> set[int]:
    """Attach ids whose lock some process holds now."""
    found = set()
    for path in directory.glob(lock_name(0).replace("0" * 16, "*")):
        digits = path.stem.removeprefix("attach-")
        if len(digits) == 16 and set(digits) <= set("0123456789abcdef") and is_locked(path):
            found.add(int(digits, 16))
    return found


def forget(directory: Path, attach_id: int) -> None:
    """Remove the lock file of a process that is proven dead or has said goodbye."""
    (directory / lock_name(attach_id)).unlink(missing_ok=True)


def take_lock(path: Path) -> int | None:
    """Create and lock a file for this process; ``None`` if another process holds it.

    The descriptor must stay open, and the file must not be opened and closed a second time by this process: that would
    drop the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        raise
    return descriptor
