"""The figures of ``make size`` are those of the sources that it reads."""

import ast
from pathlib import Path

import pytest

from tools import size
from tools.size_tours import Tour


def source(path: str, text: str) -> size.Source:
    return size.Source(Path(path), text, ast.parse(text))


VALUE = source(
    "eplb_core/wire/plan.py",
    '''"""What a plan is."""
from typing import NamedTuple


class Plan(NamedTuple):
    """A plan."""

    epoch: int


def _private() -> None:
    pass
''',
)
USER = source(
    "eplb_service/control/core/group.py",
    "from eplb_core.wire.plan import Plan\n\n\ndef offer(plan: Plan) -> None: ...\n\n\n",
)


def test_rooms_are_counted() -> None:
    rooms = size.room_figures([VALUE, USER])
    assert rooms["eplb_core/wire"] == {
        "lines": 12,
        "modules": 1,
        "small modules": 1,
        "public names": 1,
        "value types": 1,
        "riddles": 1,
    }
    assert rooms["eplb_service/control/core"]["small modules"] == 0


def test_a_tour_counts_its_files_and_types_and_refuses_what_is_not_there() -> None:
    lost = source("tools/lost.py", "def lost() -> None: ...\n")
    sources = {one.path.as_posix(): one for one in (VALUE, USER, lost)}
    plan, offer = (VALUE.path.as_posix(), "Plan"), (USER.path.as_posix(), "offer")
    found = size.tour_figures(Tour("a plan", "types", ("Plan",), (plan, offer)), sources)
    assert found == {"files of a plan": 2, "types of a plan": 1}
    for stops in (((plan[0], "Gone"),), (offer, ("tools/lost.py", "lost"))):
        with pytest.raises(SystemExit, match="make size"):
            size.tour_figures(Tour("a plan", "types", (), stops), sources)
