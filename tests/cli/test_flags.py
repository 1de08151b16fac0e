"""The names of all commands' options in the environment."""

from __future__ import annotations

from typing import Any, Final

import pytest
from typer.main import get_command

from cachestream.cli.app import app

GROUP: Final[Any] = get_command(app)
OPTIONS: Final = [
    (name, option.name, max(option.opts, key=len))
    for name, command in GROUP.commands.items()
    for option in command.params
    if option.param_type_name == "option"
]


def test_there_are_options_to_look_at() -> None:
    assert ("status", "json", "--json") in OPTIONS
    assert len({command for command, _, _ in OPTIONS}) > 8


@pytest.mark.parametrize(("name", "parameter", "flag"), OPTIONS)
def test_an_option_has_its_flags_name_in_the_environment(
    name: str, parameter: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"CACHESTREAM_{name}_{flag[2:]}".upper().replace("-", "_")
    monkeypatch.setenv(variable, "1")
    command, before = GROUP.commands[name], GROUP.make_context("cachestream", [name])
    needed = ["x" for given in command.params if given.param_type_name == "argument"]
    for given in command.params:
        if given.required and given.param_type_name == "option" and given.name != parameter:
            needed += [max(given.opts, key=len), "1"]
    context = command.make_context(name, needed, parent=before)
    assert context.get_parameter_source(parameter).name == "ENVIRONMENT"
    assert variable in "".join(command.get_help(context).split())
