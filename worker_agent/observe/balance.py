"""Balance of an observed engine over an interval, as one log line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, Int32, step_par


@dataclass(frozen=True)
class Steps:
    """Consecutive steps, summed over all ranks.

    Parameters
    ----------
    first_step
        Number of the first step.
    heat_TLE
        int32 ``[T, L, E]``, tokens by logical expert.
    tokens_T
        int64 ``[T]``, tokens of all ranks; -1 if unknown.
    micros_T
        int64 ``[T]``, wall time in microseconds; 0 if unknown.
    """

    first_step: int
    heat_TLE: Int32
    tokens_T: npt.NDArray[np.int64]
    micros_T: npt.NDArray[np.int64]


class IntervalBalance:
    r"""Accumulates the balance of the steps in an interval.

    Parameters
    ----------
    interval
        Number of steps in an interval.

    Examples
    --------
    One layer has two experts, one on each rank. In the second step, rank 0 gets three of four tokens:

    >>> balance = IntervalBalance(interval=2)
    >>> shares_LER = np.eye(2, dtype=np.float32)[None]
    >>> heat_TLE = np.array([[[2, 2]], [[3, 1]]], dtype=np.int32)
    >>> steps = Steps(0, heat_TLE, np.array([4, 4]), np.array([0, 2500]))
    >>> balance.add(steps, shares_LER)
    >>> print(balance.line().replace("; ", "\n"))
    imbalance 1.250 (PAR) over 2 forward passes
    hottest rank 0 (1.25 times the mean), layer 0 (PAR 1.250)
    8 tokens, 2.5 ms a step
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._tokens = 0
        self._micros: list[int] = []
        self._par: list[Float64] = []
        self._load_R: Float64 | None = None

    @property
    def is_over(self) -> bool:
        """True once all steps of the interval have been added."""
        return self._steps >= self._interval

    def add(self, steps: Steps, shares_LER: npt.NDArray[np.float32]) -> None:
        """Add steps in which each rank received these shares of each expert's tokens, ``[L, E, R]``."""
        loads_LTR = np.matmul(steps.heat_TLE.swapaxes(0, 1).astype(np.float32), shares_LER).astype(np.float64)
        loads_TLR = loads_LTR.swapaxes(0, 1)
        self._par.append(step_par(loads_TLR))
        mean_TL1 = loads_TLR.mean(axis=2, keepdims=True)
        # Each layer of each step has the same weight, regardless of its number of tokens.
        load_R = (loads_TLR / np.where(mean_TL1 > 0, mean_TL1, 1.0)).sum(axis=(0, 1))
        self._load_R = load_R if self._load_R is None else self._load_R + load_R
        self._steps += len(steps.heat_TLE)
        known_T = steps.tokens_T[steps.tokens_T >= 0]
        self._tokens += int(known_T.sum())
        self._micros += steps.micros_T[steps.micros_T > 0].tolist()

    def line(self) -> str:
        """Return the log line for the steps so far, and start a new interval."""
        par_TL = np.concatenate(self._par)
        load_R = self._load_R
        steps = self._steps
        tokens = self._tokens
        micros = self._micros
        self._clear()
        counted_TL = np.isfinite(par_TL)
        if load_R is None or not counted_TL.any():
            return f"no tokens in {steps} forward passes"
        per_layer_L = np.where(counted_TL, par_TL, 0.0).sum(axis=0) / np.maximum(counted_TL.sum(axis=0), 1)
        rank = int(load_R.argmax())
        layer = int(per_layer_L.argmax())
        mean_par = per_layer_L[counted_TL.any(axis=0)].mean()
        time = f", {np.median(micros) / 1000:.1f} ms a step" if micros else ""
        return (
            f"imbalance {mean_par:.3f} (PAR) over {steps} forward passes; hottest rank {rank} "
            f"({load_R[rank] / load_R.mean():.2f} times the mean), layer {layer} (PAR {per_layer_L[layer]:.3f}); "
            f"{tokens:,} tokens{time}"
        )
