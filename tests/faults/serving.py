"""Ranks that serve drifting heat, compare outputs with layers that are never switched, and inject faults on request.

A test requests a fault by creating a file ``RANK.FAULT`` in the scene's directory. Each rank looks for such files at
every step.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_lab.history.check import read_histories, violations
from tests.agent import live
from tests.agent.queued_device import Passes
from worker_agent.agent import Agent
from worker_agent.swap.lane import Deadline, Lane, Parcel

LAYERS = 2
STEP_SECONDS = 0.003
HOT_SECONDS = 1.5
"""Time that an expert stays the hottest, in seconds."""
CALM_SECONDS = 15.0
"""The same time once the file ``calm`` exists. It is longer, so that moves pay off on slow hosts as well."""
# In seconds. A busy machine may delay a step, but by much less than the shortest vote deadline.
LONGEST_STEP = 20.0
TOKENS = 12
_SAMPLE_STEPS = 200
AHEAD = (1, 3, 6)
"""Maximum number of passes that each rank's host may run ahead of its device."""

CALLS = {"miss-call": 0, "double-call": 2}
"""Number of agent calls that a host makes after the next forward pass, by fault."""


@dataclass(frozen=True)
class Manners:
    """Behaviour of hosts when they start, run ahead and exit.

    Each rank runs its first forward pass ``late`` seconds after the agents have met. All ranks drain and then close,
    unless ``exits`` is given: each rank then closes after its own number of seconds, even while a plan is in progress.
    Each host may run up to ``ahead`` passes ahead of its device.
    """

    late: Sequence[float] = ()
    exits: Sequence[float] | None = None
    ahead: Sequence[int] = ()


WELL_BEHAVED = Manners()


@dataclass(frozen=True)
class Sample:
    """Resources in use by a rank's process at a step: resident memory, file descriptors and threads."""

    megabytes: float
    files: int
    threads: int

    @classmethod
    def now(cls) -> Sample:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return cls(megabytes, len(list(Path("/proc/self/fd").iterdir())), threading.active_count())


@dataclass(frozen=True)
class Facts:
    """Facts recorded by one rank."""

    worst: float
    longest_step: float
    steps: int
    epoch: int
    digest: int
    halted: str | None
    aborted: int
    same_addresses: bool
    samples: tuple[Sample, ...] = ()


def serve(address: str, folder: str, changes: dict[str, Any], manners: Manners = WELL_BEHAVED) -> Facts:
    """Serve until the file ``stop`` appears. The ranks use a collective to stop at the same step."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    group = dist.new_group(backend="gloo")
    layers, still = (live.layers_of(LAYERS, live.linear_RS(ranks)) for _ in range(2))
    settings = live.settings(service=address, history=Path(folder) / "history", **changes)
    passes = Passes(manners.ahead)
    agent = Agent.start(passes.live(layers), group, settings)
    addresses = tensor_addresses(layers)
    samples: list[Sample] = []
    time.sleep(manners.late[rank] if manners.late else 0.0)
    generator = np.random.default_rng(rank)
    worst = 0.0
    longest = 0.0
    steps = 0
    began = time.monotonic()

    def forward(hidden_TH: torch.Tensor, ids_TK: torch.Tensor) -> None:
        nonlocal worst
        worst = max(worst, live.difference(layers, still, hidden_TH, ids_TK))
        time.sleep(STEP_SECONDS)

    passes_follow = True
    while passes_follow:
        hot_seconds = CALM_SECONDS if (Path(folder) / "calm").exists() else HOT_SECONDS
        hot = int((time.monotonic() - began) / hot_seconds) % live.EXPERTS
        # A rank without tokens also takes part in the step.
        tokens = 0 if rank == 0 and steps % 5 == 0 else TOKENS
        other_T = generator.integers(1, live.EXPERTS, size=tokens)
        ids_TK = torch.from_numpy(np.stack([np.full(tokens, hot), (hot + other_T) % live.EXPERTS], axis=1))
        hidden_TH = torch.from_numpy(generator.standard_normal((tokens, live.HIDDEN), dtype=np.float32))
        passes_follow = passes.run(partial(forward, hidden_TH, ids_TK), not (Path(folder) / "stop").exists())
        calls = _calls_of_this_pass(folder, rank, agent)
        before = time.monotonic()
        for _ in range(calls):
            agent.step()
        longest = max(longest, time.monotonic() - before)
        steps += 1
        if steps % _SAMPLE_STEPS == 0:
            samples.append(Sample.now())
    passes.end()
    if manners.exits is None:
        agent.drain("the test is over")
    else:
        time.sleep(manners.exits[rank])
        agent.close()
    served = agent.installed
    same = addresses == tensor_addresses(layers)
    seen = agent.halted, agent.stats.plans_aborted, same, tuple(samples)
    facts = Facts(worst, longest, steps, served.epoch, served.digest, *seen)
    if manners.exits is None:
        agent.close()
    return facts


def _calls_of_this_pass(folder: str, rank: int, agent: Agent) -> int:
    """Inject the requested faults into this rank and return the number of agent calls to make now."""
    calls = 1
    for request in Path(folder).glob(f"{rank}.*"):
        fault = request.suffix[1:]
        request.unlink()
        if fault in CALLS:
            calls = CALLS[fault]
        else:
            FAULTS[fault](agent)
    return calls


def check_served(facts: list[Facts], folder: Path, longest_step: float = LONGEST_STEP) -> None:
    """Check that despite the faults, outputs are correct, layouts equal, steps prompt, and histories consistent."""
    assert max(fact.worst for fact in facts) < 1e-5
    assert len({(fact.epoch, fact.digest) for fact in facts}) == 1
    assert all(fact.same_addresses for fact in facts)
    assert max(fact.longest_step for fact in facts) < longest_step
    for ranks in read_histories(folder / "history").values():
        assert list(violations(ranks)) == []


def tensor_addresses(layers: list[Any]) -> list[int]:
    tensors = [t for layer in layers for t in (*layer.expert_weights(), layer.expert_map, layer.log2phy)]
    return [tensor.data_ptr() for tensor in tensors]


# Faults that a rank injects into itself


def _stall_next_transfer(agent: Agent) -> None:
    transfers = agent._switch.transfers
    live.before_next_call(transfers.staging, "reserve", lambda: time.sleep(transfers._timeout + 0.5))


def _corrupt_next_transfer(agent: Agent) -> None:
    lanes = agent._switch.transfers._lanes
    open_lane = lanes.lane

    def one_that_damages(number: int) -> Lane:
        lanes.lane = open_lane
        lane = open_lane(number)
        exchange = lane.exchange

        def flip_once(outgoing: list[Parcel], incoming: list[Parcel], deadline: Deadline) -> float:
            seconds = exchange(outgoing, incoming, deadline)
            if incoming:
                lane.exchange = exchange
                incoming[0].data[0] ^= 1
            return seconds

        lane.exchange = flip_once
        return lane

    lanes.lane = one_that_damages


def _die(thread: threading.Thread) -> None:
    """End a thread as an unhandled bug would."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _kill_transfer_thread(agent: Agent) -> None:
    transfers = agent._switch.transfers
    _die(transfers._thread)
    # The exception is raised when the thread next runs Python code, so give it a job to wake it up.
    transfers._jobs.put(None)


def _kill_stream_thread(agent: Agent) -> None:
    _die(agent._stream._thread)
    call = agent._stream._call
    if call is not None:
        call.cancel()


def _break_heat_at_a_commit(agent: Agent) -> None:
    """Make the agent fail to copy this rank's heat at the next commit."""

    def fail() -> None:
        raise OSError("the heat cannot be copied")

    heat = agent._heat
    live.before_next_call(
        agent._switch, "_before_commit", lambda: live.before_next_call(heat, "_copy_out", fail)
    )


def _stall(agent: Agent) -> None:
    """Sleep past the vote deadline once the other ranks have cast their ballots."""
    vote = agent._switch.vote
    votes = agent._switch.votes
    settings = votes._settings

    def stalled(step: int) -> None:
        if step % settings.vote_interval == 0 and step >= votes._next:
            agent._switch.vote = vote
            time.sleep(settings.vote_timeout_seconds + 1.0)
        vote(step)

    agent._switch.vote = stalled


def _lose_votes(agent: Agent) -> None:
    if agent._switch.votes.voter is not None:
        agent._switch.votes.voter.leave()


FAULTS: dict[str, Callable[[Agent], None]] = {
    "sleep": lambda _: time.sleep(2.0),
    "fail-next-transfer": live.fail_once_to_stage,
    "stall-next-transfer": _stall_next_transfer,
    "corrupt-next-transfer": _corrupt_next_transfer,
    "kill-transfer-thread": _kill_transfer_thread,
    "kill-stream-thread": _kill_stream_thread,
    "break-heat-at-a-commit": _break_heat_at_a_commit,
    "lose-votes": _lose_votes,
    "stall": _stall,
}
