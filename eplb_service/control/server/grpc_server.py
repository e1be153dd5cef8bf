"""The gRPC server: what it serves, its limits, and where it listens."""

from __future__ import annotations

from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eplb_service.control.server.access.gate import Gate
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.agents import AgentService, agent_handlers
from eplb_service.control.server.listening import AGENT_SERVICE, OPERATOR_SERVICE, Certificates, ListenError
from eplb_service.control.server.operator_api import OperatorService
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.wire.channel import is_loopback
from eplb_service.wire.codec import LARGEST_PART, MAX_MESSAGE_BYTES
from eplb_service.wire.generated import operator_pb2_grpc

_log = structlog.get_logger(__name__)

_HANDSHAKE_SECONDS = 10.0
_IDLE_SECONDS = 600.0
_WINDOW_BYTES = 64 << 10
_METADATA_BYTES = 8 << 10
_REFUSED_AT_A_TIME = 256


def grpc_server(
    settings: ServiceSettings,
    plane: ControlPlane,
    operators: OperatorService,
    probes: Any,
    gate: Gate,
    quotas: Quotas,
    certificates: Certificates | None,
) -> tuple[grpc.aio.Server, str]:
    """Return a server of all services behind ``gate``, not started yet, and its ``host:port`` with the real port.

    Parameters
    ----------
    settings
        Address, and bounds of messages and streams.
    plane, operators, probes
        Answer agents, operators and health checks.
    gate, quotas
        Decide who may call, and how much a host may take.
    certificates
        Encrypt connections; ``None`` for plain text.

    Raises
    ------
    ListenError
        Where it cannot listen.
    """
    server = grpc.aio.server(
        interceptors=[gate],
        # Calls beyond max_streams are refused by the gate, which counts them, and a flood of them, or of connections,
        # by the library.
        maximum_concurrent_rpcs=settings.max_streams + _REFUSED_AT_A_TIME,
        options=[
            ("grpc.max_receive_message_length", LARGEST_PART),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_allowed_incoming_connections", settings.max_streams + _REFUSED_AT_A_TIME),
            ("grpc.max_concurrent_streams", settings.max_streams_per_peer),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
            # A connection that says nothing ends; one that is served is kept up by its streams.
            ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_SECONDS)),
            ("grpc.http2.settings_timeout", int(1000 * _HANDSHAKE_SECONDS)),
            ("grpc.max_connection_idle_ms", int(1000 * _IDLE_SECONDS)),
            # What a call sends before anybody reads it stays this small: windows do not grow by themselves.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            # Two services on one port would share its connections unseen.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ],
    )
    server.add_generic_rpc_handlers((agent_handlers(AgentService(plane, quotas)),))
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(operators, server)
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    names = (AGENT_SERVICE, OPERATOR_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    if settings.insecure and not is_loopback(settings.listen):
        _log.warning("serving_insecurely", address=settings.listen)
    try:
        if certificates is None:
            port = server.add_insecure_port(settings.listen)
        else:
            credentials = grpc.dynamic_ssl_server_credentials(
                certificates.current(),
                certificates.changed,  # type: ignore[arg-type, unused-ignore]  # None means: the same as before
                settings.tls_client_ca is not None,
            )
            port = server.add_secure_port(settings.listen, credentials)
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {settings.listen}: {error}; choose another with --listen"
        ) from error
    return server, f"{settings.listen.rpartition(':')[0]}:{port}"
