"""Tests of responses to operators: validation by the client, and conversion to a JSON document."""

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


def test_strings_at_every_depth_are_cleaned_and_truncated() -> None:
    status = pb.DeploymentStatus(deployment="decode", problems=[HOSTILE, ""], last_decision=HOSTILE)
    report = checked_answer(pb.GetStatusResponse(status=status, agents=[pb.AgentStatus(error=HOSTILE)]))
    texts = (*report.status.problems, report.status.last_decision, report.agents[0].error)
    assert texts == (CLEAN, "", CLEAN, CLEAN)
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
def test_an_invalid_field_is_named_in_the_error(answer: Any, field: str) -> None:
    with pytest.raises(WireError, match=field):
        checked_answer(answer)


def test_an_unknown_ratio_stays_nan() -> None:
    point = pb.BalancePoint(par=math.nan)
    assert math.isnan(checked_answer(pb.GetBalanceResponse(points=[point])).points[0].par)


def test_a_document_has_every_field_and_missing_values_are_null() -> None:
    empty = as_document(pb.GetBalanceResponse())
    assert empty == {
        "points": [],
        "rank_loads": None,
        "load_steps": 0,
        "last_decision": None,
        "last_plan": None,
    }
    assert as_document(pb.AgentStatus(rank=3))["silent_seconds"] is None
    assert as_document(pb.BalancePoint(par=math.nan))["par"] is None
    assert as_document(pb.AgentStatus(silent_seconds=0.0))["silent_seconds"] == 0.0


def test_arrays_digests_and_large_numbers_are_converted_to_json() -> None:
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
