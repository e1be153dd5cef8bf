"""``eplb demo``: the main job on one machine, to watch and to check."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError
from eplb_service.cli.json_out import write_json
from eplb_service.cli.option_groups import option_groups
from eplb_service.planner.settings import DEAL, POLICIES, STEP, TABLES, PlannerSettings
from eplb_service.wire.fields import check_deployment

if TYPE_CHECKING:
    from eplb_service.cli.demo_screen import Screen
    from eplb_service.demo.scenarios import ModelScenario, TraceScenario
    from eplb_service.demo.scoreboard import Scoreboard

_MOGE = "moge"
_DISPATCHERS = ("all2allv", "allgather", "mc2", _MOGE)
_QUANTIZATIONS = ("none", "w8a8")
_SPLITS = (TABLES, DEAL, STEP)
_MODEL_STEPS = 720
_TRACE_STEPS = 320
_TRACE_LAYERS, _TRACE_HIDDEN, _TRACE_INTERMEDIATE = 6, 128, 64
_WINDOW, _INTERVAL = 64, 32
_FAILED_EXIT_CODE = 1

_Sizes = tuple[int, int, int]
"""T, L and E of what is balanced."""


@dataclass(frozen=True)
class ServedOptions:
    """What the ranks serve."""

    SECTION: ClassVar = "What is served"

    ranks: Annotated[int, typer.Option(min=2, max=64, help="Rank processes.")] = 4
    redundant: Annotated[
        int, typer.Option(min=0, help="Redundant expert slots per layer, over all ranks.")
    ] = 8
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Serve this heat instead of the embedded model: a trace of any format that `eplb trace` knows."
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Steps to serve (default {_MODEL_STEPS}); of a trace, from its beginning (default {_TRACE_STEPS}).",
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="MoE layers: of the model, how many are balanced (default all); of a trace, how many are held, "
            f"spread over it (default {_TRACE_LAYERS}).",
        ),
    ] = None
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of the model: requests at a time on each rank (default 32).")
    ] = None
    dispatcher: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(_DISPATCHERS)}. {_MOGE} is for grouped experts, which stay on their ranks: the "
            "model left alone is then served by all-to-all.",
            autocompletion=lambda: list(_DISPATCHERS),
        ),
    ] = "all2allv"
    split: Annotated[
        str,
        typer.Option(
            help=f"How the balanced layers split an expert's tokens over its replicas, one of {', '.join(_SPLITS)}: "
            "by each rank's table of one replica, dealt over several replicas in turn, or in each step so that the "
            "hottest rank is as cool as can be.",
            autocompletion=lambda: list(_SPLITS),
        ),
    ] = TABLES
    quant: Annotated[
        str,
        typer.Option(
            help=f"Of the model: the experts' quantization, one of {', '.join(_QUANTIZATIONS)}.",
            autocompletion=lambda: list(_QUANTIZATIONS),
        ),
    ] = "none"
    dual_batch: Annotated[
        bool,
        typer.Option(
            "--dual-batch", help="Of the model: every step goes through the experts in two micro-batches."
        ),
    ] = False
    hidden: Annotated[
        int | None, typer.Option(min=1, help=f"Of a trace: hidden size (default {_TRACE_HIDDEN}).")
    ] = None
    intermediate: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Of a trace: intermediate size of an expert (default {_TRACE_INTERMEDIATE})."
        ),
    ] = None

    def scenario(self) -> tuple[ModelScenario | TraceScenario, _Sizes]:
        """What is served, and its T, L and E; raises ``UserError`` or ``HeatError`` where that cannot be."""
        if self.dispatcher not in _DISPATCHERS:
            raise UserError(
                f"unknown dispatcher {self.dispatcher!r}; choose one of {', '.join(_DISPATCHERS)}"
            )
        if self.split not in _SPLITS:
            raise UserError(f"unknown split {self.split!r}; choose one of {', '.join(_SPLITS)}")
        if self.quant not in _QUANTIZATIONS:
            raise UserError(f"unknown quantization {self.quant!r}; choose one of {', '.join(_QUANTIZATIONS)}")
        if self.dispatcher == _MOGE:
            self._check_grouped()
        if self.trace is None:
            _refuse("--trace", {"--hidden": self.hidden, "--intermediate": self.intermediate})
            steps = self.steps or _MODEL_STEPS
            return _model_scenario(
                steps, self.layers, self.requests, quantized=self.quant == "w8a8", dual_batch=self.dual_batch
            )
        quant = None if self.quant == "none" else self.quant
        _refuse(
            "the model",
            {"--requests": self.requests, "--quant": quant, "--dual-batch": self.dual_batch or None},
        )
        sizes = self.hidden or _TRACE_HIDDEN, self.intermediate or _TRACE_INTERMEDIATE
        return _trace_scenario(self.trace, self.steps or _TRACE_STEPS, self.layers, *sizes)

    def _check_grouped(self) -> None:
        """Raise ``UserError`` where grouped experts cannot be served: each token chooses equally many on each rank."""
        from eplb_service.demo.scenarios import choices_per_token

        choices = choices_per_token()
        if self.trace is not None or self.redundant or self.split != TABLES:
            raise UserError(
                f"--dispatcher {_MOGE} serves the model with --redundant 0 and --split {TABLES}: grouped experts have "
                "no replicas, and no trace counts tokens by group"
            )
        if choices % self.ranks:
            fitting = [str(ranks) for ranks in range(2, choices + 1) if choices % ranks == 0]
            raise UserError(
                f"--dispatcher {_MOGE} gives each rank equally many of a token's {choices} choices; "
                f"use --ranks {' or '.join(fitting)}"
            )


@dataclass(frozen=True)
class ServiceOptions:
    """Which service the ranks join."""

    SECTION: ClassVar = "The service"

    address: Annotated[
        str | None,
        typer.Option(help="host:port of a running service to join, instead of one of the demo's own."),
    ] = None
    deployment: Annotated[str, typer.Option(help="Name that the ranks give.")] = "demo"
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of the own service's metrics and web page (default a free one)."
        ),
    ] = None

    def check(self, decisions: DecisionOptions) -> None:
        """Raise ``UserError`` where an option is given that the service at ``address`` decides about."""
        check_deployment(self.deployment, "--deployment")
        if self.address is not None:
            set_there = {
                "--window": decisions.window,
                "--interval": decisions.interval,
                "--policy": decisions.policy,
                "--metrics-port": self.metrics_port,
            }
            _refuse("a service of the demo's own, without --address", set_there)


@dataclass(frozen=True)
class DecisionOptions:
    """How the service decides."""

    SECTION: ClassVar = "How decisions are made"

    window: Annotated[
        int | None, typer.Option(min=1, help=f"Steps that a decision looks at (default {_WINDOW}).")
    ] = None
    interval: Annotated[
        int | None, typer.Option(min=1, help=f"Steps from one decision to the next (default {_INTERVAL}).")
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(POLICIES)} (default flashlb).", autocompletion=lambda: list(POLICIES)
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seeds requests or tokens, and the solver.")] = 0


@dataclass(frozen=True)
class OutputOptions:
    """Where the results go."""

    SECTION: ClassVar = "Results"

    json: Annotated[Path | None, typer.Option(help="Write the summary to this .json file.")] = None
    record: Annotated[
        Path | None, typer.Option(help="Write the heat that was served to this .npz file, a trace.")
    ] = None
    picture: Annotated[Path | None, typer.Option(help="Write the last view to this .svg file.")] = None

    def check(self) -> None:
        """Raise ``OutputError`` where a file could not be written; before the ranks start."""
        for path, suffix in ((self.json, ".json"), (self.record, ".npz"), (self.picture, ".svg")):
            if path is not None:
                check_output(path, (suffix,))


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
    from eplb_service.cli.demo_screen import screen
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
        decisions.window or _WINDOW,
        decisions.interval or _INTERVAL,
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
    from eplb_service.cli.demo_screen import save_picture
    from eplb_service.demo import summary
    from eplb_service.demo.recording import write_recording

    if output.picture is not None:
        save_picture(output.picture, show.view(board), summary.table(figures))
    if output.json is not None:
        write_json(output.json, figures)
    if output.record is not None:
        write_recording(output.record, board)


def _refuse(belongs_to: str, options: Mapping[str, int | str | None]) -> None:
    """Raise ``UserError`` where an option is given that means nothing here."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} goes with {belongs_to} alone")


def _model_scenario(
    steps: int, layers: int | None, requests: int | None, *, quantized: bool, dual_batch: bool
) -> tuple[ModelScenario, _Sizes]:
    """The embedded model, its first ``layers`` balanced."""
    from eplb_service.demo.scenarios import ModelScenario, layers_and_experts

    held, experts = layers_and_experts()
    if layers is not None and layers > held:
        raise UserError(f"the model has {held} MoE layers, --layers asks for {layers}")
    rows = ModelScenario.rows if requests is None else requests
    scenario = ModelScenario(rows, quantized=quantized, dual_batch=dual_batch)
    return scenario, (steps, layers or held, experts)


def _trace_scenario(
    trace: Path, steps: int, layers: int | None, hidden: int, intermediate: int
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
    scenario = TraceScenario(chosen_TLE, hidden, intermediate)
    return scenario, chosen_TLE.shape
