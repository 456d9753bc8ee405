"""``pagewarden arena``: an arena directory looked at, or emptied, while no daemon uses it."""

from __future__ import annotations

import json
from typing import Any

from appliance.catalog.recovery import ControlState, load_control_state
from appliance.errors import ArenaUnusable
from appliance.l1.gates import GateOutcome
from appliance.l1.survey import Survey, clear_arena, survey_arena
from appliance.protocol.arena_layout import SegmentLayout
from appliance.server.restart import clears_of
from appliance.server.spare import spare_memory
from appliance.settings import Settings

_MARKS = {GateOutcome.PASSED: "pass", GateOutcome.FAILED: "FAIL", GateOutcome.SKIPPED: "  - "}


def status_text(settings: Settings, *, as_json: bool) -> str:
    """What the directory holds, and what a start with these settings would make of it.

    Raises:
        ArenaUnusable: if it cannot be read. CatalogUnreadable: if the acknowledged clears cannot be.
    """
    control = load_control_state(settings.catalog) if settings.catalog.exists() else ControlState()
    wanted = SegmentLayout(settings.l1_bytes // settings.extent_bytes, settings.extent_bytes)
    try:
        spare = spare_memory(settings.arena_dir)
        survey = survey_arena(settings.arena_dir, wanted, clears_of(control), spare)
    except OSError as error:
        raise ArenaUnusable(
            f"The arena directory {settings.arena_dir} cannot be read: {error.strerror}."
        ) from error
    return json.dumps(survey.to_plain(), indent=2) if as_json else _for_people(survey)


def _for_people(survey: Survey) -> str:
    plain = survey.to_plain()
    lines = [f"{survey.directory}: {'a daemon uses it' if survey.running else 'no daemon uses it'}"]
    lines.append(f"{survey.attachments} living processes have locked an attachment")
    lines += [_file_line(each) for each in plain["files"]]
    lines += [
        f"  namespace {each.namespace}  {each.model}  {each.objects} objects, {each.bytes} bytes"
        for each in survey.namespaces
    ]
    lines += [f"  unreadable: {name}: {why}" for name, why in survey.unreadable.items()]
    if survey.running:
        return "\n".join([*lines, survey.reason])
    lines.append("gates of the next start:")
    lines += [f"  {_MARKS[gate.outcome]}  {gate.name.value:<10}  {gate.reason}" for gate in survey.gates]
    lines.append(f"The next start would be {plain['next_start']}.")
    return "\n".join(lines)


def _file_line(each: dict[str, Any]) -> str:
    stop = "orderly stop" if each["clean"] else "no orderly stop"
    return (
        f"  {each['name']}  {each['extents']} extents of {each['extent_bytes']} bytes, "
        f"{each['memory_bytes']} bytes of memory, {stop}"
    )


def clear_text(settings: Settings, *, as_json: bool) -> str:
    """Empty the directory; what was done.

    Raises:
        ArenaInUse, ArenaUnusable: see :func:`clear_arena`.
    """
    try:
        files, memory = clear_arena(settings.arena_dir)
    except OSError as error:
        raise ArenaUnusable(
            f"The arena directory {settings.arena_dir} cannot be cleared: {error.strerror}."
        ) from error
    if as_json:
        return json.dumps({"removed_files": files, "memory_bytes": memory})
    return f"Removed {files} files of {settings.arena_dir}, {memory} bytes of memory. The next start is cold."
