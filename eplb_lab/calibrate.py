"""Time this machine's expert kernel over a grid of busy slots and tokens, for ``eplb calibrate`` to fit a cost curve.

``python -m eplb_lab.calibrate TASK`` takes a task as JSON and prints one JSON line per measurement. ``eplb calibrate``
starts it. Run it before serving, never while serving.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eplb_lab.layer.experts import ExpertBatch
from eplb_lab.layer.operators import GroupListType, operators_for
from eplb_lab.layer.quantization import Unquantized
from eplb_lab.layer.weights import ExpertWeights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class _Task:
    """Settings of one calibration run. The field names are the JSON keys.

    Parameters
    ----------
    hidden
        H, the width of the tokens.
    inter
        I, the intermediate width of an expert.
    slots
        S, the number of slots.
    tokens
        Tokens per busy slot, one entry for each column of the grid.
    dtype
        Data type of weights and tokens; see ``_DTYPES``.
    device
        Torch device.
    repeats
        Number of timed calls per cell of the grid.
    threads
        Number of CPU threads; ``None`` for torch's default.
    """

    hidden: int
    inter: int
    slots: int
    tokens: list[int]
    dtype: str = "float32"
    device: str = "cpu"
    repeats: int = 7
    threads: int | None = None


def _measure(task: _Task) -> Iterator[dict[str, float]]:
    """Time the experts on the grid, and yield the shortest time for each cell.

    Each slot has its own weights, so that no weights happen to be cached. Each round times every cell
    once, so that a slowdown of the machine affects all cells equally.
    """
    if task.dtype not in _DTYPES:
        raise ValueError(f"dtype is {task.dtype!r}; choose one of {', '.join(_DTYPES)}")
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    cells = [(busy, tokens) for busy in _busy_slots(task.slots) for tokens in task.tokens]
    with torch.inference_mode():
        weights = _weights(task)
        calls = [_Call(task, weights, *cell) for cell in cells]
        us_per_cell: list[list[float]] = [[] for _ in cells]
        for repeat in range(task.repeats + 1):
            for call, cell_us in zip(calls, us_per_cell, strict=True):
                us = call.timed()
                # The first round only warms up.
                if repeat:
                    cell_us.append(us)
    for (busy, tokens), cell_us in zip(cells, us_per_cell, strict=True):
        # Other load on the machine only ever adds time to a call, so the minimum is the best estimate.
        yield {"busy": busy, "tokens": tokens, "us": min(cell_us)}


def _busy_slots(slots: int) -> tuple[int, ...]:
    """Return the counts of busy slots to measure: one, a quarter, a half and all of them.

    Examples
    --------
    >>> _busy_slots(8), _busy_slots(3)
    ((1, 2, 4, 8), (1, 3))
    """
    return tuple(sorted({max(1, slots * quarters // 4) for quarters in (0, 1, 2, 4)}))


class _Call:
    """A kernel call that can be repeated with the same tokens.

    Parameters
    ----------
    task
        The task.
    weights
        Weights of all slots.
    busy
        Number of busy slots. They are the rank's last slots.
    tokens
        Tokens per busy slot.
    """

    def __init__(self, task: _Task, weights: ExpertWeights, busy: int, tokens: int) -> None:
        dtype = _DTYPES[task.dtype]
        counts_S = torch.zeros(task.slots, dtype=torch.int64, device=task.device)
        counts_S[task.slots - busy :] = tokens
        rows_NH = torch.randn(busy * tokens, task.hidden, device=task.device).to(dtype)
        self._batch = ExpertBatch(rows_NH, counts_S, GroupListType.COUNTS)
        self._weights = weights
        self._dtype = dtype
        self._device = torch.device(task.device)
        self._experts = Unquantized(operators_for(self._device))

    def timed(self) -> float:
        """Make one call, and return its duration in microseconds."""
        self._wait()
        began = time.perf_counter()
        self._experts.apply(self._batch, self._weights, self._dtype)
        self._wait()
        return (time.perf_counter() - began) * 1e6

    def _wait(self) -> None:
        # On devices other than the CPU, a call only enqueues the work.
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize(self._device)


def _weights(task: _Task) -> ExpertWeights:
    """Return random weights for all slots."""
    dtype = _DTYPES[task.dtype]
    w13_SIH = torch.empty(task.slots, 2 * task.inter, task.hidden, dtype=dtype, device=task.device)
    w2_SHI = torch.empty(task.slots, task.hidden, task.inter, dtype=dtype, device=task.device)
    return ExpertWeights(w13_SIH.normal_(std=task.hidden**-0.5), w2_SHI.normal_(std=task.inter**-0.5))


def main() -> int:
    """Measure the task in the first argument, and return the exit code."""
    try:
        task = _Task(**json.loads(sys.argv[1]))
        for cell in _measure(task):
            print(json.dumps(cell), flush=True)
    except (ValueError, RuntimeError, AssertionError, MemoryError) as error:
        # For example, torch does not support the device, or the device has too little memory.
        print(" ".join(str(error).split())[:300], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
