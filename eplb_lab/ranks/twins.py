"""Both sets of layers on a demo rank: the agent balances the *live* layers, and the *still* layers never change.

All ranks share a few cores of one machine, so the hottest rank takes no longer than the others. Each rank therefore
emulates a separate device: it sleeps until the step time from a cost curve has passed. Progress reports are JSON lines
on stdout, one every few steps.
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
    """A rank's task, read from a JSON file that ``eplb_lab.demo.stage`` writes.

    Parameters
    ----------
    service
        ``host:port`` of the service.
    deployment
        Name of the deployment.
    rendezvous
        File through which the ranks form their process group.
    ranks
        R, the number of ranks.
    slots
        S, the number of slots per rank.
    dispatcher
        ``all2allv``, ``allgather``, ``mc2`` or, for models only, ``moge``.
    split
        Method of splitting an expert's tokens over its replicas in the live layers: ``tables`` or ``step``.
    dealing_width
        Number of replicas per expert and source rank in the dealing table.
    seed
        Seed for the requests or tokens and, with a trace, for the layers' weights.
    report_every
        Number of steps between progress reports.
    device
        Fields of ``Device``.
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
    """Balanced layers of a rank, their agent, and copies of the layers that keep the initial layout.

    The object also keeps the measurements for the next report.

    Parameters
    ----------
    task
        The rank's task.
    rank
        Index of the rank.
    group
        Process group of all ranks.
    live
        Layers that the agent balances.
    still
        Layers that keep their initial layout.
    """

    def __init__(
        self,
        task: Task,
        rank: int,
        group: dist.ProcessGroup,
        live: Sequence[ExpertParallelMoE],
        still: Sequence[ExpertParallelMoE],
    ) -> None:
        # The devices are emulated, so expert transfers may use the link's full bandwidth.
        settings = AgentSettings(service=task.service, deployment=task.deployment, link_share=1.0)
        token_group = 0 if live[0].shares_tokens else None
        self.agent = Agent.start(live, group, settings, token_group=token_group)
        self._task = task
        self._rank = rank
        self._live = live
        self._still = still
        self._device = Device(**task.device)  # type: ignore[arg-type]
        self._rows: list[dict[str, object]] = []
        self._worst_difference = 0.0
        self._largest_output = 0.0

    def serve(
        self,
        steps: int,
        one_step: Callable[[int], dict[str, object]],
        totals: Callable[[], dict[str, object]] = dict,
    ) -> None:
        """Run all steps, report progress, and close the agent.

        Parameters
        ----------
        steps
            Number of steps.
        one_step
            Function that runs a step and returns fields for its report, in addition to the loads.
        totals
            Function that returns fields for a progress report, in addition to the agent's counters.
        """
        # Unlike an engine, the demo waits for the service, so that all steps can be balanced.
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
        """Run one step of both sets of layers, and return both outputs and the times.

        The order alternates between steps, so that caches favour neither set. After the live layers, the rank sleeps
        until the emulated device would be done, and then calls the agent's ``step``.

        Parameters
        ----------
        step
            Step number.
        tokens
            Number of source tokens of this rank.
        live
            Function that runs the live layers.
        still
            Function that runs the still layers.
        """
        outputs: dict[str, _Output] = {}
        times: dict[str, object] = {"tokens": tokens}
        for name in ("live", "still") if step % 2 else ("still", "live"):
            start = time.perf_counter()
            outputs[name] = live() if name == "live" else still()
            layers = self._live if name == "live" else self._still
            device_ms = self._device.step_ms(slot_tokens(layers))
            times[f"{name}_ms"] = device_ms
            if name == "live":
                sleep_until(start, device_ms)
                agent_start = time.perf_counter()
                self.agent.step(tokens=tokens)
                times["agent_ms"] = 1e3 * (time.perf_counter() - agent_start)
        return outputs["live"], outputs["still"], times

    def compare(self, live: torch.Tensor, still: torch.Tensor) -> None:
        """Compare the live and still layers' outputs for the same tokens, and keep the largest difference."""
        if live.numel():
            self._worst_difference = max(self._worst_difference, float((live - still).abs().max()))
            self._largest_output = max(self._largest_output, float(still.abs().max()))

    def _loads(self) -> dict[str, object]:
        """Return the loads and the source heat of the last step, for its report."""
        return {
            "live_load": [int(_last_row(layer, layer.moe_load).sum()) for layer in self._live],
            "still_load": [int(_last_row(layer, layer.moe_load).sum()) for layer in self._still],
            "source": [_last_row(layer, layer.source_load).tolist() for layer in self._still],
        }

    def _report(self, totals: dict[str, object]) -> None:
        """Print a progress report with the steps since the previous one."""
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
    """Return the row of the last step from a ring with one row per step."""
    assert ring_WX is not None
    return ring_WX[(int(layer.load_counter) - 1) % ring_WX.shape[0]]


_AnyTask = TypeVar("_AnyTask", bound=Task)


def run(task_type: type[_AnyTask], make: Callable[[_AnyTask, int, dist.ProcessGroup], Any]) -> None:
    """Run the rank process for the command line ``TASK.json RANK``.

    Parameters
    ----------
    task_type
        Type of the task in the JSON file.
    make
        Function that creates the rank from the task, the rank index and the process group. Its ``serve`` method runs
        all steps.
    """
    task = task_type(**json.loads(Path(sys.argv[1]).read_text()))
    rank = int(sys.argv[2])
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    init_method = f"file://{task.rendezvous}"
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method, timeout, world_size=task.ranks, rank=rank)
    make(task, rank, dist.new_group(backend="gloo")).serve()
    dist.barrier()
    dist.destroy_process_group()
