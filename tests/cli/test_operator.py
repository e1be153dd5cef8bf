"""Tests of ``eplb status`` and ``eplb placement``: the output is complete at 80 columns for any deployment size."""

from __future__ import annotations

import pytest

from eplb_core.placement import Placement
from eplb_service.cli import operator
from eplb_service.cli.operator import placement_table
from tests.cli.arguments import drawn, eplb
from tests.control.server.pictured import messages


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(8, 4, 3), (256, 32, 9), (4096, 320, 64)])
def test_a_placement_is_printed_completely(experts: int, ranks: int, slots: int) -> None:
    placement = Placement.linear(2, experts, ranks, slots)
    printed: dict[tuple[str, str], list[str]] = {}
    layer_and_rank = ("", "")
    for line in drawn(placement_table(7, placement)):
        cells = line.split()
        if not cells or not cells[-1].isdigit():
            continue
        if line[0] == " " and line[1] != " ":
            layer_and_rank = (cells[0], cells[1])
            cells = cells[2:]
        printed.setdefault(layer_and_rank, []).extend(cells)
    del printed["", ""]
    assert printed == {
        (str(layer), str(rank)): [str(expert) for expert in placement.phy2log_LRS[layer, rank]]
        for layer in range(2)
        for rank in range(ranks)
    }


def test_a_large_deployment_is_summarised_or_printed_completely(monkeypatch, capsys) -> None:
    whole = messages(320, 61, missing=(77,)).whole
    whole.status.worth.gain_ms = 3754.2
    monkeypatch.setattr(operator, "_ask", lambda service, name, request: whole)
    monkeypatch.setenv("COLUMNS", "80")
    _, shown, _ = eplb(capsys, "status", "decode")
    lines = shown.splitlines()
    assert len(lines) <= 49
    assert max(map(len, lines)) <= 80
    assert "61 layers x" in shown
    assert "319 of 320 ranks connected on 40 nodes, at step 48,230" in shown
    assert "+3,750 ms per step" in shown
    assert "worth 8.3 of 320 ranks" in " ".join(shown.replace("│", " ").split())
    assert "2.55 GB per rank, for 64 slots per layer" in shown
    worst = max(whole.layers, key=lambda layer: layer.par).layer
    first = [line.split()[0] for line in lines if line[:2].strip().isdigit()]
    assert (first[0], first[8:10]) == (str(worst), ["77", "5"])
    _, shown, _ = eplb(capsys, "status", "decode", "--all")
    assert len(shown.splitlines()) > 61 + 320
