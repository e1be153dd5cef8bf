"""Trace file of the newest steps, which ``eplb replay`` and ``eplb advise`` read."""

from __future__ import annotations

import os
import secrets
from collections import deque
from pathlib import Path

import numpy as np

from eplb_core.placement import Int32

MAX_BYTES = 64 << 20
"""Maximum size of the heat in memory. Older steps are dropped."""


class TraceFile:
    """An ``.npz`` file with the heat of the newest steps, written atomically.

    Parameters
    ----------
    path
        The file.
    max_bytes
        Maximum size of the heat in memory and in the uncompressed file.

    Raises
    ------
    ValueError
        If the file's name does not end in ``.npz``, or its folder does not exist or cannot be written to.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "heat.npz"
    >>> trace = TraceFile(path, max_bytes=2 * 4 * 3)
    >>> trace.append(7, np.arange(9, dtype=np.int32).reshape(3, 1, 3))
    >>> trace.write()
    >>> np.load(path)["heat"].tolist(), np.load(path)["step"].tolist()
    ([[[3, 4, 5]], [[6, 7, 8]]], [8, 9])
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path.resolve()
        self._max_bytes = max_bytes
        self._rows: deque[tuple[int, Int32]] = deque()
        self._is_written = True
        folder = self._path.parent
        if path.suffix != ".npz":
            raise ValueError(f"{path}: the name must end in .npz")
        if not folder.is_dir():
            raise ValueError(f"{path}: the folder {folder} does not exist; create it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{path}: no write permission for {folder}; choose another folder")

    def append(self, first_step: int, heat_TLE: Int32) -> None:
        """Add consecutive steps, int32 ``[T, L, E]``, and drop the oldest steps that no longer fit.

        Steps without tokens are skipped. An idle engine runs such steps if its ranks wait for each other.
        """
        # Copy each row, because a view would keep its report in memory.
        rows = [
            (first_step + index, heat_LE.copy()) for index, heat_LE in enumerate(heat_TLE) if heat_LE.any()
        ]
        if not rows:
            return
        self._rows.extend(rows)
        max_steps = max(1, self._max_bytes // max(1, heat_TLE[0].nbytes))
        while len(self._rows) > max_steps:
            self._rows.popleft()
        self._is_written = False

    def write(self) -> None:
        """Replace the file with the steps in memory, unless it contains them already. Raises ``OSError`` on failure."""
        if self._is_written:
            return
        scratch = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            with scratch.open("xb") as file:
                np.savez_compressed(
                    file,
                    heat=np.stack([heat_LE for _, heat_LE in self._rows]),
                    step=np.array([step for step, _ in self._rows], dtype=np.int64),
                )
            scratch.replace(self._path)
        finally:
            scratch.unlink(missing_ok=True)
        self._is_written = True
