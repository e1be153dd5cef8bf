"""Answers to operators are checked where they are read: what cannot be is refused, texts act on no terminal."""

from __future__ import annotations

from typing import Any

import pytest

from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.operator import checked_answer

HOSTILE = "\x1b[2J"
STATUS = operator_pb2.DeploymentStatus(deployment="decode", problems=[HOSTILE], last_decision=HOSTILE)


def test_texts_are_cleaned() -> None:
    listed = checked_answer(operator_pb2.ListDeploymentsResponse(deployments=[STATUS]))
    (status,) = listed.deployments
    assert [*status.problems, status.last_decision] == [" [2J"] * 2
    agents = [operator_pb2.AgentStatus(error=HOSTILE)]
    report = checked_answer(operator_pb2.GetStatusResponse(status=STATUS, agents=agents))
    assert report.agents[0].error == " [2J"
    plans = [operator_pb2.PastPlan(reason=HOSTILE, outcome="aborted")]
    assert checked_answer(operator_pb2.GetHistoryResponse(plans=plans)).plans[0].reason == " [2J"
    assert checked_answer(operator_pb2.RebalanceResponse(outcome=HOSTILE)).outcome == " [2J"
    empty = operator_pb2.PauseResponse()
    assert checked_answer(empty) is empty


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (
            operator_pb2.ListDeploymentsResponse(
                deployments=[operator_pb2.DeploymentStatus(deployment=HOSTILE)]
            ),
            "deployment is",
        ),
        (
            operator_pb2.GetStatusResponse(status=STATUS, agents=[operator_pb2.AgentStatus(node=HOSTILE)]),
            "agents.0..node",
        ),
        (operator_pb2.GetHistoryResponse(plans=[operator_pb2.PastPlan()] * 101), "length of plans"),
        (operator_pb2.GetPlacementResponse(), "placement.experts"),
        (operator_pb2.GetBalanceResponse(load_steps=1 << 31), "balance.load_steps"),
        (operator_pb2.RebalanceResponse(plan_id=1 << 63), "rebalance.plan_id"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(answer: Any, field: str) -> None:
    with pytest.raises(WireError, match=field):
        checked_answer(answer)
