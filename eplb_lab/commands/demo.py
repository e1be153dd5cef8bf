"""``eplb demo``: serves a model on ranks of this machine, shows how it is balanced, and checks its outputs."""

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


@takes_options()
def demo(
    ranks: int = option(4, "Number of rank processes.", min=2, max=64),
    redundant: int = option(8, "Redundant slots per layer, over all ranks.", min=0),
    trace: Path | None = option(
        None, "Serve the heat of this trace (any format) instead of the embedded model."
    ),
    checkpoint: Path | None = option(
        None,
        "Serve this checkpoint instead of the embedded model: the folder of a Qwen3-MoE or DeepSeek-V2 model for "
        "transformers.",
    ),
    steps: int | None = option(
        None, f"Number of steps to serve (default {_MODEL_STEPS}, or {_TRACE_STEPS} with --trace).", min=1
    ),
    dispatcher: str = option(
        "all2allv",
        f"Token dispatcher: {', '.join(_DISPATCHERS)}. {_MOGE} is for grouped experts, which do not move.",
    ),
    split: str = option(
        TABLES,
        "Split of an expert's tokens over its replicas: tables (one replica per source rank), deal (several in turn), "
        "or step (according to each step's counts).",
    ),
    quant: str = option("none", f"Quantisation of the model's experts: {', '.join(_QUANTIZATIONS)}."),
    tensor_parallel: int = option(
        1,
        "Number of consecutive ranks that serve the same requests. Each dispatches a share of their tokens. Only with "
        "a model.",
        min=1,
    ),
    dual_batch: bool = option(False, "Run every step of the model in two micro-batches.", "--dual-batch"),
    address: str | None = option(
        None, "host:port of a running service to use. By default the demo starts its own."
    ),
    deployment: str = option("demo", "Name of the deployment."),
    seed: int = option(0, "Seed of the requests or tokens, and of the solver.", min=0),
    json: Path | None = option(None, "Write the summary to this .json file.", section=RESULTS),
    picture: Path | None = option(None, "Write the last view and the summary to this .svg file."),
) -> None:
    """Serve a Mixture-of-Experts model on live expert-parallel ranks, let the service balance it, and check the result.

    The embedded model answers requests of changing domains. A second, unbalanced instance of the model runs every step
    too. Both must generate the same bytes, and their rank loads are compared step by step. Ranks emulate devices whose
    time follows a cost curve, so a step takes as long as its hottest rank. Exits with 1 if outputs differ or no layer
    was switched.
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
    one_of("unknown quantisation", quant, _QUANTIZATIONS)
    if trace is not None and (dual_batch or quant != "none" or dispatcher == _MOGE or tensor_parallel > 1):
        raise UserError(
            f"--quant, --dual-batch, --tensor-parallel and --dispatcher {_MOGE} cannot be combined with --trace"
        )
    if ranks % tensor_parallel:
        raise UserError(f"--ranks {ranks} is not a multiple of --tensor-parallel {tensor_parallel}")
    if checkpoint is not None:
        _check_checkpoint(trace, dispatcher, dual_batch=dual_batch)
    from eplb_lab.demo.stage import Stage, model_sizes

    if trace is None:
        layers, experts, choices = model_sizes(checkpoint)
        if dispatcher == _MOGE:
            _check_grouped(ranks, choices, has_replicas=redundant > 0 or split != TABLES)
        sizes = (steps or _MODEL_STEPS, layers, experts)
        program = "eplb_lab.ranks.model_rank"
        orders = _model_orders(
            sizes,
            checkpoint,
            is_quantized=quant == "w8a8",
            dual_batch=dual_batch,
            tensor_parallel=tensor_parallel,
        )
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


def _model_orders(
    sizes: tuple[int, int, int],
    checkpoint: Path | None,
    *,
    is_quantized: bool,
    dual_batch: bool,
    tensor_parallel: int,
) -> dict[str, Any]:
    """Return the task for ranks that serve a model with L layers and E experts for T steps."""
    steps, layers, experts = sizes
    return {
        "steps": steps,
        "layers": layers,
        "experts": experts,
        "rows": _REQUESTS,
        "length": _REQUEST_BYTES,
        "quantized": is_quantized,
        "dual_batch": dual_batch,
        "tensor_parallel": tensor_parallel,
        "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
    }


def _perform(
    stage: Stage, program: str, orders: dict[str, Any], json: Path | None, picture: Path | None
) -> None:
    """Run the demo, show it, and write the results. Exits with 1 if the run fails or its checks do."""
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
    """Raise ``UserError`` if options conflict with ``--checkpoint`` or transformers is not installed."""
    if trace is not None or dispatcher == _MOGE or dual_batch:
        raise UserError(
            f"--trace, --dual-batch and --dispatcher {_MOGE} cannot be combined with --checkpoint; remove them"
        )
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            f"--checkpoint needs transformers; install it with: {install_command('checkpoint', 'eplb-lab')}"
        )


def _check_grouped(ranks: int, choices: int, *, has_replicas: bool) -> None:
    """Raise ``UserError`` if grouped experts cannot be served.

    They have no replicas, and each token chooses the same number of experts on every rank.
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
    """Return T, L and E of the first steps of a trace on a selection of its layers, and the task for its ranks."""
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
            f"{trace}: the first {steps} steps contain no tokens; use more --steps or another trace"
        )
    orders = {"counts": counts_TLE, "hidden": _HIDDEN, "intermediate": _INTERMEDIATE}
    return counts_TLE.shape, orders
