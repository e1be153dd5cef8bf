"""``eplb advise``: whether balancing pays for a deployment, and what to set, from its recorded heat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from eplb_core.atomic_write import check_output
from eplb_core.cost.devices import GPUS, MODELS, DeviceError, ModelShape, estimated_curve, model_shape
from eplb_core.planner.settings import AUTO, PlannerSettings, planner_settings
from eplb_service.cli.options import JSON, SEVERAL, UserError, option, takes_options
from eplb_service.cli.output import figure, output_console, print_json, table_of, write_json
from eplb_service.cli.replay import OUT, replay_progress
from eplb_service.cli.trace_options import (
    HEAT,
    POLICY,
    WORKERS,
    CostOptions,
    RankOptions,
    ReadingOptions,
    basis_text,
    check_groups,
    choices_per_step,
    hint,
    one_policy,
    planner_flags,
    slots_of_redundant,
)
from eplb_service.cli.warmup import compile_solver

if TYPE_CHECKING:
    from eplb_service.replay.advise import Advice, Option
    from eplb_service.replay.costs import Assumption, Costs
    from eplb_service.replay.policy import Job
    from eplb_service.replay.result import Replay


@takes_options(*planner_flags("policy", "move_price"))
def advise(
    group: RankOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    policy: str = POLICY,
    redundant: str | None = option(
        None, "Redundant experts per layer to try, with commas; a few by default.", metavar=SEVERAL
    ),
    window: int | None = option(
        None, "Steps that a decision sees; 256, or a quarter of a short trace.", min=1
    ),
    gpu: str | None = option(
        None, f"Estimate times by the shipped cost curve of a GPU or NPU: {', '.join(GPUS)}; needs --model."
    ),
    model: str | None = option(None, f"Shape of the experts: {', '.join(MODELS)}."),
    workers: int | None = WORKERS,
    out: Path | None = OUT,
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Advise whether balancing pays, how many redundant experts it needs, and which window and interval."""
    if out is not None:
        check_output(out, (".json",))
    settings, cost, shape = _estimated(planner_settings(planner), cost, gpu, model)
    one_policy(policy)
    from eplb_service.replay import advise as advice
    from eplb_service.replay.jobs import TraceFile, check_jobs, replay_file
    from eplb_service.replay.loop import Scene

    file = TraceFile(heat, reading.reading())
    trace = reading.open(heat)
    if shape is not None and (trace.experts, trace.layers) != (shape.experts, shape.layers):
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"{heat} has {trace.layers} layers x {trace.experts} experts, but {shape.name} has {shape.layers} x "
            f"{shape.experts}; only the size of an expert is taken from --model {model}"
        )
    costs = cost.costs(settings, trace, group.ranks)
    scene = Scene(group.topology(trace), costs)
    width = window or max(1, min(256, trace.steps // 4))
    if window is not None and 3 * window >= trace.steps:
        hint(
            f"{trace.steps} steps are too few to compare schedules with --window {window}; the schedules compared have "
            f"windows of at most {(trace.steps - 1) // 3} steps"
        )
    least = -(-trace.experts // group.ranks)
    slots = [count for count in (least, least + 1, least + 2, least + 4) if count <= trace.experts]
    if redundant is not None:
        slots = slots_of_redundant(trace.experts, group.ranks, redundant)
    check_groups(settings, trace.experts, slots, scene.topology)

    def run(jobs: list[Job]) -> Replay:
        check_jobs(jobs, trace, scene)
        compile_solver()
        with replay_progress(jobs, trace.steps) as advance:
            found = replay_file(file, jobs, scene, workers=workers, on_progress=advance)
        if found.interrupted:
            raise KeyboardInterrupt
        return found

    choices = trace.facts.top_k or (shape.choices if shape is not None else 0)
    tokens = choices_per_step(trace) / choices if choices else None
    per_expert = choices_per_step(trace) / trace.experts
    given = advice.advise(run, slots, width, trace.steps, settings, tokens, per_expert, policy)
    rests_on = cost.assumptions(settings, costs)
    document = {**vars(given), "assumptions": rests_on}
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), given, costs, rests_on)


def _estimated(
    settings: PlannerSettings, cost: CostOptions, gpu: str | None, model: str | None
) -> tuple[PlannerSettings, CostOptions, ModelShape | None]:
    """Complete settings and costs with the shipped data of ``--gpu`` and ``--model``. Stated values take precedence.

    Raises ``UserError`` if the device or model is unknown or contradicts other options.
    """
    if gpu is not None and (model is None or settings.cost_curve is not None):
        missing = (
            "needs --model" if model is None else "and --cost-curve both give a cost curve; give one of them"
        )
        raise UserError(f"--gpu {missing}")
    try:
        shape = None if model is None else model_shape(model)
        if gpu is not None and model is not None:
            settings = replace(settings, cost_curve=estimated_curve(gpu, model))
    except DeviceError as error:
        raise UserError(str(error)) from error
    if shape is not None and cost.bytes_per_expert is None:
        cost = replace(cost, bytes_per_expert=shape.bytes_per_expert)
    return settings, cost, shape


def headline(given: Advice, estimated: bool) -> str:
    """Return one sentence that says if balancing pays, with its gain and its cost."""
    gained = (
        f"the experts' part of a step takes {given.share:.0%} less time, which is worth {given.ranks_worth:.1f} of "
        f"{given.ranks} ranks"
    )
    if given.net_ms is not None:
        gained += f" or {given.net_ms:.2f} ms per step"
    if given.tokens_per_second_won is not None:
        gained += f" or {given.tokens_per_second_won:,.0f} tokens/s"
    if estimated:
        gained += " (estimate)"
    memory = "no more memory"
    if given.redundant_bytes_per_rank:
        memory = f"{given.redundant_bytes_per_rank / 1e9:.2f} GB more memory per rank"
    elif given.redundant > 0 and not given.chosen.bytes_per_rank:
        memory = f"{given.redundant} redundant experts per layer (--bytes-per-expert or --model says how much memory)"
    if given.pays:
        return f"Balancing pays: {gained}, for {memory}."
    if given.share < 0:
        more = "" if given.net_ms is None else f", {-given.net_ms:.2f} ms per step"
        return f"Balancing does not pay here: moving experts would take more time than it saves{more}."
    return f"Balancing does not pay here: {gained.replace('takes', 'would take', 1)}, for {memory}."


def _priced(chosen: Option) -> str:
    return "" if chosen.move_price == AUTO else f", move price {chosen.move_price:g}"


def _print(console: Console, given: Advice, costs: Costs, rests_on: Sequence[Assumption]) -> None:
    setup = given.chosen.setup
    estimated = costs.curve is not None and costs.curve.source.startswith("estimate")
    console.print(headline(given, estimated), style="bold")
    if given.pays:
        console.print(
            f"Set {given.redundant} redundant experts per layer ({setup.slots} slots per rank), window "
            f"{setup.window}, interval {setup.interval}{_priced(given.chosen)}."
        )
    for reason in given.reasons:
        console.print(f"  {reason}")
    timed = bool(costs.step_ms) or costs.curve is not None
    columns = {
        "MoE ms": lambda one: figure(one.moe_ms),
        "PAR": lambda one: figure(one.par),
        "net ms": lambda one: figure(one.net_ms) if timed else None,
        "moved in 100 steps": lambda one: figure(one.moved_per_100_steps, ".1%"),
    }

    def tried(one: Option) -> str:
        mark = (
            " (advised)" if (one.setup.window, one.setup.interval) == (setup.window, setup.interval) else ""
        )
        return f"window {one.setup.window}, every {one.setup.interval}{mark}"

    by_slots = {
        "slots per rank": lambda one: (
            f"{one.setup.slots}{_priced(one)}{' (advised)' if one.setup == setup else ''}"
        ),
        **columns,
        "GB per rank": lambda one: figure(one.bytes_per_rank / 1e9, ".2f") if one.bytes_per_rank else None,
    }
    slots = given.by_schedule[0].setup.slots
    by_price = {"move price": lambda one: f"{one.move_price:g}", **columns}
    tables = [
        (given.by_redundancy, by_slots, f"window {setup.window}, interval {setup.interval}"),
        (given.by_schedule, {"schedule": tried, **columns}, f"{slots} slots per rank"),
    ]
    if given.by_moves:
        tables.append((given.by_moves, by_price, f"{slots} slots per rank, {tried(given.by_moves[0])}"))
    for rows, headings, title in tables:
        console.print(table_of(rows, headings, title=title), soft_wrap=False)
    best = np.argsort(-given.gain_L, kind="stable")[:5]
    console.print(
        "Layers that gain most PAR: " + ", ".join(f"{layer} ({given.gain_L[layer]:+.3f})" for layer in best)
    )
    console.print(
        "All rows score the same steps. Settings that realise what another row does are left out. "
        f"{basis_text(rests_on)}"
    )
