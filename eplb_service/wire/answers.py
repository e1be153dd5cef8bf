"""What a service answers to operators, checked where it is read: fields within bounds, texts fit for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eplb_service.wire.balance import decode_balance, encode_balance
from eplb_service.wire.deployment_status import (
    decode_deployment_status,
    decode_placement,
    decode_report,
    encode_deployment_status,
    encode_placement,
    encode_report,
)
from eplb_service.wire.fields import LAST_VERSION, LONGEST_MESSAGE, check_count, printable
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.past_plan import decode_history, encode_past_plan

_MOST_DEPLOYMENTS = 1 << 16


def checked_answer(message: Any) -> Any:
    """The answer as it may be shown.

    Raises
    ------
    WireError
        A field cannot be what it is; the text names it.
    """
    check = _CHECKS.get(type(message))
    return message if check is None else check(message)


def _deployments(message: operator_pb2.ListDeploymentsResponse) -> operator_pb2.ListDeploymentsResponse:
    check_count(len(message.deployments), "deployments", _MOST_DEPLOYMENTS)
    listed = [encode_deployment_status(decode_deployment_status(status)) for status in message.deployments]
    return operator_pb2.ListDeploymentsResponse(deployments=listed)


def _history(message: operator_pb2.GetHistoryResponse) -> operator_pb2.GetHistoryResponse:
    return operator_pb2.GetHistoryResponse(plans=map(encode_past_plan, decode_history(message)))


def _rebalanced(message: operator_pb2.RebalanceResponse) -> operator_pb2.RebalanceResponse:
    check_count(message.plan_id, "rebalance.plan_id", LAST_VERSION)
    message.outcome = printable(message.outcome, LONGEST_MESSAGE)
    return message


_CHECKS: dict[type[Any], Callable[[Any], Any]] = {
    operator_pb2.ListDeploymentsResponse: _deployments,
    operator_pb2.GetStatusResponse: lambda message: encode_report(decode_report(message)),
    operator_pb2.GetPlacementResponse: lambda message: encode_placement(decode_placement(message)),
    operator_pb2.GetHistoryResponse: _history,
    operator_pb2.GetBalanceResponse: lambda message: encode_balance(decode_balance(message)),
    operator_pb2.RebalanceResponse: _rebalanced,
}
