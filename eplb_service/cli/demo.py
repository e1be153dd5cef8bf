"""``eplb demo``: the main job on one machine, to watch and to check."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eplb_service.atomic_write import check_output
from eplb_service.cli.options import RESULTS, UserError, one_of, option, takes_options
from eplb_service.cli.output import write_json
from eplb_service.planner.settings import DEAL, POLICIES, STEP, TABLES, PlannerSettings
from eplb_service.wire.fields import check_deployment

if TYPE_CHECKING:
    from eplb_service.demo.stage import Stage

    Served = tuple[tuple[int, int, int], str, dict[str, Any]]

_MOGE = "moge"
_DISPATCHERS = ("all2allv", "allgather", "mc2", _MOGE)
_QUANTIZATIONS = ("none", "w8a8")
_SPLITS = (TABLES, DEAL, STEP)
_REQUESTS, _REQUEST_BYTES = 32, 96
_MODEL_STEPS, _TRACE_STEPS = 720, 320
_TRACE_LAYERS, _HIDDEN, _INTERMEDIATE = 6, 128, 64
_WINDOW, _INTERVAL = 64, 32
_FAILED_EXIT_CODE = 1
_SERVED, _SERVICE, _DECISIONS = "What is served", "The service", "How decisions are made"


@takes_options()
def demo(
    ranks: int = option(4, "Rank processes.", min=2, max=64, section=_SERVED),
    redundant: int = option(8, "Redundant expert slots per layer, over all ranks.", min=0),
    trace: Path | None = option(
        None, "Serve this heat instead of the embedded model: a trace of any format."
    ),
    steps: int | None = option(
        None, f"Steps to serve (default {_MODEL_STEPS}; of a trace {_TRACE_STEPS}).", min=1
    ),
    layers: int | None = option(
        None,
        f"MoE layers that are balanced (default all); of a trace, spread over it (default {_TRACE_LAYERS}).",
        min=1,
    ),
    requests: int | None = option(
        None, f"Of the model: requests at a time on each rank (default {_REQUESTS}).", min=1
    ),
    dispatcher: str = option(
        "all2allv",
        f"One of {', '.join(_DISPATCHERS)}; {_MOGE} is for grouped experts, which stay on their ranks.",
        section=_SERVED,
        autocompletion=lambda: list(_DISPATCHERS),
    ),
    split: str = option(
        TABLES,
        "How an expert's tokens are split over its replicas: tables (one replica per rank), deal (several in turn), or "
        "step (by each step's counts).",
        section=_SERVED,
        autocompletion=lambda: list(_SPLITS),
    ),
    quant: str = option(
        "none",
        f"Of the model: the experts' quantization, one of {', '.join(_QUANTIZATIONS)}.",
        section=_SERVED,
        autocompletion=lambda: list(_QUANTIZATIONS),
    ),
    dual_batch: bool = option(False, "Of the model: every step in two micro-batches.", "--dual-batch"),
    hidden: int | None = option(None, f"Of a trace: hidden size (default {_HIDDEN}).", min=1),
    intermediate: int | None = option(
        None, f"Of a trace: intermediate size of an expert (default {_INTERMEDIATE}).", min=1
    ),
    address: str | None = option(
        None, "host:port of a running service to join, instead of one of the demo's own.", section=_SERVICE
    ),
    deployment: str = option("demo", "Name that the ranks give."),
    metrics_port: int | None = option(
        None, "Port of the own service's metrics and web page (default a free one).", min=1, max=65535
    ),
    window: int | None = option(
        None, f"Steps that a decision looks at (default {_WINDOW}).", min=1, section=_DECISIONS
    ),
    interval: int | None = option(None, f"Steps from one decision to the next (default {_INTERVAL}).", min=1),
    policy: str | None = option(
        None,
        f"One of {', '.join(POLICIES)} (default flashlb).",
        section=_DECISIONS,
        autocompletion=lambda: list(POLICIES),
    ),
    seed: int = option(0, "Seeds requests or tokens, and the solver.", min=0),
    json: Path | None = option(None, "Write the summary to this .json file.", section=RESULTS),
    record: Path | None = option(None, "Write the heat that was served to this .npz file, a trace."),
    picture: Path | None = option(None, "Write the last view to this .svg file."),
) -> None:
    """Serve a Mixture-of-Experts model on live expert-parallel ranks while the service balances it, and prove it.

    The embedded model answers requests of changing domains. Every step also runs through the same model left alone:
    the two must generate the same bytes, and their rank loads are compared step by step. Exits with 1 where outputs
    differ or nothing was switched.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the demo runs live layers and needs torch; install it with: pip install 'eplb-service[agent]'"
        )
    for path, suffix in ((json, ".json"), (record, ".npz"), (picture, ".svg")):
        if path is not None:
            check_output(path, (suffix,))
    check_deployment(deployment, "--deployment")
    if address is not None:
        set_there = {"window": window, "interval": interval, "policy": policy, "metrics-port": metrics_port}
        _refuse_given("a service of the demo's own, without --address", set_there)
    PlannerSettings(policy=policy or "flashlb", seed=seed)
    for name, value, choices in (
        ("dispatcher", dispatcher, _DISPATCHERS),
        ("split", split, _SPLITS),
        ("quantization", quant, _QUANTIZATIONS),
    ):
        one_of(f"unknown {name}", value, choices)
    if dispatcher == _MOGE:
        _check_grouped(ranks, has_replicas=trace is not None or redundant > 0 or split != TABLES)
    if trace is None:
        _refuse_given("--trace", {"hidden": hidden, "intermediate": intermediate})
        served = _model(steps, layers, requests, quantized=quant == "w8a8", dual_batch=dual_batch)
    else:
        quantized = None if quant == "none" else quant
        _refuse_given(
            "the model", {"requests": requests, "quant": quantized, "dual-batch": dual_batch or None}
        )
        served = _trace(trace, steps, layers, hidden or _HIDDEN, intermediate or _INTERMEDIATE)
    from eplb_service.demo.stage import Stage

    sizes, program, orders = served
    stage = Stage(
        *sizes,
        ranks,
        redundant,
        dispatcher,
        split,
        window or _WINDOW,
        interval or _INTERVAL,
        policy or "flashlb",
        seed,
        address,
        f"127.0.0.1:{metrics_port or 0}",
        deployment,
    )
    _perform(stage, program, orders, json, record, picture)


def _perform(
    stage: Stage,
    program: str,
    orders: dict[str, Any],
    json: Path | None,
    record: Path | None,
    picture: Path | None,
) -> None:
    """Serve, show, and write; exits with 1 where the run does not show what it should."""
    from eplb_service.demo import summary
    from eplb_service.demo.ranks import RankDiedError
    from eplb_service.demo.stage import perform
    from eplb_service.demo.view import save_picture, screen

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
    if record is not None:
        board.write_recording(record)
    complaint = summary.complaint(board, stage)
    if complaint is not None:
        show.fail(complaint)
        raise typer.Exit(_FAILED_EXIT_CODE)


def _refuse_given(belongs_to: str, options: Mapping[str, int | str | None]) -> None:
    """Raise ``UserError`` where an option is given that means nothing here."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name} goes with {belongs_to} alone")


def _check_grouped(ranks: int, *, has_replicas: bool) -> None:
    """Raise ``UserError`` where grouped experts cannot be served: each token chooses equally many on each rank."""
    from eplb_service.demo.stage import embedded_model

    choices = embedded_model()["num_experts_per_tok"]
    if has_replicas:
        raise UserError(
            f"--dispatcher {_MOGE} serves the model with --redundant 0 and --split {TABLES}: grouped experts have "
            "no replicas, and no trace counts tokens by group"
        )
    if choices % ranks:
        fitting = [str(ranks) for ranks in range(2, choices + 1) if choices % ranks == 0]
        raise UserError(
            f"--dispatcher {_MOGE} gives each rank equally many of a token's {choices} choices; "
            f"use --ranks {' or '.join(fitting)}"
        )


def _model(
    steps: int | None, layers: int | None, requests: int | None, *, quantized: bool, dual_batch: bool
) -> Served:
    """T, L and E of the embedded model, its first ``layers`` balanced, and the ranks' program and orders."""
    from eplb_service.demo.stage import embedded_model

    model = embedded_model()
    held = model["num_hidden_layers"]
    if layers is not None and layers > held:
        raise UserError(f"the model has {held} MoE layers, --layers asks for {layers}")
    steps, layers = steps or _MODEL_STEPS, layers or held
    orders = {
        "steps": steps,
        "layers": layers,
        "rows": requests or _REQUESTS,
        "length": _REQUEST_BYTES,
        "quantized": quantized,
        "dual_batch": dual_batch,
    }
    return (steps, layers, model["num_experts"]), "worker_agent.demo.model_rank", orders


def _trace(trace: Path, steps: int | None, layers: int | None, hidden: int, intermediate: int) -> Served:
    """T, L and E of the first steps of a trace, on some of its layers, and the ranks' program and orders."""
    import numpy as np

    from eplb_service.heat.window import HeatError
    from eplb_service.io.open_trace import read_heat

    steps = steps or _TRACE_STEPS
    heat_TLE = read_heat(trace)
    if heat_TLE.dtype.kind == "f":
        raise HeatError(f"{trace}: the demo serves whole tokens, this trace holds fractions of them")
    spread_L = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, layers or _TRACE_LAYERS).round().astype(int))
    chosen_TLE = heat_TLE[:steps, spread_L].astype(np.int64)
    if chosen_TLE.sum() == 0:
        raise HeatError(f"{trace}: the first {steps} steps hold no tokens")
    orders = {"counts": chosen_TLE, "hidden": hidden, "intermediate": intermediate}
    return chosen_TLE.shape, "worker_agent.demo.rank", orders
