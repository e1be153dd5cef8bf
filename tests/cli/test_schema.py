"""``eplb schema`` prints a valid schema for every command that prints JSON, and what is printed is held to it."""

import json

import jsonschema
import numpy as np
import pytest

from eplb_service.cli import main
from eplb_service.cli.schema import COMMANDS, schema_document
from tests.cli.published import held
from tools.docs_reference.command_line import commands
from tools.docs_reference.json_output import json_page, schema_files


@pytest.mark.parametrize("name", COMMANDS)
def test_every_schema_is_one_and_says_what_it_is_of(name, capsys):
    assert main.run(["schema", *name.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == schema_document(name)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed["title"] == f"eplb {name} --json"
    assert printed["properties"]


def test_every_command_with_json_has_a_schema(capsys):
    with_json = {
        command.name.removeprefix("eplb ")
        for command in commands()
        if any("--json" in option.flags for option in command.options)
    }
    assert set(COMMANDS) == with_json
    assert main.run(["schema"]) == 0
    assert capsys.readouterr().out.splitlines() == list(COMMANDS)
    assert main.run(["schema", "serve"]) == 2
    assert "'serve' prints no JSON; choose one of solve, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["convert", "--out", "b.npz"],
        ["slice", "--steps", "1:3", "--out", "c.zarr"],
        ["info"],
        ["stats"],
        ["stats", "--ranks", "2", "--window", "2"],
    ],
    ids=lambda options: options[0],
)
def test_what_trace_prints_is_what_its_schema_says(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    heat_TLE = np.arange(48).reshape(6, 2, 4)
    heat_TLE[:, 1] = 0
    np.save("a.npy", heat_TLE)
    command, *rest = options
    assert main.run(["trace", command, "a.npy", *rest, "--json"]) == 0
    held(f"trace {command}", capsys.readouterr().out)


def test_a_document_that_is_not_as_published_is_found(capsys):
    with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
        held("pause", '{"deployment": "a", "paused": true, "more": 1}')
    with pytest.raises(jsonschema.ValidationError, match="required property"):
        held("pause", '{"deployment": "a"}')


def test_the_page_lists_every_field_and_links_every_schema():
    page, files = json_page(), schema_files()
    for name in COMMANDS:
        link = f"schemas/{name.replace(' ', '-')}.json"
        assert f"]({link})" in page
        assert json.loads(files[f"reference/{link}"]) == schema_document(name)
        for field in schema_document(name)["properties"]:
            assert f"| `{field}` |" in page.partition(f"\n## eplb {name}\n")[2].partition("\n## ")[0]
