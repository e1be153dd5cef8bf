"""``eplb demo``: the main job on one machine, to watch and to check."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_REQUESTS, _REQUEST_BYTES = 32, 96
_MODEL_STEPS, _TRACE_STEPS = 720, 320
_TRACE_LAYERS, _HIDDEN, _INTERMEDIATE = 6, 128, 64
_WINDOW, _INTERVAL = 64, 32
_FAILED_EXIT_CODE = 1


@takes_options()
def demo(
    ranks: int = option(4, "Rank processes.", min=2, max=64),
    redundant: int = option(8, "Redundant expert slots per layer, over all ranks.", min=0),
    trace: Path | None = option(
        None, "Serve this heat instead of the embedded model: a trace of any format."
    ),
    checkpoint: Path | None = option(
        None,
        "Serve this checkpoint instead of the embedded model: a folder of transformers' Qwen3-MoE or DeepSeek-V2.",
    ),
    steps: int | None = option(
        None, f"Steps to serve (default {_MODEL_STEPS}; of a trace {_TRACE_STEPS}).", min=1
    ),
    dispatcher: str = option(
        "all2allv",
        f"One of {', '.join(_DISPATCHERS)}; {_MOGE} is for grouped experts, which stay on their ranks.",
    ),
    split: str = option(
        TABLES,
        "How an expert's tokens are split over its replicas: tables (one replica per rank), deal (several in turn), or "
        "step (by each step's counts).",
    ),
    quant: str = option(
        "none", f"Of the model: the experts' quantization, one of {', '.join(_QUANTIZATIONS)}."
    ),
    tensor_parallel: int = option(
        1, "Of the model: ranks after one another that have the same requests, and send a part each.", min=1
    ),
    dual_batch: bool = option(False, "Of the model: every step in two micro-batches.", "--dual-batch"),
    address: str | None = option(
        None, "host:port of a running service to join, instead of one of the demo's own."
    ),
    deployment: str = option("demo", "Name that the ranks give."),
    seed: int = option(0, "Seeds requests or tokens, and the solver.", min=0),
    json: Path | None = option(None, "Write the summary to this .json file.", section=RESULTS),
    picture: Path | None = option(None, "Write the last view and the summary to this .svg file."),
) -> None:
    """Serve a Mixture-of-Experts model on live expert-parallel ranks while the service balances it, and prove it.

    The embedded model answers requests of changing domains. Every step also runs through the same model left alone:
    the two must generate the same bytes, and their rank loads are compared step by step. Ranks stand for devices whose
    time follows a cost curve, so that a step takes as long as its hottest rank. Exits with 1 where outputs differ or
    nothing was switched.
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
    one_of("unknown quantization", quant, _QUANTIZATIONS)
    if trace is not None and (dual_batch or quant != "none" or dispatcher == _MOGE or tensor_parallel > 1):
        raise UserError(
            f"--quant, --dual-batch, --tensor-parallel and --dispatcher {_MOGE} go with the model, not with --trace"
        )
    if ranks % tensor_parallel:
        raise UserError(f"--ranks {ranks} do not divide into --tensor-parallel groups of {tensor_parallel}")
    if checkpoint is not None:
        _check_checkpoint(trace, dispatcher, dual_batch=dual_batch)
    from eplb_lab.demo.stage import Stage, model_sizes

    if trace is None:
        layers, experts, choices = model_sizes(checkpoint)
        if dispatcher == _MOGE:
            _check_grouped(ranks, choices, has_replicas=redundant > 0 or split != TABLES)
        sizes = (steps or _MODEL_STEPS, layers, experts)
        program = "eplb_lab.ranks.model_rank"
        orders: dict[str, Any] = {
            "steps": sizes[0],
            "layers": layers,
            "experts": experts,
            "rows": _REQUESTS,
            "length": _REQUEST_BYTES,
            "quantized": quant == "w8a8",
            "dual_batch": dual_batch,
            "tensor_parallel": tensor_parallel,
            "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
        }
    else:
        sizes, orders = _trace(trace, steps or _TRACE_STEPS)
        program = "eplb_lab.ranks.rank"
    stage = Stage(
        *sizes,
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
    _perform(stage, program, orders, json, picture)


def _perform(
    stage: Stage, program: str, orders: dict[str, Any], json: Path | None, picture: Path | None
) -> None:
    """Serve, show, and write; exits with 1 where the run does not show what it should."""
    from eplb_lab.demo import summary
    from eplb_lab.demo.ranks import RankDiedError
    from eplb_lab.demo.stage import perform
    from eplb_lab.demo.view import save_picture, screen

    with screen(stage.steps) as show:
        try:
            board = perform(stage, program, orders, show.update)
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


def _check_checkpoint(trace: Path | None, dispatcher: str, *, dual_batch: bool) -> None:
    """Raise ``UserError`` where a checkpoint cannot be served so."""
    if trace is not None or dispatcher == _MOGE or dual_batch:
        raise UserError(
            f"--trace, --dual-batch and --dispatcher {_MOGE} do not go with --checkpoint; leave them out"
        )
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            f"--checkpoint needs transformers; install it with: {install_command('checkpoint', 'eplb-lab')}"
        )


def _check_grouped(ranks: int, choices: int, *, has_replicas: bool) -> None:
    """Raise ``UserError`` where grouped experts cannot be served: each token chooses equally many on each rank."""
    if has_replicas:
        raise UserError(
            f"--dispatcher {_MOGE} serves the model with --redundant 0 and --split {TABLES}: grouped experts have "
            "no replicas"
        )
    if choices % ranks:
        fitting = [str(ranks) for ranks in range(2, choices + 1) if choices % ranks == 0]
        raise UserError(
            f"--dispatcher {_MOGE} gives each rank equally many of a token's {choices} choices; "
            f"use --ranks {' or '.join(fitting)}"
        )


def _trace(trace: Path, steps: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """T, L and E of the first steps of a trace, on some of its layers, and orders for its ranks."""
    import numpy as np

    from eplb_core.heat.window import HeatError
    from eplb_service.io.open_trace import read_heat

    heat_TLE = read_heat(trace)
    if heat_TLE.dtype.kind == "f":
        raise HeatError(f"{trace}: the demo serves whole tokens, this trace holds fractions of them")
    spread_L = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, _TRACE_LAYERS).round().astype(int))
    chosen_TLE = heat_TLE[:steps, spread_L].astype(np.int64)
    if chosen_TLE.sum() == 0:
        raise HeatError(f"{trace}: the first {steps} steps hold no tokens")
    orders = {"counts": chosen_TLE, "hidden": _HIDDEN, "intermediate": _INTERMEDIATE}
    return chosen_TLE.shape, orders
