"""Client that asks a service for the decisions of policy mode."""

from __future__ import annotations

import time
from typing import cast

import grpc
import numpy as np
import numpy.typing as npt

from eplb_core.placement import Int32
from eplb_core.wire.codec import encode, parts_of
from eplb_core.wire.engine import DecideRequest, decode_decision
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2_grpc
from worker_agent.policy.agreement import RemoteDecisionError
from worker_agent.policy.figures import Int64, log_decision
from worker_agent.settings import AgentSettings


class ServiceDecision:
    """An ``agreement.RemoteDecision`` that asks a service for each decision.

    Parameters
    ----------
    settings
        Settings of the agent: the service's address and security settings, and the deadline.
    split
        The engine's split of an expert's tokens over its replicas.
    """

    def __init__(self, settings: AgentSettings, split: str) -> None:
        self._settings = settings
        self._split = split

    def __call__(
        self, heat_NLE: npt.NDArray[np.generic], old_LP: Int64, ranks: int, nodes: int, timed: bool
    ) -> Int64:
        """Return the service's placement, int64 ``[L, P]``.

        Raises ``RemoteDecisionError`` if no valid answer arrives within ``decision_timeout_seconds``.
        """
        settings = self._settings
        began = time.perf_counter()
        experts = heat_NLE.shape[2]
        try:
            request = DecideRequest(
                settings.deployment,
                ranks,
                nodes,
                experts,
                cast(Int32, heat_NLE),  # packed in the narrowest type that fits
                old_LP.astype(np.int32),
                self._split,
                sum_only=not timed,
            )
            token = settings.token()
            metadata = [] if token is None else [("authorization", f"Bearer {token}")]
            # Open a new channel for each decision. Decisions are minutes apart, and credentials may have been rotated.
            with settings.security.open(settings.service) as channel:
                stub = agent_pb2_grpc.AgentServiceStub(channel)
                responses = stub.Decide(
                    parts_of(encode(request).SerializeToString()),
                    timeout=settings.decision_timeout_seconds,
                    metadata=metadata,
                )
                new_LP = decode_decision(next(iter(responses)), old_LP, experts).astype(np.int64)
        except grpc.RpcError as error:
            raise RemoteDecisionError(getattr(error, "details", error.__str__)()) from error
        except StopIteration:
            raise RemoteDecisionError("the service ended the call without an answer") from None
        except (WireError, OSError) as error:
            raise RemoteDecisionError(str(error)) from error
        log_decision(heat_NLE, old_LP, new_LP, ranks, time.perf_counter() - began, self._split)
        return new_LP


def service_decision(settings: AgentSettings, split: str) -> ServiceDecision | None:
    """Return a client for the service named in the settings; ``None`` if ``EPLB_AGENT_SERVICE`` is not set."""
    return ServiceDecision(settings, split) if "service" in settings.model_fields_set else None
