"""A dataclass is a group of options: one option per field, given to the command as one checked value."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
import typer

from eplb_service.cli.options.groups import option_groups


@dataclass(frozen=True)
class Size:
    SECTION: ClassVar = "Sizes"

    width: Annotated[int, typer.Option(min=1, help="How wide.")]
    height: Annotated[int, typer.Option(help="How high.")] = 2

    def __post_init__(self):
        if self.height > 9:
            raise ValueError("too high")


TAKEN = []


@option_groups
def command(
    name: Annotated[str, typer.Argument()],
    size: Size,
    loud: Annotated[bool, typer.Option()] = False,
    **more: Any,
) -> None:
    """Do it."""
    TAKEN.append((name, size, loud, more))


def test_a_command_gets_the_group_as_one_value():
    command(name="a", width=3, height=4, loud=True, other=1)
    assert TAKEN.pop() == ("a", Size(3, 4), True, {"other": 1})


def test_what_a_group_refuses_is_refused():
    with pytest.raises(ValueError, match="too high"):
        command(name="a", width=3, height=10, loud=False)


def test_its_fields_are_options_in_their_section_with_their_defaults():
    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["name", "width", "height", "loud", "more"]
    assert parameters["width"].default is inspect.Parameter.empty
    assert parameters["height"].default == 2
    kind, option = parameters["width"].annotation.__origin__, parameters["width"].annotation.__metadata__[0]
    assert (kind, option.help, option.min, option.rich_help_panel) == (int, "How wide.", 1, "Sizes")
    assert command.__doc__ == "Do it."


def test_declaring_a_group_in_one_command_leaves_it_as_it_is_for_others():
    [option] = inspect.get_annotations(Size, eval_str=True)["width"].__metadata__
    assert option.rich_help_panel is None
