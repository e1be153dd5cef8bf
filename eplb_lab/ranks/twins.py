"""A demo's rank serves everything twice: on *live* layers, which an agent balances, and on *still* ones beside them.

Ranks that share a few cores are no slower for being the hottest: all of their work is done by the same cores. So each
rank stands for a device of its own, whose time follows a cost curve, and sleeps until that time has passed. Progress
goes to stdout as JSON lines, one every few steps.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eplb_lab.layer import ExpertParallelMoE
from eplb_lab.ranks.device import Device, sleep_until, slot_tokens
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings

_CONNECT_SECONDS = 30.0

_Output = TypeVar("_Output")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of a rank, in a JSON file that whoever starts the ranks has written.

    ``rendezvous`` is the file by which the ranks' process groups find each other. The dispatcher is ``all2allv``,
    ``allgather`` or ``mc2``, of the model ``moge`` as well; ``split`` is ``tables`` or ``step``: how the balanced
    layers split tokens over replicas. Progress lines come every ``report_every`` steps. ``device`` has the fields of
    ``Device``.
    """

    service: str
    deployment: str
    rendezvous: str
    ranks: int
    slots: int
    dispatcher: str
    split: str
    dealing_width: int
    seed: int
    report_every: int
    device: dict[str, float]


class Twins:
    """Agent of the live layers, and the measurements of both sets since the last line."""

    def __init__(
        self,
        task: Task,
        rank: int,
        group: dist.ProcessGroup,
        live: Sequence[ExpertParallelMoE],
        still: Sequence[ExpertParallelMoE],
    ) -> None:
        # The ranks' devices are emulated, so the model needs no share of the link that carries experts.
        settings = AgentSettings(service=task.service, deployment=task.deployment, link_share=1.0)
        token_group = 0 if live[0].shares_tokens else None
        self.agent = Agent.start(live, group, settings, token_group=token_group)
        self._task, self._rank = task, rank
        self._live, self._still = live, still
        self._device = Device(**task.device)  # type: ignore[arg-type]
        self._rows: list[dict[str, object]] = []
        self._worst_difference = self._largest_output = 0.0

    def serve(
        self,
        steps: int,
        one_step: Callable[[int], dict[str, object]],
        totals: Callable[[], dict[str, object]] = dict,
    ) -> None:
        """Run all steps and end the agent; ``one_step`` and ``totals`` give what is reported beside loads and times."""
        # A demo is to show balancing: it waits for the service, where a real host would just begin.
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not self.agent.connected and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.barrier()
        for step in range(steps):
            self._rows.append({**one_step(step), **self._loads(), "epoch": self.agent.installed.epoch})
            if (step + 1) % self._task.report_every == 0 or step + 1 == steps:
                self._report(totals())
        self.agent.close()

    def by_turns(
        self, step: int, tokens: int, live: Callable[[], _Output], still: Callable[[], _Output]
    ) -> tuple[_Output, _Output, dict[str, object]]:
        """Run a step of both, by turns, so that neither always finds warm caches; return outputs and times.

        The live step takes as long as the device would, at least. The agent steps after it, of ``tokens`` own tokens.
        """
        outputs: dict[str, _Output] = {}
        times: dict[str, object] = {"tokens": tokens}
        for name in ("live", "still") if step % 2 else ("still", "live"):
            began = time.perf_counter()
            outputs[name] = live() if name == "live" else still()
            layers = self._live if name == "live" else self._still
            device_ms = self._device.step_ms(slot_tokens(layers))
            times[f"{name}_ms"] = device_ms
            if name == "live":
                sleep_until(began, device_ms)
                agent_began = time.perf_counter()
                self.agent.step(tokens=tokens)
                times["agent_ms"] = 1e3 * (time.perf_counter() - agent_began)
        return outputs["live"], outputs["still"], times

    def compare(self, live: torch.Tensor, still: torch.Tensor) -> None:
        """Take the same output of both."""
        if live.numel():
            self._worst_difference = max(self._worst_difference, float((live - still).abs().max()))
            self._largest_output = max(self._largest_output, float(still.abs().max()))

    def _loads(self) -> dict[str, object]:
        return {
            "live_load": [int(_last_row(layer, layer.moe_load).sum()) for layer in self._live],
            "still_load": [int(_last_row(layer, layer.moe_load).sum()) for layer in self._still],
            "source": [_last_row(layer, layer.source_load).tolist() for layer in self._still],
        }

    def _report(self, totals: dict[str, object]) -> None:
        stats = self.agent.stats
        line = {
            "rank": self._rank,
            "steps": self._rows,
            "layers_switched": stats.layers_switched,
            "experts_received": stats.experts_received,
            "bytes_received": stats.bytes_received,
            "worst_difference": self._worst_difference,
            "largest_output": self._largest_output,
            "halted": self.agent.halted,
            **totals,
        }
        print(json.dumps(line), flush=True)
        self._rows = []


def _last_row(layer: ExpertParallelMoE, ring_WX: torch.Tensor | None) -> torch.Tensor:
    """Counts of the step just run."""
    assert ring_WX is not None
    return ring_WX[(int(layer.load_counter) - 1) % ring_WX.shape[0]]


_AnyTask = TypeVar("_AnyTask", bound=Task)


def run(task_type: type[_AnyTask], make: Callable[[_AnyTask, int, dist.ProcessGroup], Any]) -> None:
    """Join the other ranks, as ``TASK.json RANK`` on the command line say, and serve."""
    task, rank = task_type(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    meeting = f"file://{task.rendezvous}"
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", meeting, timeout, world_size=task.ranks, rank=rank)
    make(task, rank, dist.new_group(backend="gloo")).serve()
    dist.barrier()
    dist.destroy_process_group()
