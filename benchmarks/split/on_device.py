"""What the stepwise split costs on a GPU, called operator by operator and replayed as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.solver.heat_kinds import generate
from eplb_service.placement import Int32
from tests.moe.captured import captured
from worker_agent.moe.stepwise import StepwiseSplit

ROUNDS = (10, 20, 40)
CALLS = 200
_WARM = 10
_STEPS = 16


@dataclass(frozen=True)
class DeviceCost:
    """Microseconds of the device at 5, 50 and 95 % of the calls, by CUDA events; each with one number of rounds."""

    rounds: int
    ends_eager: tuple[float, ...]
    """From the step's counts to where every replica's tokens end: what is timed on a CPU."""

    ends_graph: tuple[float, ...]
    choices_eager: tuple[float, ...]
    """The same, with the counting before and the physical expert of every choice of the step after it."""

    choices_graph: tuple[float, ...]
    same: int
    """Steps in which graph, eager calls and a CPU choose alike."""

    steps: int


def check_device(device: str) -> None:
    """Raise ``ValueError`` where there is no such CUDA device."""
    if device.partition(":")[0] != "cuda":
        raise ValueError(f"--device is {device}; the split is timed on cpu or on a CUDA device")
    if not torch.cuda.is_available():
        raise ValueError(f"--device is {device}, and torch {torch.__version__} sees no CUDA device here")


@torch.no_grad()
def device_cost(
    experts: int, ranks: int, slots: int, tokens: int, device: str, choices: int = 8
) -> Iterator[DeviceCost]:
    """One for each number of rounds; all choices of a step are looked up, as where every rank has all tokens.

    Shapes do not depend on the placement, nor times: it is a simple one.
    """
    heat_TE = generate("static", 1, experts, _STEPS, tokens=tokens, choices=choices)[:, 0]
    placed_RS = ring_placement(heat_TE.sum(axis=0), ranks, slots)
    order = torch.Generator().manual_seed(0)
    ids_TN = [torch.from_numpy(np.repeat(np.arange(experts, dtype=np.int32), heat_E)) for heat_E in heat_TE]
    ids_TNK = [ids_N[torch.randperm(len(ids_N), generator=order)].view(-1, choices) for ids_N in ids_TN]
    for rounds in ROUNDS:
        here, there = (StepwiseSplit(placed_RS, experts, where, rounds) for where in ("cpu", device))
        ids_NK = ids_TNK[0].to(device)
        counts_E = torch.from_numpy(heat_TE[0].copy()).to(device)

        def ends(split: StepwiseSplit = there, counts_E: torch.Tensor = counts_E) -> torch.Tensor:
            return split.ends(counts_E)

        def chosen(split: StepwiseSplit = there, ids_NK: torch.Tensor = ids_NK) -> torch.Tensor:
            return split.split(ids_NK, None)

        (replay_ends, _), (replay_chosen, graph_NK) = captured(ends), captured(chosen)
        same = 0
        for step_NK in ids_TNK:
            ids_NK.copy_(step_NK)
            replay_chosen()
            eager_NK = chosen()
            same += torch.equal(graph_NK, eager_NK) and torch.equal(eager_NK.cpu(), here.split(step_NK, None))
        yield DeviceCost(
            rounds,
            microseconds(ends),
            microseconds(replay_ends),
            microseconds(chosen),
            microseconds(replay_chosen),
            same,
            len(ids_TNK),
        )


def ring_placement(heat_E: Int32, ranks: int, slots: int) -> Int32:
    """Experts in order, and in each rank's last slot the hottest expert of another rank: int32 ``[R, S]``.

    Raises ``ValueError`` unless every rank has exactly one spare slot.
    """
    own = heat_E.size // ranks
    if (own * ranks, own + 1) != (heat_E.size, slots):
        raise ValueError(f"{heat_E.size} experts leave no single spare slot on {ranks} ranks x {slots}")
    own_RS = np.arange(heat_E.size, dtype=np.int32).reshape(ranks, own)
    hottest_R = own_RS[np.arange(ranks), heat_E[own_RS].argmax(axis=1)]
    # Far enough away that neighbours, whose heat is alike, do not share.
    other_R = np.roll(hottest_R, -(ranks // 3 + 1))
    return np.ascontiguousarray(np.hstack([own_RS, other_R[:, None]]))


def microseconds(call: Callable[[], object]) -> tuple[float, ...]:
    """Between events before and after each of so many calls, which are queued without waiting."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS + _WARM)]
    torch.cuda.synchronize()
    for begun, done in events:
        begun.record()
        call()
        done.record()
    torch.cuda.synchronize()
    times = [1e3 * begun.elapsed_time(done) for begun, done in events[_WARM:]]
    return tuple(float(x) for x in np.percentile(times, (5, 50, 95)))
