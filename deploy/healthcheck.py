"""Health check of the image: query the service in this container over plain gRPC.

The exit code is 0 if the service responds with SERVING, and 1 otherwise. The port is taken from EPLB_HEALTH, the
address for health checks only, or from EPLB_LISTEN if EPLB_HEALTH is not set.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 3


def serves(address: str) -> bool:
    """Return True if the service at ``host:port`` responds with SERVING."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            print(f"{address}: {error.details()}", file=sys.stderr)
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    asked = os.environ.get("EPLB_HEALTH") or os.environ.get("EPLB_LISTEN", ":50551")
    sys.exit(not serves(f"127.0.0.1:{asked.rpartition(':')[2]}"))
