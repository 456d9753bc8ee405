"""docs/protocol.md has every operation with every field, every word, every error code, and the arena byte by byte."""

from __future__ import annotations

import re
from enum import Enum

import numpy as np
import pytest
from docs_reader import default_of, first_words, rows, section, shape_of, text_of
from pydantic import BaseModel

from appliance.errors import all_errors
from appliance.fingerprint import REQUIRED_FIELDS, REQUIRED_GROUP_FIELDS, REQUIRED_LAYER_FIELDS
from appliance.l1.removals import Removal
from appliance.leases import TRANSITIONS as LEASE_TRANSITIONS
from appliance.protocol import (
    DEFAULT_PORT,
    MAX_CONTROL_BYTES,
    PROTOCOL_VERSION,
    accounts,
    arena_layout,
    bulk,
    messages,
    retention,
    status,
)
from appliance.protocol.base import Grant, LoadFailure, Message, MissReason, Role
from appliance.protocol.messages import REQUESTS
from appliance.reservations import ReservationState
from appliance.server import dispatch
from appliance.sessions import SessionEnd
from kernels import CHECKSUM_ALGORITHM, STREAM_LAYOUT

TEXT = text_of("docs/protocol.md")

RESULTS: dict[str, type[BaseModel]] = {
    "hello": messages.HelloResult,
    "attach": messages.AttachResult,
    "register": messages.RegisterResult,
    "heartbeat": messages.HeartbeatResult,
    "lookup": messages.LookupResult,
    "locate": messages.LocateResult,
    "release": messages.ReleaseResult,
    "reserve": messages.ReserveResult,
    "commit": messages.CommitResult,
    "abort": messages.AbortResult,
    "loads": messages.Done,
    "bye": messages.Done,
    "status": status.DaemonStatus,
    "ping": messages.Ping,
    "clear": messages.ClearResult,
    "set_ttl": messages.SetTtlResult,
    "check": messages.CheckResult,
    "set_policy": retention.SetPolicyResult,
    "set_user": accounts.UserInfo,
    "remove_user": accounts.Removed,
    "add_token": accounts.TokenInfo,
    "revoke_token": accounts.Removed,
    "open_login": accounts.LoginInfo,
    "end_login": accounts.Removed,
    "note_access": messages.Done,
    "note_audit": messages.Done,
    "accounts": accounts.Accounts,
}
"""What each operation answers; empty results and the status document have no table of their own."""

MAPS: list[type[BaseModel]] = [
    messages.SegmentInfo,
    messages.GroupFacts,
    messages.WorkerGroup,
    messages.Settlement,
    messages.OtherNamespace,
    messages.Difference,
    messages.FailedLoad,
    messages.CheckFinding,
    accounts.UserInfo,
    accounts.TokenInfo,
    accounts.LoginInfo,
]
STATUS_MAPS = [
    model
    for model in vars(status).values()
    if isinstance(model, type) and model.__module__ == status.__name__
]


def tables(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """The rows before and after the word ``Result:``."""
    before, _, after = text.partition("Result:")
    return rows(before), rows(after)


def request_rows(model: type[BaseModel]) -> list[list[str]]:
    return [[f"`{name}`", shape_of(info), default_of(info)] for name, info in model.model_fields.items()]


def result_rows(model: type[BaseModel]) -> list[list[str]]:
    return [[f"`{name}`", shape_of(info)] for name, info in model.model_fields.items()]


def test_every_operation_has_a_section_and_no_other():
    documented = re.findall(r"^### `(\w+)`$", section(TEXT, "## Operations"), flags=re.MULTILINE)
    assert sorted(documented) == sorted(REQUESTS)
    assert RESULTS.keys() == REQUESTS.keys()


@pytest.mark.parametrize("op", sorted(REQUESTS))
def test_every_field_of_an_operation_has_its_type_bounds_and_default(op: str):
    request, result = tables(section(TEXT, f"### `{op}`"))
    assert [row[:3] for row in request] == request_rows(REQUESTS[op])
    assert all(row[3] for row in request)
    if op != "status":
        assert [row[:2] for row in result] == result_rows(RESULTS[op])
        assert all(row[2] for row in result)


def test_every_field_of_the_bulk_socket():
    text = section(TEXT, "## Bulk socket")
    assert re.findall(r"^### `(\w+)`$", text, flags=re.MULTILINE) == list(bulk.BULK_REQUESTS)
    results: dict[str, type[BaseModel]] = {"put": bulk.PutResult, "get": bulk.GetResult}
    for op, model in bulk.BULK_REQUESTS.items():
        request, result = tables(section(text, f"### `{op}`"))
        assert [row[:3] for row in request] == request_rows(model)
        assert [row[:2] for row in result] == result_rows(results[op])
    assert f"{bulk.BULK_FRAME_BYTES:,} bytes" in text
    assert f"{bulk.MAX_BULK_PART_BYTES:,} bytes" in text
    assert f"At most {bulk.BULK_CREDITS} requests" in text


@pytest.mark.parametrize("model", MAPS, ids=lambda model: model.__name__)
def test_every_field_of_a_map_inside_a_message(model: type[BaseModel]):
    found = rows(section(section(TEXT, "## Maps inside messages"), f"### `{model.__name__}`"))
    strict = issubclass(model, Message)
    expected = request_rows(model) if strict else result_rows(model)
    assert [row[: len(expected[0])] for row in found] == expected


@pytest.mark.parametrize("model", STATUS_MAPS, ids=lambda model: model.__name__)
def test_every_field_of_the_status_document(model: type[BaseModel]):
    found = rows(section(section(TEXT, "## Status document"), f"### `{model.__name__}`"))
    assert [row[:2] for row in found] == result_rows(model)
    assert all(row[2] for row in found)


def test_every_map_that_a_message_holds_is_described():
    """A new nested model must get a section: its link would lead nowhere."""
    described = {model.__name__ for model in [*MAPS, *STATUS_MAPS]}
    tables_of = [*REQUESTS.values(), *RESULTS.values(), *MAPS, *STATUS_MAPS]
    linked = {
        name
        for model in tables_of
        for info in model.model_fields.values()
        for name in re.findall(r"\[`(\w+)`\]", shape_of(info))
    }
    assert linked <= described


def test_every_code_named_with_an_operation_exists():
    for op in REQUESTS:
        prose = section(TEXT, f"### `{op}`").split("Request:")[0].split("Result:")[0]
        for sentence in re.findall(r"Codes: ([^.]*)\.", prose.replace("\n", " ")):
            named = [part for part in re.findall(r"`(\w+)`", sentence) if "." not in part]
            assert set(named) <= set(all_errors()), op


def test_every_role_names_exactly_the_operations_that_need_a_session():
    listed = {op for row in rows(section(TEXT, "### Roles")) for op in re.findall(r"`(\w+)`", row[1])}
    assert listed == set(dispatch._IN_SESSION)
    assert first_words(section(TEXT, "### Roles")) == [role.value for role in Role]


# --- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "members"),
    [
        ("### Miss reasons", list(MissReason)),
        ("### Lease ends", [state for state, following in LEASE_TRANSITIONS.items() if not following]),
        (
            "### Reservation ends",
            [state for state in ReservationState if state is not ReservationState.WRITING],
        ),
        ("### Session ends", list(SessionEnd)),
        ("### Load failures", list(LoadFailure)),
    ],
)
def test_every_word_is_explained_once(heading: str, members: list[Enum]):
    assert sorted(first_words(section(TEXT, heading))) == sorted(str(member.value) for member in members)


def test_every_grant_has_its_number():
    found = {int(row[0]): row[1].strip("`") for row in rows(section(TEXT, "### Grants"))}
    assert found == {grant.value: grant.name.lower() for grant in Grant}


def test_every_removal_is_explained():
    names = {cause.name.lower() for cause in Removal if cause is not Removal.NONE}
    assert set(first_words(section(TEXT, "### Removals"))) == names


def test_every_miss_reason_is_in_troubleshooting_too():
    found = first_words(section(text_of("docs/troubleshooting.md"), "## Lookups miss"))
    assert sorted(found) == sorted(MissReason)


def test_every_error_code_stands_once_with_its_status_and_what_to_do():
    found = rows(section(TEXT, "## Errors"))
    assert sorted(row[0].strip("`") for row in found) == sorted(all_errors())
    for code, http, retry, meaning, remedy in found:
        error = all_errors()[code.strip("`")]
        assert (int(http), retry == "yes") == (error.http_status, error.retryable), code
        assert meaning.endswith("."), code
        assert remedy.endswith("."), code


def test_every_required_field_of_a_fingerprint():
    found = rows(section(TEXT, "## Fingerprint and namespace"))
    named = {row[0]: re.findall(r"`([\w.]+)`", row[1]) for row in found}
    assert named == {
        "engine": list(REQUIRED_FIELDS),
        "each group": list(REQUIRED_GROUP_FIELDS),
        "each layer": list(REQUIRED_LAYER_FIELDS),
    }


def test_the_numbers_of_the_prose():
    assert f"protocol\nversion {PROTOCOL_VERSION}" in TEXT or f"protocol version {PROTOCOL_VERSION}" in TEXT
    assert f"arena layout version {arena_layout.LAYOUT_VERSION}" in TEXT
    assert f"at most {MAX_CONTROL_BYTES:,} bytes" in TEXT
    assert f"tcp://127.0.0.1:{DEFAULT_PORT}" in TEXT
    assert f"`{STREAM_LAYOUT}`" in TEXT
    assert f"`{CHECKSUM_ALGORITHM}`" in TEXT


# --- the arena --------------------------------------------------------------------------------------------------


def kind_of(dtype: np.dtype) -> str:
    return {"V": "bytes", "S": "ASCII"}.get(dtype.kind) or f"uint{8 * dtype.itemsize}"


@pytest.mark.parametrize(
    ("heading", "layout"),
    [
        ("### Header", arena_layout.HEADER),
        ("### Epoch row", arena_layout.EPOCH_ROW),
        ("### Head record", arena_layout.RECORD),
        ("### Link", arena_layout.LINK),
    ],
)
def test_every_field_of_the_layout_has_its_offset_size_and_type(heading: str, layout: np.dtype):
    assert layout.fields is not None
    expected = [
        [str(field[1]), str(field[0].itemsize), f"`{name}`", kind_of(field[0])]
        for name, field in layout.fields.items()
    ]
    found = rows(section(TEXT, heading))
    assert [row[:4] for row in found] == expected
    assert all(row[4] for row in found)


def test_every_constant_of_the_layout_has_its_value():
    names = [
        name
        for name, value in vars(arena_layout).items()
        if name.isupper() and isinstance(value, (int, bytes))
    ]
    found = {
        row[0].strip("`"): row[1].strip("`")
        for row in rows(section(TEXT, "## Arena layout"))
        if len(row) == 3
    }
    assert sorted(found) == sorted(names)
    for name in names:
        value = getattr(arena_layout, name)
        assert found[name] == value.decode() if isinstance(value, bytes) else int(found[name], 0) == value, (
            name
        )
