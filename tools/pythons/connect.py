"""Connect an agent's control stream to a service, without torch: ``python connect.py HOST:PORT DEPLOYMENT``."""

from __future__ import annotations

import sys
import time

from eplb_core.placement import Placement
from eplb_core.wire.agent import Heartbeat, Shape
from worker_agent.settings import AgentSettings
from worker_agent.stream import Outbox, ServiceStream
from worker_agent.swap.rank_layout import Identity, RankLayout

PATIENCE_SECONDS = 600.0


def main() -> None:
    """Send a Hello as a deployment's only rank, and wait for the Welcome."""
    service, deployment = sys.argv[1:]
    placement = Placement.linear(2, 4, 1, 4)
    installed = RankLayout.first(0, placement, placement.default_log2phy()[0])
    identity = Identity(deployment, "group", 0, "here", (0,), Shape(1, 2, 4, 4, 64))
    settings = AgentSettings(service=service, deployment=deployment)
    stream = ServiceStream(
        settings, identity, Outbox(), lambda: installed, lambda: 0, lambda: Heartbeat(step=0, error="")
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while stream.welcome is None and time.monotonic() < deadline:
        time.sleep(0.05)
    welcome = stream.welcome
    stream.close(5.0)
    if welcome is None:
        sys.exit(f"the service at {service} did not welcome the agent within {PATIENCE_SECONDS:g} s")
    print(f"connected; the heartbeat interval is {welcome.heartbeat_seconds:g} s")


if __name__ == "__main__":
    main()
