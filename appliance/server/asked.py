"""Prompts that were asked for lately: a request that is looked up again is no second prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

_REMEMBERED = 65_536


class AskedPrompts:
    """The boundaries that the policy wished for, by session and request; the oldest is forgotten first.

    A request is looked up again after a preemption or a failed load. Were it told to the policy each time, it would look
    like a prompt that many users come back to.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._wished: OrderedDict[tuple[bytes, str], Sequence[int]] = OrderedDict()

    def wishes(self, session: bytes, request: str, ask: Callable[[], Sequence[int]]) -> Sequence[int]:
        """What was wished for when the request came first; ``ask`` is called only then."""
        known = self._wished.get((session, request))
        if known is None:
            known = self._wished[session, request] = ask()
            if len(self._wished) > self._remembered:
                self._wished.popitem(last=False)
        return known

    def __len__(self) -> int:
        return len(self._wished)
