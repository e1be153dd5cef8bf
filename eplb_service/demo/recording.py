"""Writes what a demo has served as a trace: heat per step, by source rank, and what was asked meanwhile."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.atomic_write import write_atomically
from eplb_service.demo.scoreboard import Int64, Scoreboard


def write_recording(path: Path, board: Scoreboard) -> None:
    """Write an ``.npz`` with all steps; raises ``OutputError``.

    It holds ``counts`` ``[T, L, E]`` and ``source`` ``[T, R, L, E]``, and of the model's demo also ``phase`` ``[T]``
    (which of ``phase_names`` new requests belonged to) and ``requests`` ``[T, R, D]`` (in flight, by ``domain_names``).
    """
    arrays: dict[str, npt.NDArray[Any]] = {
        "counts": _smallest(board.counts()),
        "source": _smallest(board.source()),
    }
    if board.facts.get("domains"):
        arrays["phase"] = np.asarray(board.column(0, "phase"), dtype=np.uint8)
        arrays["phase_names"] = np.asarray(board.facts["phases"])
        requests_RTD = [board.column(rank, "requests") for rank in range(board.ranks)]
        arrays["requests"] = _smallest(np.asarray(requests_RTD).transpose(1, 0, 2))
        arrays["domain_names"] = np.asarray(board.facts["domains"])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type] # numpy's stub takes ** for its own flag
    write_atomically(path, buffer.getvalue())


def _smallest(counts: Int64) -> npt.NDArray[np.unsignedinteger]:
    """The same numbers in the smallest unsigned type that holds them."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
