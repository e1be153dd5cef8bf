"""``eplb demo``: the main job on one machine, to watch and to check."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import typer

from eplb_service.cli.demo.options import INTERVAL, WINDOW, DecisionOptions, OutputOptions, ServiceOptions
from eplb_service.cli.demo.served_options import ServedOptions
from eplb_service.cli.errors import UserError
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.output.json_out import write_json
from eplb_service.planner.settings import PlannerSettings

if TYPE_CHECKING:
    from eplb_service.cli.demo.screen import Screen
    from eplb_service.demo.scoreboard import Scoreboard

_FAILED_EXIT_CODE = 1


@option_groups
def demo(
    served: ServedOptions, service: ServiceOptions, decisions: DecisionOptions, output: OutputOptions
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
    from eplb_service.cli.demo.screen import screen
    from eplb_service.demo import summary
    from eplb_service.demo.ranks import RankDiedError
    from eplb_service.demo.stage import Stage

    output.check()
    service.check(decisions)
    policy = decisions.policy or "flashlb"
    PlannerSettings(policy=policy, seed=decisions.seed)
    scenario, sizes = served.scenario()
    stage = Stage(
        *sizes,
        served.ranks,
        served.redundant,
        served.dispatcher,
        served.split,
        decisions.window or WINDOW,
        decisions.interval or INTERVAL,
        policy,
        decisions.seed,
        service.address,
        f"127.0.0.1:{service.metrics_port or 0}",
        service.deployment,
    )
    with screen(stage.steps) as show:
        try:
            board = scenario.run(stage, show.update)
        except RankDiedError as error:
            show.fail(str(error))
            raise typer.Exit(_FAILED_EXIT_CODE) from error
    figures = summary.summarise(board, stage)
    show.finish(summary.table(figures))
    _write(output, board, figures, show)
    complaint = summary.complaint(board, stage)
    if complaint is not None:
        show.fail(complaint)
        raise typer.Exit(_FAILED_EXIT_CODE)


def _write(output: OutputOptions, board: Scoreboard, figures: dict[str, Any], show: Screen) -> None:
    from eplb_service.cli.demo.screen import save_picture
    from eplb_service.demo import summary
    from eplb_service.demo.recording import write_recording

    if output.picture is not None:
        save_picture(output.picture, show.view(board), summary.table(figures))
    if output.json is not None:
        write_json(output.json, figures)
    if output.record is not None:
        write_recording(output.record, board)
