"""``eplb demo``: serves a model on ranks of this machine, shows how it is balanced, and checks its outputs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import typer

from eplb_core.atomic_write import check_output
from eplb_core.extras import install_command
from eplb_core.planner.settings import DEAL, STEP, TABLES
from eplb_core.wire.fields import check_deployment
from eplb_service.cli.options import RESULTS, UserError, one_of, option, takes_options
from eplb_service.cli.output import write_json

if TYPE_CHECKING:
    from eplb_lab.demo.stage import Stage

_MOGE = "moge"
_DISPATCHERS = ("all2allv", "allgather", "mc2", _MOGE)
_QUANTIZATIONS = ("none", "w8a8")
_SPLITS = (TABLES, DEAL, STEP)
_REQUESTS = 32
_REQUEST_BYTES = 96
_MODEL_STEPS = 720
_TRACE_STEPS = 320
_TRACE_LAYERS = 6
_HIDDEN = 128
_INTERMEDIATE = 64
_WINDOW = 64
_INTERVAL = 32
_FAILED_EXIT_CODE = 1


class _Workload(NamedTuple):
    """Workload of the rank processes."""

    sizes: tuple[int, int, int]
    """Numbers of steps, layers and experts."""
    choices: int
    """Number of experts that a token chooses; 0 for a trace."""
    program: str
    """Module that each rank runs."""
    orders: dict[str, Any]
    """Additional fields of the ranks' task."""


@dataclass(frozen=True)
class WorkloadOptions:
    """Options that select the model or trace to serve."""

    SECTION: ClassVar[str] = "Workload"

    trace: Path | None = option(
        None, "Serve the heat of this trace (any format) instead of the embedded model."
    )
    checkpoint: Path | None = option(
        None,
        "Serve this checkpoint instead of the embedded model: a folder with a Qwen3-MoE or DeepSeek-V2 model for "
        "transformers.",
    )
    steps: int | None = option(
        None, f"Number of steps to serve; by default {_MODEL_STEPS}, or {_TRACE_STEPS} with --trace.", min=1
    )
    quant: str = option("none", f"Quantisation of the model's experts: {', '.join(_QUANTIZATIONS)}.")
    tensor_parallel: int = option(
        1,
        "Number of consecutive ranks that serve the same requests. Each dispatches a share of their tokens. "
        "Requires a model.",
        min=1,
    )
    dual_batch: bool = option(False, "Run every step of the model in two micro-batches.", "--dual-batch")

    def check(self, ranks: int, dispatcher: str) -> None:
        """Raise ``UserError`` if options conflict or transformers is needed but not installed."""
        one_of("unknown quantisation", self.quant, _QUANTIZATIONS)
        is_grouped = dispatcher == _MOGE
        if self.trace is not None and (
            self.dual_batch or self.quant != "none" or is_grouped or self.tensor_parallel > 1
        ):
            raise UserError(
                f"--quant, --dual-batch, --tensor-parallel and --dispatcher {_MOGE} cannot be combined with --trace"
            )
        if ranks % self.tensor_parallel:
            raise UserError(f"--ranks {ranks} is not a multiple of --tensor-parallel {self.tensor_parallel}")
        if self.checkpoint is None:
            return
        if self.trace is not None or is_grouped or self.dual_batch:
            raise UserError(
                f"--trace, --dual-batch and --dispatcher {_MOGE} cannot be combined with --checkpoint; remove them"
            )
        if importlib.util.find_spec("transformers") is None:
            raise UserError(
                f"--checkpoint needs transformers; install it with: {install_command('checkpoint', 'eplb-lab')}"
            )

    def workload(self) -> _Workload:
        """Read the model's sizes or the trace, and return the ranks' workload."""
        if self.trace is not None:
            sizes, orders = _trace(self.trace, self.steps or _TRACE_STEPS)
            return _Workload(sizes, 0, "eplb_lab.ranks.rank", orders)
        from eplb_lab.demo.stage import model_sizes

        layers, experts, choices = model_sizes(self.checkpoint)
        steps = self.steps or _MODEL_STEPS
        orders = {
            "steps": steps,
            "layers": layers,
            "experts": experts,
            "rows": _REQUESTS,
            "length": _REQUEST_BYTES,
            "quantized": self.quant == "w8a8",
            "dual_batch": self.dual_batch,
            "tensor_parallel": self.tensor_parallel,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint.absolute()),
        }
        return _Workload((steps, layers, experts), choices, "eplb_lab.ranks.model_rank", orders)


@takes_options()
def demo(
    served: WorkloadOptions,
    ranks: int = option(4, "Number of rank processes.", min=2, max=64),
    redundant: int = option(8, "Redundant slots per layer, over all ranks.", min=0),
    dispatcher: str = option(
        "all2allv",
        f"Token dispatcher: {', '.join(_DISPATCHERS)}. {_MOGE} is for grouped experts, which do not move.",
    ),
    split: str = option(
        TABLES,
        "Split of an expert's tokens over its replicas: tables (one replica per source rank), deal (several in turn), "
        "or step (according to each step's counts).",
    ),
    address: str | None = option(None, "Address (host:port) of a running service; default: start one."),
    deployment: str = option("demo", "Name of the deployment."),
    seed: int = option(0, "Seed for the requests or tokens, and for the solver.", min=0),
    json: Path | None = option(None, "Write the summary to this .json file.", section=RESULTS),
    picture: Path | None = option(None, "Write the last view and the summary to this .svg file."),
) -> None:
    """Serve a Mixture-of-Experts model on live expert-parallel ranks, let the service balance it, and check the result.

    The embedded model answers requests from changing domains. A second, unbalanced instance of the model also runs
    every step. Both must generate the same bytes, and their rank loads are compared step by step. Ranks emulate devices
    whose time follows a cost curve, so a step takes as long as its hottest rank. Exits with 1 if outputs differ or no
    layer was switched.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"the demo runs live layers and needs torch; install it with: {install_command('model', 'eplb-lab')}"
        )
    for path, suffix in ((json, ".json"), (picture, ".svg")):
        if path is not None:
            check_output(path, (suffix,))
    check_deployment(deployment, "--deployment")
    one_of("unknown dispatcher", dispatcher, _DISPATCHERS)
    one_of("unknown split", split, _SPLITS)
    served.check(ranks, dispatcher)
    from eplb_lab.demo.stage import Stage

    workload = served.workload()
    if dispatcher == _MOGE:
        _check_grouped(ranks, workload.choices, has_replicas=redundant > 0 or split != TABLES)
    stage = Stage(
        *workload.sizes,
        ranks,
        redundant,
        dispatcher,
        split,
        window=_WINDOW,
        interval=_INTERVAL,
        policy="flashlb",
        seed=seed,
        service=address,
        deployment=deployment,
    )
    _perform(stage, workload, json, picture)


def _perform(stage: Stage, workload: _Workload, json: Path | None, picture: Path | None) -> None:
    """Run the demo, show it, and write the results. Exits with 1 if the run or one of its checks fails."""
    from eplb_lab.demo import summary
    from eplb_lab.demo.ranks import RankDiedError
    from eplb_lab.demo.stage import perform
    from eplb_lab.demo.view import save_picture, screen

    with screen(stage.steps) as show:
        try:
            board = perform(stage, workload.program, workload.orders, show.update)
        except RankDiedError as error:
            show.fail(str(error))
            raise typer.Exit(_FAILED_EXIT_CODE) from error
    figures = summary.summarise(board, stage)
    table = summary.table(figures)
    show.finish(table)
    if picture is not None:
        save_picture(picture, show.view(board), table)
    if json is not None:
        write_json(json, figures)
    complaint = summary.complaint(board, stage)
    if complaint is not None:
        show.fail(complaint)
        raise typer.Exit(_FAILED_EXIT_CODE)


def _check_grouped(ranks: int, choices: int, *, has_replicas: bool) -> None:
    """Raise ``UserError`` if grouped experts cannot be served.

    Grouped experts have no replicas, and each token chooses the same number of experts on every rank.
    """
    if has_replicas:
        raise UserError(
            f"--dispatcher {_MOGE} needs --redundant 0 and --split {TABLES}, because grouped experts have no replicas"
        )
    if choices % ranks:
        divisors = [str(number) for number in range(2, choices + 1) if choices % number == 0]
        raise UserError(
            f"--dispatcher {_MOGE} requires --ranks to divide the {choices} choices per token, got {ranks}; "
            f"use --ranks {' or '.join(divisors)}"
        )


def _trace(trace: Path, steps: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return T, L and E for the first steps and some layers of a trace, and additional fields of the ranks' task."""
    import numpy as np

    from eplb_core.heat.window import HeatError
    from eplb_service.io.open_trace import read_heat

    heat_TLE = read_heat(trace)
    if heat_TLE.dtype.kind == "f":
        raise HeatError(
            f"{trace}: the trace has fractional tokens, but the demo needs whole tokens; use a trace of token counts"
        )
    layers_L = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, _TRACE_LAYERS).round().astype(int))
    counts_TLE = heat_TLE[:steps, layers_L].astype(np.int64)
    if counts_TLE.sum() == 0:
        raise HeatError(
            f"{trace}: the first {steps} steps contain no tokens; increase --steps or use a different trace"
        )
    orders = {"counts": counts_TLE, "hidden": _HIDDEN, "intermediate": _INTERMEDIATE}
    return counts_TLE.shape, orders
