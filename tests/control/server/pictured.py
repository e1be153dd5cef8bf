"""A fake service for a deployment of any size, behind the real web page.

JSON documents are built from service messages.
"""

from __future__ import annotations

import json
import math
import mimetypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from google.protobuf import text_format

from eplb_core.wire.codec import pack
from eplb_core.wire.generated import operator_pb2
from eplb_core.wire.operator import as_document
from eplb_service.control.server.web.http_server import _HEADERS, PAGE, figures_document

PAGE_FILES = {
    f"/{file.name}": (mimetypes.guess_type(file.name)[0] or "", file.read_bytes()) for file in PAGE.iterdir()
}
PAGE_FILES["/"] = PAGE_FILES["/index.html"]
"""Media type and content of each of the page's files, by path. ``/`` is the HTML document."""
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@dataclass(frozen=True)
class Pictured:
    """The service's messages at one point in time."""

    known: list[operator_pb2.DeploymentStatus]
    whole: operator_pb2.GetStatusResponse
    balance: operator_pb2.GetBalanceResponse
    history: operator_pb2.GetHistoryResponse


def documents(*sizes: int, **facts: Any) -> dict[str, Any]:
    """Return the document for every API path, for one deployment of the given size and two small ones."""
    return documents_of(messages(*sizes, **facts))


def documents_of(look: Pictured) -> dict[str, Any]:
    """Return the document for every API path, built from these messages."""
    return {
        "service": {"version": "0.1.0"},
        "deployments": {"deployments": [as_document(status) for status in look.known]},
        "deployments/decode": as_document(look.whole),
        "deployments/decode/figures": figures_document(look.whole),
        "deployments/decode/balance": as_document(look.balance),
        "deployments/decode/history": as_document(look.history),
    }


def messages(
    ranks: int, layers: int, slots: int = 1, *, problems: tuple[str, ...] = (), missing: tuple[int, ...] = ()
) -> Pictured:
    """Return the messages for a deployment ``decode`` of this size and for two small deployments."""
    rng = np.random.default_rng(7)
    now = time.time()
    loads_LR = np.clip(rng.gamma(60, 1 / 60, (layers, ranks)), 0, None)
    loads_LR[rng.integers(0, layers, 9), rng.integers(0, ranks, 9)] *= 1.7
    loads_LR /= loads_LR.mean(axis=1, keepdims=True)
    par_L = loads_LR.max(axis=1)
    floor_L = 1.09 + 0.01 * rng.random(layers)
    changed = set(range(0, layers, 3))
    verdicts = [verdict(layer, par_L, floor_L, layer in changed) for layer in range(layers)]
    moves = [
        operator_pb2.LayerMoves(layer=layer, moves=pack(moves_of(rng, ranks, slots, 2 + layer % 13)))
        for layer in sorted(changed)
    ]
    decision = operator_pb2.MadeDecision(solve_seconds=0.187, plan_id=17, outcome="done")
    decision.MergeFrom(
        operator_pb2.MadeDecision(at=now - 42, verdicts=verdicts, moves=moves, committed=len(changed))
    )
    balance = operator_pb2.GetBalanceResponse(
        points=points(now, float(par_L.mean()), float(floor_L.mean())),
        rank_loads=pack(np.rint(1000 * loads_LR).astype(np.int32)),
        load_steps=64,
        last_decision=decision,
        last_plan=decision,
    )
    state = text_format.Parse(STATUS, operator_pb2.DeploymentStatus())
    state.layers = layers
    state.ranks = ranks
    state.slots = slots
    state.par = float(par_L.mean())
    state.experts = ranks * slots - (ranks if slots > 1 else ranks // 5)
    state.agents_connected = ranks - len(missing)
    state.problems.extend(problems)
    whole = operator_pb2.GetStatusResponse(status=state, agents=agents(ranks, missing))
    for layer, layer_verdict in enumerate(verdicts):
        planned = layer_verdict.par_planned if layer in changed else 0
        whole.layers.add(layer=layer, par=par_L[layer], planned_par=planned, epoch=600)
    small_deployments = [
        operator_pb2.DeploymentStatus(
            deployment=name, ranks=16, agents_connected=connected, par=1.07, paused=paused
        )
        for name, connected, paused in (("prefill", 16, False), ("draft", 8, True))
    ]
    return Pictured([state, *small_deployments], whole, balance, history(verdicts, now))


STATUS = """
    deployment: "decode" epoch: 612 digest: 0x1D2C window_steps: 256 steps_received: 48211 steps_lost: 12
    layers_switched: 612 experts_moved: 4031 bytes_moved: 177533413952 par_steps: 64 idle_seconds: 0.4
    redundant_slots: 64 redundant_bytes_per_rank: 2554331136 hottest_rank: 5 hottest_rank_load: 1.04
    hottest_layer: 17 hottest_layer_par: 1.31
    forecast { gain: 0.614 gain_low: 0.527 gain_high: 0.701 }
    worth { steps: 64 par_left_alone: 1.74 par: 1.15 par_gain_percent: 33.9 verdict: "helps" switches: 6
            reason: "measured over 6 switches" price_kind: "measured" price: "step times before and after switches"
            timed_steps: 64 step_ms: 41.2 gain_ms: 6.12 gain_low_ms: 4.9 gain_high_ms: 7.3 gain_percent: 12.9
            ranks_worth: 8.3 tokens_per_second: 24850 tokens_per_second_won: 3210 }
    move_price { price: 0.126 kind: "measured" reason: "42.0 MiB per expert"
                 ms_per_move: 0.35 ms_per_megabyte: 0.008 ms_per_switch: 0.51 }
"""
AGENT = """
    connected: true step: 48230 epoch: 612 agent_version: "0.1.0" silent_seconds: 0.4 ring_bytes: 1500000
"""


def agents(ranks: int, missing: tuple[int, ...]) -> list[operator_pb2.AgentStatus]:
    """Return the agent statuses of all ranks, with eight ranks per node. Rank 5 has dropped steps."""
    statuses = [text_format.Parse(AGENT, operator_pb2.AgentStatus()) for _ in range(ranks)]
    for rank, agent in enumerate(statuses):
        agent.rank = rank
        agent.node = f"node-{rank // 8:02d}"
        agent.connected = rank not in missing
        agent.dropped_steps = 96 if rank == 5 else 0
        agent.staging_bytes = 84_000_000 - rank
    return statuses


def verdict(layer: int, par_L: Any, floor_L: Any, changed: bool) -> operator_pb2.PastVerdict:
    seen = float(par_L[layer]) + (0.25 if changed else 0.0)
    reason = f"placed again: PAR {seen:.3f} to {par_L[layer]:.3f} for {2 + layer % 13} moves"
    return operator_pb2.PastVerdict(
        layer=layer,
        par_seen=seen,
        par_planned=float(par_L[layer]) if changed else seen,
        noise_floor=float(floor_L[layer]),
        moves=2 + layer % 13 if changed else 0,
        changed=changed,
        reason=reason if changed else "kept: the gain does not cover the cost of its moves",
        bytes=44_040_192 * (2 + layer % 13) if changed else 0,
    )


def moves_of(rng: np.random.Generator, ranks: int, slots: int, count: int) -> Any:
    moves_M5 = rng.integers(0, ranks, (count, 5))
    moves_M5[:, [1, 3]] = rng.integers(0, slots, (count, 2))
    return moves_M5.astype(np.int32)


def points(now: float, par: float, floor: float) -> list[operator_pb2.BalancePoint]:
    """Return the points for one hour, in which heat drifts and a plan restores balance six times."""
    return [
        operator_pb2.BalancePoint(
            at=now - 10 * (360 - index),
            par=par + 0.34 * (index % 60 / 60) ** 1.5 * (index < 300) + 0.01 * math.sin(index * 1.7),
            par_planned=math.nan if index < 25 else par - 0.01 + 0.004 * (index // 60),
            noise_floor=math.nan if index < 25 else floor + 0.004 * math.sin(index // 60),
            layers_switched=40 * (index // 60),
            par_left_alone=1.74 + 0.05 * math.sin(index / 20),
        )
        for index in range(360)
    ]


def history(verdicts: list[operator_pb2.PastVerdict], now: float) -> operator_pb2.GetHistoryResponse:
    past = operator_pb2.GetHistoryResponse()
    past.plans.add(plan_id=17, at=now - 42, outcome="done", committed=21, verdicts=verdicts)
    reason = "rank 3: the transfer took longer than 30 s"
    past.plans.add(plan_id=16, at=now - 700, outcome="aborted", reason=reason, committed=2, verdicts=verdicts)
    return past


@contextmanager
def pictured(answers: dict[str, Any], page: dict[str, tuple[str, bytes]] | None = None) -> Iterator[str]:
    """Serve the page with these documents and yield its URL. ``page`` adds or replaces files."""
    extra = page or {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            document = answers.get(path.removeprefix("/api/v1/"))
            if path.startswith("/api/v1/"):
                kind = "application/json"
                body = json.dumps(document or {"error": "unknown"}).encode()
            else:
                kind, body = extra.get(path) or PAGE_FILES.get(path, PAGE_FILES["/"])
            self.send_response(200 if document or not path.startswith("/api/v1/") else 404)
            for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
