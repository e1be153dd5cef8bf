"""What ``eplb status`` and ``eplb placement`` print is whole at 80 columns, whatever the deployment's size."""

from __future__ import annotations

import pytest

from eplb_service.cli.operator import agent_table, layer_table, placement_table, summary_table
from eplb_service.placement import Placement
from eplb_service.wire.generated import operator_pb2
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


def test_an_agent_s_long_names_and_errors_wrap_beside_whole_numbers() -> None:
    agent = operator_pb2.AgentStatus(
        rank=319,
        node="ip-10-0-112-34.eu-central-1.compute.internal",
        step=123_456_789_012,
        epoch=1_234_567,
        dropped_steps=98_765,
        agent_version="0.1.0.post1+gabcdef0",
        error="the transfer thread has missed its deadline and does not answer",
    )
    lines = drawn(agent_table([agent]))
    assert "…" not in "".join(lines)
    (heading,) = (line for line in lines if "dropped" in line)
    assert heading.split() == ["rank", "connected", "step", "epoch", "dropped", "node", "agent", "error"]
    (first,) = (line for line in lines if line.startswith(" 319"))
    assert first.split()[:5] == ["319", "no", "123456789012", "1234567", "98765"]
    text = "".join("".join(lines).split())
    assert all(part in text for part in ("thread", "deadline", "answer"))


def test_what_is_known_of_a_large_deployment_fits() -> None:
    whole = messages(320, 61).whole
    assert whole is not None
    assert any("61 layers x" in line for line in drawn(summary_table(whole)))
    assert len(drawn(layer_table(whole.layers))) >= 61
