"""What a start took back from the boot before it, entered into the core and told to people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from appliance.catalog.events import RestartRecorded
from appliance.catalog.recovery import ControlState
from appliance.l1.examine import ALL_NAMESPACES
from appliance.l1.gates import GateResult
from appliance.l1.opening import Opened
from appliance.l1.rebuild import rebuild
from appliance.l1.recency import save_recency
from appliance.protocol.status import RestartGate, RestartStatus
from appliance.server.core import Core

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Restart:
    """One start: warm or cold, why, and each gate. ``seconds`` is from the first gate to the last object."""

    warm: bool
    reason: str
    clean_stop: bool
    gates: tuple[GateResult, ...]
    objects: int
    limbo_objects: int
    left_behind: Mapping[str, int]
    seconds: float

    @property
    def mode(self) -> str:
        """In one word."""
        return "warm" if self.warm else "cold"

    def status(self) -> RestartStatus:
        """For the status document."""
        return RestartStatus(
            mode=self.mode,
            reason=self.reason,
            clean_stop=self.clean_stop,
            objects=self.objects,
            limbo_objects=self.limbo_objects,
            left_behind=dict(self.left_behind),
            seconds=self.seconds,
            gates=[RestartGate(**gate.to_plain()) for gate in self.gates],
        )

    def event(self, boot: bytes, started_unix: float) -> RestartRecorded:
        """For the catalog."""
        return RestartRecorded(
            boot_id=boot.hex(),
            started_unix=started_unix,
            mode="warm" if self.warm else "cold",
            reason=self.reason,
            gates={
                gate.name.value: {
                    "place": place,
                    "outcome": gate.outcome.value,
                    "reason": gate.reason,
                    "facts": gate.facts,
                }
                for place, gate in enumerate(self.gates)
            },
            clean_stop=self.clean_stop,
        )


def clears_of(control: ControlState) -> dict[bytes, int]:
    """The acknowledged clears of the catalog as the gates compare them."""
    return {
        bytes.fromhex(clear.namespace) if clear.namespace else ALL_NAMESPACES: clear.epoch
        for clear in control.clears
    }


def take_back(core: Core, opened: Opened, began_monotonic: float) -> Restart:
    """Enter what the gates let through into the core, before anybody is served; log each gate and the verdict."""
    now_unix = time.time()
    objects = rebuild(core.store, opened.taken, opened.descriptors, now_unix=now_unix) if opened.taken else 0
    if objects:
        core.amnesty.begin(core.arena.directory, core.clock())
    for descriptor in opened.descriptors.values():
        core.engines.fingerprints[descriptor.fingerprint.namespace] = descriptor.fingerprint
    restart = Restart(
        warm=opened.warm,
        reason=_reason(opened),
        clean_stop=opened.clean_stop,
        gates=tuple(opened.gates),
        objects=objects,
        limbo_objects=opened.limbo_objects,
        left_behind=opened.left_behind,
        seconds=time.monotonic() - began_monotonic,
    )
    _tell(restart)
    opened.taken.clear()  # whoever still needs the records holds them: they are as large as the tables
    return restart


def keep_recency(core: Core) -> None:
    """At an orderly stop: what was used when, for the next start. Without it objects count as used when stored."""
    try:
        kept = save_recency(core.arena.directory, core.store.by_slot, core.clock(), time.time())
    except OSError as error:
        _log.warning("what was used when cannot be kept", error=error.strerror)
        return
    _log.info("what was used when is kept", objects=kept)


def _reason(opened: Opened) -> str:
    if not opened.warm:
        return opened.reason
    after = "an orderly stop" if opened.clean_stop else "a stop that was not orderly"
    left = sum(opened.left_behind.values())
    without = f"; {left} are left behind" if left else ""
    return f"Every gate opened after {after}: {opened.object_count} objects were taken back{without}."


def _tell(restart: Restart) -> None:
    for gate in restart.gates:
        _log.info("gate", gate=gate.name.value, outcome=gate.outcome.value, reason=gate.reason, **gate.facts)
    _log.info(
        "the arena is open",
        start=restart.mode,
        reason=restart.reason,
        clean_stop=restart.clean_stop,
        objects=restart.objects,
        limbo_objects=restart.limbo_objects,
        left_behind=dict(restart.left_behind),
        seconds=round(restart.seconds, 3),
    )
