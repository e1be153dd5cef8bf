"""A message as plain values has every field, whatever is set, and numbers stay numbers."""

from __future__ import annotations

import json

import numpy as np

from eplb_service.wire.codec import pack
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.operator import as_document


def test_every_field_is_there_and_what_is_absent_is_none() -> None:
    empty = as_document(operator_pb2.GetBalanceResponse())
    assert empty == {
        "points": [],
        "rank_loads": None,
        "load_steps": 0,
        "last_decision": None,
        "last_plan": None,
    }
    assert as_document(operator_pb2.AgentStatus(rank=3))["silent_seconds"] is None
    assert as_document(operator_pb2.PastVerdict(hindsight=0.0))["hindsight"] == 0.0


def test_arrays_digests_and_large_numbers() -> None:
    loads_LR = np.arange(6, dtype=np.int32).reshape(2, 3)
    answer = operator_pb2.GetBalanceResponse(
        rank_loads=pack(loads_LR), points=[operator_pb2.BalancePoint(at=1.5, layers_switched=2**40)]
    )
    document = as_document(answer)
    assert document["rank_loads"] == loads_LR.tolist()
    assert document["points"][0]["layers_switched"] == 2**40
    status = as_document(operator_pb2.GetStatusResponse(status=operator_pb2.DeploymentStatus(digest=0x1F)))
    assert status["status"]["digest"] == "0x000000000000001f"
    json.dumps(status, allow_nan=False)
