"""The figures of ``make size`` are those of the sources that it reads."""

import ast
from pathlib import Path

import pytest

from tools import size
from tools.size_tours import Tour


def source(path: str, text: str) -> size.Source:
    return size.Source(Path(path), text, ast.parse(text))


VALUE = source(
    "eplb_service/wire/plan.py",
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
    "from eplb_service.wire.plan import Plan\n\n\ndef offer(plan: Plan) -> None: ...\n\n\n",
)


def test_rooms_are_counted() -> None:
    rooms = size.room_figures([VALUE, USER])
    assert rooms["eplb_service/wire"] == {
        "lines": 12,
        "modules": 1,
        "small modules": 1,
        "public names": 1,
        "value types": 1,
        "riddles": 1,
    }
    assert rooms["eplb_service/control/core"]["small modules"] == 0


def test_a_tour_counts_its_files_and_types() -> None:
    tour = Tour(
        "a plan", "types", ("Plan",), ((VALUE.path.as_posix(), "Plan"), (USER.path.as_posix(), "offer"))
    )
    sources = {one.path.as_posix(): one for one in (VALUE, USER)}
    assert size.tour_figures(tour, sources) == {"files of a plan": 2, "types of a plan": 1}


@pytest.mark.parametrize(
    "stops",
    [(("eplb_service/wire/plan.py", "Gone"),), ((USER.path.as_posix(), "offer"), ("tools/lost.py", "lost"))],
)
def test_a_tour_through_what_is_not_there_is_refused(stops: tuple[tuple[str, str], ...]) -> None:
    unlinked = source("tools/lost.py", "def lost() -> None: ...\n")
    sources = {one.path.as_posix(): one for one in (VALUE, USER, unlinked)}
    with pytest.raises(SystemExit, match="make size"):
        size.tour_figures(Tour("a plan", "types", (), stops), sources)


def test_ceilings_are_of_figures_that_exist() -> None:
    assert set(size.SETTINGS) | {"product lines", "modules", "public names"} <= set(size.CEILINGS)
