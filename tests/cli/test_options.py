"""A field or parameter declares an option once; a dataclass of them arrives as one checked value."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from eplb_service.cli.options import argument, option, setting_option, takes_options


@dataclass(frozen=True)
class Size:
    SECTION: ClassVar = "Sizes"

    width: int = option(help="How wide.", min=1)
    height: int = option(2, "How high.")

    def __post_init__(self) -> None:
        if self.height > 9:
            raise ValueError("too high")


TAKEN: list[Any] = []


@takes_options(setting_option("other", int, 7, "Another.", section="More"))
def command(
    size: Size, name: str = argument(), loud: bool = option(False, "Loud.", "--loud"), **more: Any
) -> None:
    """Do it."""
    TAKEN.append((name, size, loud, more))


PARAMETERS = inspect.signature(command).parameters


def test_a_command_gets_the_group_as_one_value() -> None:
    command(name="a", width=3, height=4, loud=True, other=1)
    assert TAKEN.pop() == ("a", Size(3, 4), True, {"other": 1})


def test_what_a_group_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="too high"):
        command(name="a", width=3, height=10, loud=False)


def test_fields_and_parameters_are_options_in_their_section_with_their_defaults() -> None:
    assert list(PARAMETERS) == ["width", "height", "name", "loud", "other"]
    shown = {name: one.default for name, one in PARAMETERS.items()}
    assert [(one.default, one.min, one.rich_help_panel) for one in (shown["width"], shown["height"])] == [
        (..., 1, "Sizes"),
        (2, None, "Sizes"),
    ]
    assert (shown["loud"].param_decls, shown["other"].rich_help_panel) == (("--loud",), "More")
    assert shown["name"].default is ...
    assert command.__doc__ == "Do it."
