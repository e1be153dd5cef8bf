"""Times this machine's expert kernel on a grid of busy slots and tokens: what a cost curve is fitted to.

``python -m eplb_lab.calibrate TASK`` takes a task as JSON and prints one JSON line per measurement; `eplb
calibrate` starts it. It runs before serving, never beside it.
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
    """Measurement of an expert kernel: H, the width between its products, S, and tokens in each busy slot to try.

    ``repeats`` are timed calls of each cell of the grid, ``threads`` those of the CPU; ``None`` for torch's own choice.
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
    """Time the experts on the grid; all slots hold weights of their own, so none is read from a cache by chance.

    Calls of the whole grid take turns, so that what slows the machine for a while slows all cells alike.
    """
    if task.dtype not in _DTYPES:
        raise ValueError(f"dtype is {task.dtype!r}; choose one of {', '.join(_DTYPES)}")
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    cells = [(busy, tokens) for busy in _busy_slots(task.slots) for tokens in task.tokens]
    with torch.inference_mode():
        weights = _weights(task)
        calls = [_Call(task, weights, *cell) for cell in cells]
        us: list[list[float]] = [[] for _ in cells]
        for repeat in range(task.repeats + 1):
            for call, found in zip(calls, us, strict=True):
                taken = call.timed()
                # The first call warms up what it uses.
                if repeat:
                    found.append(taken)
    for (busy, tokens), found in zip(cells, us, strict=True):
        # Whatever else runs on the machine only adds to a call.
        yield {"busy": busy, "tokens": tokens, "us": min(found)}


def _busy_slots(slots: int) -> tuple[int, ...]:
    """Numbers of busy slots to try: one, all, and a quarter and a half of them."""
    return tuple(sorted({max(1, slots * part // 4) for part in (0, 1, 2, 4)}))


class _Call:
    """One call of the kernel; its slots are the last ones of the rank, its rows the same each time."""

    def __init__(self, task: _Task, weights: ExpertWeights, busy: int, tokens: int) -> None:
        dtype, rows = _DTYPES[task.dtype], busy * tokens
        counts_S = torch.zeros(task.slots, dtype=torch.int64, device=task.device)
        counts_S[task.slots - busy :] = tokens
        rows_NH = torch.randn(rows, task.hidden, device=task.device).to(dtype)
        self._batch = ExpertBatch(rows_NH, counts_S, GroupListType.COUNTS)
        self._weights, self._dtype = weights, dtype
        self._device = torch.device(task.device)
        self._experts = Unquantized(operators_for(self._device))

    def timed(self) -> float:
        """Microseconds of one call."""
        self._wait()
        began = time.perf_counter()
        self._experts.apply(self._batch, self._weights, self._dtype)
        self._wait()
        return (time.perf_counter() - began) * 1e6

    def _wait(self) -> None:
        # Other devices than the CPU only queue what they are given.
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize(self._device)


def _weights(task: _Task) -> ExpertWeights:
    dtype = _DTYPES[task.dtype]
    w13_SIH = torch.empty(task.slots, 2 * task.inter, task.hidden, dtype=dtype, device=task.device)
    w2_SHI = torch.empty(task.slots, task.hidden, task.inter, dtype=dtype, device=task.device)
    return ExpertWeights(w13_SIH.normal_(std=task.hidden**-0.5), w2_SHI.normal_(std=task.inter**-0.5))


def main() -> int:
    """Measure the task given as the only argument; returns the exit code."""
    try:
        task = _Task(**json.loads(sys.argv[1]))
        for cell in _measure(task):
            print(json.dumps(cell), flush=True)
    except (ValueError, RuntimeError, AssertionError, MemoryError) as error:
        # Such as a device that torch does not have here, or too little of its memory.
        print(" ".join(str(error).split())[:300], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
