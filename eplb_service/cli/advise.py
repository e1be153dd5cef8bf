"""``eplb advise``: from recorded heat, report whether balancing pays off for a deployment, and recommend settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from eplb_core.atomic_write import check_output
from eplb_core.cost.devices import GPUS, MODELS, DeviceError, ModelShape, estimated_curve, model_shape
from eplb_core.planner.settings import AUTO, PlannerSettings, planner_settings
from eplb_service.cli.file_options import (
    HEAT,
    RankOptions,
    ReadingOptions,
    choices_per_step,
    slots_of_redundant,
)
from eplb_service.cli.options import JSON, SEVERAL, UserError, option, takes_options
from eplb_service.cli.output import figure, hint, output_console, print_json, table_of, write_json
from eplb_service.cli.planner_options import (
    POLICY,
    WORKERS,
    CostOptions,
    as_recorded,
    assumptions_text,
    check_groups,
    one_policy,
    planner_flags,
)
from eplb_service.cli.replay import OUT, replay_progress
from eplb_service.cli.warmup import compile_solver

if TYPE_CHECKING:
    from eplb_service.io.trace import Trace
    from eplb_service.replay.advise import Advice, Option
    from eplb_service.replay.costs import Assumption, Costs
    from eplb_service.replay.policy import Job
    from eplb_service.replay.result import Replay

    Columns = Mapping[str, Callable[[Option], object]]

_WINDOW = 256


@takes_options(*planner_flags("policy", "move_price"))
def advise(
    group: RankOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    policy: str = POLICY,
    redundant: str | None = option(
        None,
        "Numbers of redundant experts per layer to try, separated by commas. By default, a few are tried.",
        metavar=SEVERAL,
    ),
    window: int | None = option(
        None, f"Steps that a decision uses; by default {_WINDOW}, or a quarter of a short trace.", min=1
    ),
    gpu: str | None = option(
        None,
        f"GPU or NPU whose cost curve is used to estimate times: {', '.join(GPUS)}; needs --model.",
    ),
    model: str | None = option(None, f"Model that determines the shape of the experts: {', '.join(MODELS)}."),
    workers: int | None = WORKERS,
    out: Path | None = OUT,
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Report whether balancing pays off, and recommend redundant experts, window and interval."""
    if out is not None:
        check_output(out, (".json",))
    settings, cost, shape = _estimated(planner_settings(planner), cost, gpu, model)
    one_policy(policy)
    from eplb_service.replay.advise import advise as compute_advice
    from eplb_service.replay.jobs import TraceFile, check_jobs, replay_file
    from eplb_service.replay.loop import Scene

    file = TraceFile(heat, reading.reading())
    trace = reading.open(heat)
    settings = as_recorded(settings, trace, planner)
    if shape is not None:
        _check_shape(heat, trace, shape, model)
    costs = cost.costs(settings, trace, group.ranks)
    scene = Scene(group.topology(trace), costs)
    width = _window_width(window, trace.steps)
    slots = _slot_counts(trace, group.ranks, redundant)
    check_groups(settings, trace.experts, slots, scene.topology)

    def run(jobs: list[Job]) -> Replay:
        check_jobs(jobs, trace, scene)
        compile_solver()
        with replay_progress(jobs, trace.steps) as advance:
            result = replay_file(file, jobs, scene, workers=workers, on_progress=advance)
        if result.interrupted:
            raise KeyboardInterrupt
        return result

    top_k = trace.facts.top_k or (shape.choices if shape is not None else 0)
    choices = choices_per_step(trace)
    tokens = choices / top_k if top_k else None
    per_expert = choices / trace.experts
    advice = compute_advice(run, slots, width, trace.steps, settings, tokens, per_expert, policy)
    assumptions = cost.assumptions(settings, costs)
    document = {**vars(advice), "assumptions": assumptions}
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), advice, costs, assumptions)


def _estimated(
    settings: PlannerSettings, cost: CostOptions, gpu: str | None, model: str | None
) -> tuple[PlannerSettings, CostOptions, ModelShape | None]:
    """Fill in missing settings and costs from the data shipped for ``--gpu`` and ``--model``.

    Explicit values take precedence. Raises ``UserError`` if the device or model is unknown or contradicts other
    options.
    """
    if gpu is not None and model is None:
        raise UserError("--gpu needs --model")
    if gpu is not None and settings.cost_curve is not None:
        raise UserError("--gpu and --cost-curve both give a cost curve; give only one")
    try:
        shape = None if model is None else model_shape(model)
        if gpu is not None and model is not None:
            settings = replace(settings, cost_curve=estimated_curve(gpu, model))
    except DeviceError as error:
        raise UserError(str(error)) from error
    if shape is not None and cost.bytes_per_expert is None:
        cost = replace(cost, bytes_per_expert=shape.bytes_per_expert)
    return settings, cost, shape


def _check_shape(heat: Path, trace: Trace, shape: ModelShape, model: str | None) -> None:
    """Print a note on stderr if the trace's shape differs from that of ``--model``."""
    if (trace.experts, trace.layers) != (shape.experts, shape.layers):
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"{heat} has {trace.layers} layers x {trace.experts} experts, but {shape.name} has {shape.layers} x "
            f"{shape.experts}; --model {model} therefore determines only the size of an expert"
        )


def _window_width(window: int | None, steps: int) -> int:
    """Return the window width, and print a hint if the trace is too short to compare schedules with ``--window``."""
    if window is not None and 3 * window >= steps:
        hint(
            f"{steps} steps are too few to compare schedules with --window {window}; the compared schedules have "
            f"windows of at most {(steps - 1) // 3} steps"
        )
    return window or max(1, min(_WINDOW, steps // 4))


def _slot_counts(trace: Trace, ranks: int, redundant: str | None) -> list[int]:
    """Return the slot counts per rank to try: from ``--redundant``, or the minimum and up to three larger counts."""
    if redundant is not None:
        return slots_of_redundant(trace.experts, ranks, redundant)
    minimum = -(-trace.experts // ranks)
    return [minimum + extra for extra in (0, 1, 2, 4) if minimum + extra <= trace.experts]


def headline(advice: Advice, is_estimate: bool) -> str:
    """Return one sentence with the verdict on balancing, its gain, and its memory cost."""
    gain = (
        f"the experts' part of a step takes {advice.share:.0%} less time, which is worth {advice.ranks_worth:.1f} of "
        f"{advice.ranks} ranks"
    )
    if advice.net_ms is not None:
        gain += f" or {advice.net_ms:.2f} ms per step"
    if advice.tokens_per_second_won is not None:
        gain += f" or {advice.tokens_per_second_won:,.0f} tokens/s"
    if is_estimate:
        gain += " (estimate)"
    memory = "no additional memory"
    if advice.redundant_bytes_per_rank:
        memory = f"{advice.redundant_bytes_per_rank / 1e9:.2f} GB of additional memory per rank"
    elif advice.redundant > 0 and not advice.chosen.bytes_per_rank:
        memory = (
            f"{advice.redundant} redundant experts per layer "
            "(pass --bytes-per-expert or --model to show their memory)"
        )
    if advice.pays:
        return f"Balancing pays off: {gain}, for {memory}."
    if advice.share < 0:
        loss = "" if advice.net_ms is None else f", by {-advice.net_ms:.2f} ms per step"
        return f"Balancing does not pay off: moving experts would take more time than it saves{loss}."
    return f"Balancing does not pay off: {gain.replace('takes', 'would take', 1)}, for {memory}."


def _price_suffix(setting: Option) -> str:
    return "" if setting.move_price == AUTO else f", move price {setting.move_price:g}"


def _print(console: Console, advice: Advice, costs: Costs, assumptions: Sequence[Assumption]) -> None:
    setup = advice.chosen.setup
    is_estimate = costs.curve is not None and costs.curve.source.startswith("estimate")
    console.print(headline(advice, is_estimate), style="bold")
    if advice.pays:
        console.print(
            f"Set {advice.redundant} redundant experts per layer ({setup.slots} slots per rank), window "
            f"{setup.window}, interval {setup.interval}{_price_suffix(advice.chosen)}."
        )
    for reason in advice.reasons:
        console.print(f"  {reason}")
    _print_tables(console, advice, has_times=bool(costs.step_ms) or costs.curve is not None)
    best = np.argsort(-advice.gain_L, kind="stable")[:5]
    gains = ", ".join(f"{layer} ({advice.gain_L[layer]:+.3f})" for layer in best)
    console.print(f"Layers with the largest gain in PAR: {gains}")
    console.print(
        "All rows are scored on the same steps. Settings with the same result as another row are omitted. "
        f"{assumptions_text(assumptions)}"
    )


def _print_tables(console: Console, advice: Advice, has_times: bool) -> None:
    """Print the tables of settings: by slots per rank, by schedule, and by move price."""
    setup = advice.chosen.setup
    columns: Columns = {
        "MoE ms": lambda setting: figure(setting.moe_ms),
        "PAR": lambda setting: figure(setting.par),
        "net ms": lambda setting: figure(setting.net_ms) if has_times else None,
        "moved per 100 steps": lambda setting: figure(setting.moved_per_100_steps, ".1%"),
    }

    def slots_label(setting: Option) -> str:
        mark = " (advised)" if setting.setup == setup else ""
        return f"{setting.setup.slots}{_price_suffix(setting)}{mark}"

    def schedule_label(setting: Option) -> str:
        is_advised = (setting.setup.window, setting.setup.interval) == (setup.window, setup.interval)
        mark = " (advised)" if is_advised else ""
        return f"window {setting.setup.window}, every {setting.setup.interval}{mark}"

    def memory(setting: Option) -> str | None:
        return figure(setting.bytes_per_rank / 1e9, ".2f") if setting.bytes_per_rank else None

    by_slots: Columns = {"slots per rank": slots_label, **columns, "GB per rank": memory}
    by_schedule: Columns = {"schedule": schedule_label, **columns}
    by_price: Columns = {"move price": lambda setting: f"{setting.move_price:g}", **columns}
    slots = advice.by_schedule[0].setup.slots
    tables = [
        (advice.by_redundancy, by_slots, f"window {setup.window}, interval {setup.interval}"),
        (advice.by_schedule, by_schedule, f"{slots} slots per rank"),
    ]
    if advice.by_moves:
        title = f"{slots} slots per rank, {schedule_label(advice.by_moves[0])}"
        tables.append((advice.by_moves, by_price, title))
    for rows, headings, title in tables:
        console.print(table_of(rows, headings, title=title), soft_wrap=False)
