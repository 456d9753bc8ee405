"""docs/configuration.md has every setting, command, flag, exit status and connector option, and none besides."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import typer
from docs_reader import first_words, number, rows, section, text_of
from pydantic import BaseModel

from appliance.cli import app
from appliance.errors import StartupError, all_errors
from appliance.run_dir import default_run_dir
from appliance.settings import Settings, default_catalog
from connector.vllm.options import ALIASES, PREFIX, ConnectorOptions

TEXT = text_of("docs/configuration.md")
TOP: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
COMMANDS: dict[str, click.Command] = {
    **TOP,
    **{
        f"{name} {inner}": command
        for name, group in TOP.items()
        for inner, command in getattr(group, "commands", {}).items()
    },
}


def shown(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def setting_default(name: str) -> str:
    if name == "l1_init_size_gb":  # all of L1 where it is not said
        assert Settings.model_fields[name].default is None
        return "`l1_size_gb`"
    if name == "catalog":
        return "`~/.local/state/pagewarden/catalog.db`"
    if name == "run_dir":
        return "`~/.local/state/pagewarden/run`"
    if name == "admin_password_file":
        return "none"
    return shown(Settings.model_fields[name].default)


def test_every_setting_has_its_flag_variable_name_and_default():
    documented = {
        row[2].strip("`"): (row[0], row[1], row[3])
        for row in rows(section(TEXT, "## Settings of the daemon"))
    }
    expected = {
        name: (f"`--{name.replace('_', '-')}`", f"`PAGEWARDEN_{name.upper()}`", setting_default(name))
        for name in Settings.model_fields
    }
    assert documented == expected


def test_the_catalogs_documented_place_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_catalog() == Path.home() / ".local/state/pagewarden/catalog.db"
    assert default_run_dir() == Path.home() / ".local/state/pagewarden/run"


def flags_of(command: click.Command) -> set[str]:
    return {
        option
        for parameter in command.params
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False)
        for option in parameter.opts
        if option != "--help"
    }


def test_every_setting_is_a_flag_of_the_server():
    settings = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    assert flags_of(COMMANDS["server"]) == settings | {"--config"}


def test_every_command_has_a_section():
    documented = set(re.findall(r"^### `pagewarden ([\w ]+)`$", TEXT, flags=re.MULTILINE))
    assert documented == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"server"}))
def test_every_flag_of_a_command_has_its_variable_and_default(name: str):
    documented = {
        row[0].strip("`"): (row[1].strip("`"), row[2].strip("`"))
        for row in rows(section(TEXT, f"### `pagewarden {name}`"))
    }
    assert set(documented) == flags_of(COMMANDS[name])
    for parameter in COMMANDS[name].params:
        flag = parameter.opts[0]
        if flag in documented:
            variable, default = documented[flag]
            assert variable == (parameter.envvar or "none"), flag
            value = getattr(parameter.default, "value", parameter.default)
            if value not in (None, "") and not callable(value):
                assert default == str(value), flag


def test_every_argument_of_a_command_is_named():
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                assert str(parameter.name).upper() in section(TEXT, f"### `pagewarden {name}`")


def test_every_exit_status_is_documented_with_its_code():
    documented = {
        (int(row[0]), row[1].strip("`")) for row in rows(section(TEXT, "## Exit statuses")) if row[0] != "0"
    }
    refusals = {
        (error.exit_status, code) for code, error in all_errors().items() if issubclass(error, StartupError)
    }
    assert documented == refusals


def test_every_exit_status_is_in_troubleshooting_too():
    found = rows(section(text_of("docs/troubleshooting.md"), "## The daemon does not start"))
    refusals = {
        (str(error.exit_status), f"`{code}`")
        for code, error in all_errors().items()
        if issubclass(error, StartupError)
    }
    assert {(row[0], row[1]) for row in found} == refusals


def option_default(name: str) -> str:
    value = ConnectorOptions.model_fields[name].default
    if value is None:
        return "the daemon's"
    return "empty" if value == "" else shown(value)


def test_every_connector_option_is_documented_with_its_default():
    text = section(TEXT, "## Options of the connector")
    documented = {row[0].strip("`"): row[1] for row in rows(text) if row[0].startswith(f"`{PREFIX}")}
    assert documented == {f"{PREFIX}{name}": option_default(name) for name in ConnectorOptions.model_fields}


@pytest.mark.parametrize(
    ("heading", "column", "model"),
    [("## Settings of the daemon", 4, Settings), ("## Options of the connector", 2, ConnectorOptions)],
)
def test_every_bound_is_in_the_meaning(heading: str, column: int, model: type[BaseModel]):
    meanings = {
        row[0].strip("`").removeprefix("--").removeprefix(PREFIX).replace("-", "_"): row[column]
        for row in rows(section(TEXT, heading))
        if len(row) > column
    }
    for name, info in model.model_fields.items():
        bounds = [getattr(each, kind, None) for each in info.metadata for kind in ("ge", "le", "max_length")]
        for bound in bounds:
            if bound:
                assert re.search(rf"(?<![\d.,]){number(bound)}(?![\d])", meanings[name]), (
                    f"{name}: {number(bound)}"
                )


def test_every_alias_names_its_option():
    documented = {
        row[0].strip("`"): row[1]
        for row in rows(section(TEXT, "## Options of the connector"))
        if "lmcache." in row[0]
    }
    assert set(documented) == set(ALIASES)
    for alias, name in ALIASES.items():
        assert documented[alias].startswith(f"`{PREFIX}{name}`")


def test_every_flag_of_lmcache_that_is_said_to_exist_is_a_flag():
    text = text_of("docs/from-lmcache.md")
    server = flags_of(COMMANDS["server"])
    mapped = [row[1].strip("`").split()[0] for row in rows(section(text, "## Flags of the server"))]
    assert mapped
    assert set(mapped) <= server
    command = next(line for line in text.splitlines() if line.startswith("pagewarden server"))
    assert set(re.findall(r"--[\w-]+", command)) <= server


def test_every_alias_is_in_the_page_for_lmcache():
    found = first_words(section(text_of("docs/from-lmcache.md"), "## Options of the connector"))
    assert set(ALIASES) <= set(found)
