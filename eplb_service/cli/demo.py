"""``eplb demo``: the main job on one machine, to watch and to check."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_service.cli.errors import UserError
from eplb_service.planner.settings import POLICIES

if TYPE_CHECKING:
    from eplb_service.demo.scenarios import ModelScenario, TraceScenario

_DISPATCHERS = ("all2allv", "allgather")
_MODEL_STEPS = 720
_TRACE_STEPS = 320
_TRACE_LAYERS, _TRACE_HIDDEN, _TRACE_INTERMEDIATE = 6, 128, 64
_FAILED_EXIT_CODE = 1

_Sizes = tuple[int, int, int]
"""T, L and E of what is balanced."""


def demo(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Rank processes.")] = 4,
    redundant: Annotated[
        int, typer.Option(min=0, help="Redundant expert slots per layer, over all ranks.")
    ] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Serve this heat instead of the embedded model: a trace of any format that `eplb trace` knows."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Steps to serve (default {_MODEL_STEPS}); of a trace, from its beginning (default {_TRACE_STEPS}).",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="MoE layers: of the model, how many are balanced (default all); of a trace, how many are held, "
            f"spread over it (default {_TRACE_LAYERS}).",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of the model: requests at a time on each rank (default 32).")
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="Steps that a decision looks at.")] = 64,
    interval: Annotated[int, typer.Option(min=1, help="Steps from one decision to the next.")] = 32,
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}.", autocompletion=lambda: list(POLICIES))
    ] = "flashlb",
    dispatcher: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(_DISPATCHERS)}.", autocompletion=lambda: list(_DISPATCHERS)),
    ] = "all2allv",
    hidden: Annotated[
        int | None, typer.Option(min=1, help=f"Of a trace: hidden size (default {_TRACE_HIDDEN}).")
    ] = None,
    intermediate: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Of a trace: intermediate size of an expert (default {_TRACE_INTERMEDIATE})."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of requests or tokens, and of the solver.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the summary to this .json file.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the heat that was served to this .npz file, a trace.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the last view to this .svg file.")] = None,
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
    from eplb_service.atomic_write import check_output
    from eplb_service.cli.demo_screen import save_picture, screen
    from eplb_service.cli.json_out import write_json
    from eplb_service.demo import summary
    from eplb_service.demo.ranks import RankDiedError
    from eplb_service.demo.recording import write_recording
    from eplb_service.demo.stage import Stage
    from eplb_service.planner.settings import PlannerSettings

    for path, suffix in ((json, ".json"), (record, ".npz"), (picture, ".svg")):
        if path is not None:
            check_output(path, (suffix,))
    PlannerSettings(policy=policy, seed=seed)
    scenario: ModelScenario | TraceScenario
    if dispatcher not in _DISPATCHERS:
        raise UserError(f"unknown dispatcher {dispatcher!r}; choose one of {', '.join(_DISPATCHERS)}")
    if trace is None:
        _refuse("--trace", {"--hidden": hidden, "--intermediate": intermediate})
        scenario, shape = _model_scenario(steps or _MODEL_STEPS, layers, requests)
    else:
        _refuse("the model", {"--requests": requests})
        scenario, shape = _trace_scenario(trace, steps or _TRACE_STEPS, layers, hidden, intermediate)
    stage = Stage(*shape, ranks, redundant, dispatcher, window, interval, policy, seed)
    with screen(stage.steps) as show:
        try:
            board = scenario.run(stage, show.update)
        except RankDiedError as error:
            show.fail(str(error))
            raise typer.Exit(_FAILED_EXIT_CODE) from error
    figures = summary.summarise(board, stage)
    show.finish(summary.table(figures))
    if picture is not None:
        save_picture(picture, show.view(board), summary.table(figures))
    if json is not None:
        write_json(json, figures)
    if record is not None:
        write_recording(record, board)
    complaint = summary.complaint(board)
    if complaint is not None:
        show.fail(complaint)
        raise typer.Exit(_FAILED_EXIT_CODE)


def _refuse(belongs_to: str, options: dict[str, int | None]) -> None:
    """Raise ``UserError`` where an option is given that means nothing here."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} goes with {belongs_to} alone")


def _model_scenario(steps: int, layers: int | None, requests: int | None) -> tuple[ModelScenario, _Sizes]:
    """The embedded model, its first ``layers`` balanced."""
    from eplb_service.demo.scenarios import ModelScenario, layers_and_experts

    held, experts = layers_and_experts()
    if layers is not None and layers > held:
        raise UserError(f"the model has {held} MoE layers, --layers asks for {layers}")
    scenario = ModelScenario() if requests is None else ModelScenario(rows=requests)
    return scenario, (steps, layers or held, experts)


def _trace_scenario(
    trace: Path, steps: int, layers: int | None, hidden: int | None, intermediate: int | None
) -> tuple[TraceScenario, _Sizes]:
    """The first steps of a trace, on some of its layers."""
    import numpy as np

    from eplb_service.demo.scenarios import TraceScenario
    from eplb_service.heat.window import HeatError
    from eplb_service.io.open_trace import read_heat

    heat_TLE = read_heat(trace)
    if heat_TLE.dtype.kind == "f":
        raise HeatError(f"{trace}: the demo serves whole tokens, this trace holds fractions of them")
    spread_L = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, layers or _TRACE_LAYERS).round().astype(int))
    chosen_TLE = heat_TLE[:steps, spread_L].astype(np.int64)
    if chosen_TLE.sum() == 0:
        raise HeatError(f"{trace}: the first {steps} steps hold no tokens")
    scenario = TraceScenario(chosen_TLE, hidden or _TRACE_HIDDEN, intermediate or _TRACE_INTERMEDIATE)
    return scenario, chosen_TLE.shape
