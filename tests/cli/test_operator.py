"""What ``eplb status`` and ``eplb placement`` print is whole at 80 columns, whatever the deployment's size."""

from __future__ import annotations

import pytest

from eplb_service.cli.operator import layer_table, placement_table, summary_table
from eplb_service.placement import Placement
from tests.cli.arguments import drawn
from tests.control.server.pictured import messages


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(8, 4, 3), (256, 32, 9), (4096, 320, 64)])
def test_a_placement_is_there_whole(experts: int, ranks: int, slots: int) -> None:
    placement = Placement.linear(2, experts, ranks, slots)
    printed: dict[tuple[str, str], list[str]] = {}
    place = ("", "")
    for line in drawn(placement_table(7, placement)):
        parts = line.split()
        if not parts or not parts[-1].isdigit():
            continue
        if line[0] == " " and line[1] != " ":
            place, parts = (parts[0], parts[1]), parts[2:]
        printed.setdefault(place, []).extend(parts)
    del printed["", ""]
    assert printed == {
        (str(layer), str(rank)): [str(expert) for expert in placement.phy2log_LRS[layer, rank]]
        for layer in range(2)
        for rank in range(ranks)
    }


def test_what_is_known_of_a_large_deployment_fits() -> None:
    whole = messages(320, 61).whole
    assert whole is not None
    assert any("61 layers x" in line for line in drawn(summary_table(whole)))
    assert len(drawn(layer_table(whole.layers))) >= 61
