"""``eplb demo``: the main job on one machine, to watch and to check."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_service.cli.errors import UserError
from eplb_service.planner.settings import POLICIES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_DISPATCHERS = ("all2allv", "allgather")
_DEFAULT_LAYERS, _DEFAULT_EXPERTS, _DEFAULT_TOKENS, _DEFAULT_TOP_K = 6, 32, 256, 4
_FAILED_EXIT_CODE = 1


def demo(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Rank processes.")] = 4,
    redundant: Annotated[
        int, typer.Option(min=0, help="Redundant expert slots per layer, over all ranks.")
    ] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Heat to serve: .npz with 'heat' or 'counts' [steps, layers, experts]. Default: made up, drifting."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to serve, from the trace's beginning.")] = 320,
    layers: Annotated[
        int, typer.Option(min=1, help="MoE layers to hold, spread over the trace's.")
    ] = _DEFAULT_LAYERS,
    window: Annotated[int, typer.Option(min=1, help="Steps that a decision looks at.")] = 64,
    interval: Annotated[int, typer.Option(min=1, help="Steps from one decision to the next.")] = 32,
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}.", autocompletion=lambda: list(POLICIES))
    ] = "flashlb",
    dispatcher: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(_DISPATCHERS)}.", autocompletion=lambda: list(_DISPATCHERS)),
    ] = "all2allv",
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size of the layers.")] = 128,
    intermediate: Annotated[int, typer.Option(min=1, help="Intermediate size of an expert.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, tokens and solver.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the summary to this .json file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the last view to this .svg file.")] = None,
) -> None:
    """Serve routed tokens on live expert-parallel layers while the service balances them, and prove it.

    Every step also runs through the same layers left alone: the two must give the same outputs, and their rank
    loads are compared step by step. Exits with 1 where outputs differ or nothing was switched.
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
    from eplb_service.demo.run import DemoSettings, check, run
    from eplb_service.planner.settings import PlannerSettings

    if json is not None:
        check_output(json, (".json",))
    if picture is not None:
        check_output(picture, (".svg",))
    PlannerSettings(policy=policy, seed=seed)
    if dispatcher not in _DISPATCHERS:
        raise UserError(f"unknown dispatcher {dispatcher!r}; choose one of {', '.join(_DISPATCHERS)}")
    counts_TLE = _heat(trace, steps, layers, seed)
    settings = DemoSettings(
        counts_TLE, ranks, redundant, hidden, intermediate, dispatcher, window, interval, policy, seed
    )
    check(settings)
    with screen(counts_TLE) as show:
        try:
            board = run(settings, show.update)
        except RankDiedError as error:
            show.fail(str(error))
            raise typer.Exit(_FAILED_EXIT_CODE) from error
    figures = summary.summarise(board, counts_TLE)
    show.finish(summary.table(figures))
    if picture is not None:
        save_picture(picture, show.view(board), summary.table(figures))
    if json is not None:
        write_json(json, figures)
    complaint = summary.complaint(board)
    if complaint is not None:
        show.fail(complaint)
        raise typer.Exit(_FAILED_EXIT_CODE)


def _heat(trace: Path | None, steps: int, layers: int, seed: int) -> npt.NDArray[np.int64]:
    """Heat to serve, int64 ``[T, L, E]``: of the trace, or made up."""
    import numpy as np

    from eplb_service.heat.synthetic import synthetic_heat
    from eplb_service.heat.trace import read_heat
    from eplb_service.heat.window import HeatError

    if trace is None:
        made_TLE = synthetic_heat(
            "drift", steps, layers, _DEFAULT_EXPERTS, _DEFAULT_TOKENS, _DEFAULT_TOP_K, seed
        )
        return made_TLE.astype(np.int64)
    heat_TLE = read_heat(trace)
    if heat_TLE.dtype.kind == "f":
        raise HeatError(f"{trace}: the demo serves whole tokens, this trace holds fractions of them")
    spread_L = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, layers).round().astype(int))
    chosen_TLE = heat_TLE[:steps, spread_L]
    if chosen_TLE.sum() == 0:
        raise HeatError(f"{trace}: the first {steps} steps hold no tokens")
    return chosen_TLE.astype(np.int64)
