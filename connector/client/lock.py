"""The lock that proves to the daemon that this process lives."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from appliance.errors import ArenaUnreachable
from appliance.protocol.arena_layout import lock_name
from appliance.protocol.liveness import take_lock


class AttachLock:
    """A POSIX record lock on a file of its own, held until the process ends or :meth:`release`.

    One object owns the file's only descriptor: opening and closing the file a second time would drop the lock.
    """

    def __init__(self, directory: Path) -> None:
        """Take a new lock in ``directory``.

        Raises:
            ArenaUnreachable: if the directory does not exist here or cannot be written.
        """
        self.attach_id = secrets.randbits(62) | 1
        self._path = directory / lock_name(self.attach_id)
        try:
            descriptor = take_lock(self._path)
        except OSError as error:
            raise ArenaUnreachable(
                f"The arena directory {directory} cannot be used by this process: {error.strerror}.",
                remedy="Mount the daemon's --arena-dir here, or name its place with pagewarden.arena_dir.",
            ) from error
        assert descriptor is not None, "a fresh random name was locked by somebody else"
        self._descriptor = descriptor

    @property
    def present(self) -> bool:
        """Whether the file still exists: somebody may have emptied the directory under us."""
        return self._path.exists()

    def release(self) -> None:
        """Drop the lock and remove the file: this process has nothing in flight."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
