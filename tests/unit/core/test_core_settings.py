"""Settings: who outranks whom, and refusals that name the setting."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from appliance.errors import InvalidSettings
from appliance.settings import GIB, Settings, load_settings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in list(os.environ):
        if name.upper().startswith("PAGEWARDEN_"):
            monkeypatch.delenv(name)


def toml(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "pagewarden.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_flags_over_variables_over_file_over_defaults(tmp_path, monkeypatch):
    file = toml(tmp_path, "port = 1001\nhttp_port = 1002\nchunk_size = 1003\n")
    monkeypatch.setenv("PAGEWARDEN_PORT", "2001")
    monkeypatch.setenv("PAGEWARDEN_HTTP_PORT", "2002")
    settings = load_settings({"port": 3001}, file)
    assert (settings.port, settings.http_port, settings.chunk_size) == (3001, 2002, 1003)
    assert settings.max_workers == Settings.model_fields["max_workers"].default
    assert load_settings({}, file).port == 2001
    monkeypatch.delenv("PAGEWARDEN_PORT")
    assert load_settings({}, file).port == 1001


def test_a_variable_in_lower_case_outranks_the_file_too(tmp_path, monkeypatch):
    monkeypatch.setenv("pagewarden_port", "2001")
    assert load_settings({}, toml(tmp_path, "port = 1001\n")).port == 2001


@pytest.mark.parametrize(
    "flags, field",
    [
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"port": "abc"}, "port"),
        ({"host": 5}, "host"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": 2.5}, "chunk_size"),
        ({"max_workers": 0}, "max_workers"),
        ({"l1_size_gb": 0}, "l1_size_gb"),
        ({"l1_size_gb": -1}, "l1_size_gb"),
        ({"l1_size_gb": math.nan}, "l1_size_gb"),
        ({"l1_size_gb": math.inf}, "l1_size_gb"),
        ({"l1_size_gb": 1e300}, "l1_size_gb"),
        ({"l1_init_size_gb": 0}, "l1_init_size_gb"),
        ({"l1_size_gb": 1, "l1_init_size_gb": 2}, "l1_init_size_gb"),
        ({"eviction_watermark": 0}, "eviction_watermark"),
        ({"eviction_watermark": 1.01}, "eviction_watermark"),
        ({"l1_read_ttl_seconds": 0}, "l1_read_ttl_seconds"),
        ({"l1_write_ttl_seconds": -3}, "l1_write_ttl_seconds"),
        ({"session_ttl_seconds": math.inf}, "session_ttl_seconds"),
        ({"heartbeat_seconds": 0.01}, "heartbeat_seconds"),
        ({"engine_inflight_share": 1.5}, "engine_inflight_share"),
        ({"death_grace_seconds": -1}, "death_grace_seconds"),
        ({"extent_kib": 3}, "extent_kib"),
        ({"extent_kib": 6}, "extent_kib"),
        ({"log_format": "xml"}, "log_format"),
        ({"no_such_flag": 1}, "no_such_flag"),
    ],
)
def test_a_bad_value_is_refused_by_name(flags, field):
    with pytest.raises(InvalidSettings) as caught:
        load_settings(flags)
    assert caught.value.details["field"] == field
    assert f"'{field}'" in caught.value.message
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("PAGEWARDEN_EXTENT_KIB", "5")
    with pytest.raises(InvalidSettings, match="'extent_kib' is '5'"):
        load_settings({})


@pytest.mark.parametrize(
    "text, told",
    [
        ("port = \n", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        ("prot = 1\nhots = 2\n", "hots, prot"),
        ("port = 'x'\n", "'port'"),
        ("[section]\nport = 1\n", "section"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, told):
    with pytest.raises(InvalidSettings, match=told):
        load_settings({}, toml(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InvalidSettings, match="cannot be read"):
        load_settings({}, tmp_path / "absent.toml")
    with pytest.raises(InvalidSettings, match="cannot be read"):
        load_settings({}, tmp_path)


def test_sizes_are_whole_extents():
    settings = load_settings({"l1_size_gb": 0.001, "extent_kib": 256})
    assert settings.l1_bytes == 4 * 256 * 1024
    assert settings.l1_init_bytes == settings.l1_bytes
    settings = load_settings({"l1_size_gb": 2, "l1_init_size_gb": 0.5})
    assert (settings.l1_bytes, settings.l1_init_bytes) == (2 * GIB, GIB // 2)
    tiny = load_settings({"l1_size_gb": 1e-9})
    assert tiny.l1_bytes == tiny.l1_init_bytes == tiny.extent_bytes
