"""Answers to operators are checked where they are read, and as plain values have every field."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from eplb_core.wire.codec import pack
from eplb_core.wire.fields import MAX_LINE, WireError
from eplb_core.wire.generated import operator_pb2 as pb
from eplb_core.wire.operator import as_document, checked_answer

HOSTILE = "\x1b[2J" + "x" * MAX_LINE
CLEAN = (" [2J" + "x" * MAX_LINE)[:MAX_LINE]


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


def test_every_field_is_there_and_what_is_absent_is_none() -> None:
    empty = as_document(pb.GetBalanceResponse())
    assert empty == {
        "points": [],
        "rank_loads": None,
        "load_steps": 0,
        "last_decision": None,
        "last_plan": None,
    }
    assert as_document(pb.AgentStatus(rank=3))["silent_seconds"] is None
    assert as_document(pb.AgentStatus(silent_seconds=0.0))["silent_seconds"] == 0.0


def test_arrays_digests_and_large_numbers() -> None:
    loads_LR = np.arange(6, dtype=np.int32).reshape(2, 3)
    answer = pb.GetBalanceResponse(
        rank_loads=pack(loads_LR), points=[pb.BalancePoint(at=1.5, layers_switched=2**40)]
    )
    document = as_document(answer)
    assert document["rank_loads"] == loads_LR.tolist()
    assert document["points"][0]["layers_switched"] == 2**40
    status = as_document(pb.GetStatusResponse(status=pb.DeploymentStatus(digest=0x1F)))
    assert status["status"]["digest"] == "0x000000000000001f"
    json.dumps(status, allow_nan=False)
