"""Answers to operators are checked where they are read: what cannot be shown is refused, texts act on no terminal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from eplb_service.wire.fields import LONGEST_LINE, WireError
from eplb_service.wire.generated import operator_pb2 as pb
from eplb_service.wire.operator import checked_answer

HOSTILE = "\x1b[2J" + "x" * LONGEST_LINE
CLEAN = (" [2J" + "x" * LONGEST_LINE)[:LONGEST_LINE]


def test_texts_are_cleaned_and_cut_wherever_they_are() -> None:
    status = pb.DeploymentStatus(deployment="decode", problems=[HOSTILE, ""], last_decision=HOSTILE)
    report = checked_answer(pb.GetStatusResponse(status=status, agents=[pb.AgentStatus(error=HOSTILE)]))
    found = (*report.status.problems, report.status.last_decision, report.agents[0].error)
    assert found == (CLEAN, "", CLEAN, CLEAN)
    empty = pb.PauseResponse()
    assert checked_answer(empty) is empty


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (pb.ListDeploymentsResponse(deployments=[pb.DeploymentStatus(deployment="[/]")]), "deployment is"),
        (pb.GetHistoryResponse(plans=[pb.PastPlan(at=1e300)]), "at is 1e"),
        (pb.GetStatusResponse(layers=[pb.LayerStatus(par=-math.inf)]), "par is -inf"),
        (pb.GetPlacementResponse(), "placement.experts"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_its_name(answer: Any, field: str) -> None:
    with pytest.raises(WireError, match=field):
        checked_answer(answer)


def test_what_is_not_known_is_no_number() -> None:
    point = pb.BalancePoint(par=math.nan)
    assert math.isnan(checked_answer(pb.GetBalanceResponse(points=[point])).points[0].par)
