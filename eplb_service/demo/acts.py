"""What the demo can serve: the embedded model, or tokens routed as a heat trace counted them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.demo.stage import Stage, Watch, perform


@dataclass(frozen=True)
class TraceAct:
    """Layers with random weights, whose tokens choose the experts that a trace has counted.

    Parameters
    ----------
    counts_TLE
        Heat to serve, int ``[T, L, E]``, as large as the stage says.
    hidden, intermediate
        H and I of each expert.
    """

    counts_TLE: npt.NDArray[np.integer]
    hidden: int
    intermediate: int

    def run(self, stage: Stage, watch: Watch) -> Scoreboard:
        """Serve all steps; raises as ``perform`` does."""
        with TemporaryDirectory(prefix="eplb-demo-") as folder:
            counts = Path(folder) / "counts.npy"
            np.save(counts, self.counts_TLE.astype(np.int64))
            orders = {"counts": str(counts), "hidden": self.hidden, "intermediate": self.intermediate}
            return perform(stage, "worker_agent.demo.rank", orders, watch)


@dataclass(frozen=True)
class ModelAct:
    """The embedded model, which answers requests of changing domains.

    Parameters
    ----------
    rows
        Requests at a time on each rank.
    length
        Bytes of a request, its prompt among them.
    """

    rows: int = 32
    length: int = 96

    def run(self, stage: Stage, watch: Watch) -> Scoreboard:
        """Serve all steps; raises as ``perform`` does."""
        orders = {"steps": stage.steps, "layers": stage.layers, "rows": self.rows, "length": self.length}
        return perform(stage, "worker_agent.demo.model_rank", orders, watch)
