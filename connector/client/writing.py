"""Which reservations a copy thread is writing to right now, and which of them were taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence


class Writing:
    """Shared by the copy thread and the IO thread.

    A revocation is acknowledged only when no copy into it is under way: at once if it is not being written, else when
    its copy has ended. What was acknowledged can never be written afterwards, and neither can what was granted in an
    earlier session: the daemon takes our attach as the word that nothing from before is in flight.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session = 0
        self._active: set[int] = set()
        self._revoked: set[int] = set()
        self._refused: set[int] = set()
        self._to_acknowledge: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing is being written."""
        with self._lock:
            return not self._active

    @property
    def session(self) -> int:
        """Number of the session: read it before reserving, give it to :meth:`begin`."""
        with self._lock:
            return self._session

    def begin(self, reservations: Sequence[int], session: int) -> bool:
        """A copy into these begins; ``False`` if they must not be written any more."""
        with self._lock:
            if session != self._session or self._refused.intersection(reservations):
                return False
            self._active.update(reservations)
            return True

    def end(self, reservations: Sequence[int]) -> bool:
        """No copy into these is under way any more; whether one of them is waiting to be acknowledged."""
        with self._lock:
            self._active.difference_update(reservations)
            done = self._revoked.intersection(reservations)
            self._revoked -= done
            self._to_acknowledge |= done
            return bool(done)

    def revoke(self, reservations: Iterable[int]) -> bool:
        """The daemon took these back; whether some can be acknowledged now."""
        with self._lock:
            for each in reservations:
                if each in self._active:
                    self._revoked.add(each)
                else:
                    self._refused.add(each)
                    self._to_acknowledge.add(each)
            return bool(self._to_acknowledge)

    def take_stopped(self) -> list[int]:
        """Revoked reservations to acknowledge; the daemon repeats what it has not heard of."""
        with self._lock:
            taken = sorted(self._to_acknowledge)
            self._to_acknowledge.clear()
            return taken

    def new_session(self) -> None:
        """The session is gone; of it only copies under way still matter."""
        with self._lock:
            self._session += 1
            self._revoked.clear()
            self._refused.clear()
            self._to_acknowledge.clear()
