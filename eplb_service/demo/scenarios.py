"""What the demo can serve: the embedded model, or tokens routed as a heat trace counted them."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.demo.stage import Stage, Watch, perform

_CONFIG = Path("model", "byte-moe", "config.json")


@dataclass(frozen=True)
class TraceScenario:
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
class ModelScenario:
    """The embedded model, which answers requests of changing domains.

    Parameters
    ----------
    rows
        Requests at a time on each rank.
    length
        Bytes of a request, its prompt among them.
    quantized
        Whether the experts are W8A8.
    dual_batch
        Whether each step's tokens go through the MoE layers in two micro-batches.
    """

    rows: int = 32
    length: int = 96
    quantized: bool = False
    dual_batch: bool = False

    def run(self, stage: Stage, watch: Watch) -> Scoreboard:
        """Serve all steps; raises as ``perform`` does."""
        orders = {"steps": stage.steps, "layers": stage.layers, **vars(self)}
        return perform(stage, "worker_agent.demo.model_rank", orders, watch)


def layers_and_experts() -> tuple[int, int]:
    """L and E of the embedded model; raises as ``choices_per_token`` does."""
    config = _config()
    return config["num_hidden_layers"], config["num_experts"]


def choices_per_token() -> int:
    """K of the embedded model; raises ``FileNotFoundError`` where the agent's package is not installed."""
    return _config()["num_experts_per_tok"]


def _config() -> dict[str, int]:
    """Sizes of the embedded model, read from its checkpoint's config without torch."""
    agent = importlib.util.find_spec("worker_agent")
    if agent is None or agent.origin is None:
        raise FileNotFoundError(
            "the embedded model comes with the worker_agent package, which is not installed"
        )
    config = json.loads((Path(agent.origin).parent / _CONFIG).read_text(encoding="utf-8"))
    return {name: size for name, size in config.items() if isinstance(size, int)}
