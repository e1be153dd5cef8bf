"""Options of ``eplb demo`` on what its ranks serve: the embedded model, or recorded heat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from eplb_service.cli.demo.options import refuse_given
from eplb_service.cli.errors import UserError
from eplb_service.planner.settings import DEAL, STEP, TABLES

if TYPE_CHECKING:
    from eplb_service.demo.scenarios import ModelScenario, TraceScenario

_MOGE = "moge"
_DISPATCHERS = ("all2allv", "allgather", "mc2", _MOGE)
_QUANTIZATIONS = ("none", "w8a8")
_SPLITS = (TABLES, DEAL, STEP)
_MODEL_STEPS = 720
_TRACE_STEPS = 320
_TRACE_LAYERS, _TRACE_HIDDEN, _TRACE_INTERMEDIATE = 6, 128, 64

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
        for name, value, choices in (
            ("dispatcher", self.dispatcher, _DISPATCHERS),
            ("split", self.split, _SPLITS),
            ("quantization", self.quant, _QUANTIZATIONS),
        ):
            if value not in choices:
                raise UserError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")
        if self.dispatcher == _MOGE:
            self._check_grouped()
        if self.trace is None:
            refuse_given("--trace", {"--hidden": self.hidden, "--intermediate": self.intermediate})
            steps = self.steps or _MODEL_STEPS
            return _model_scenario(
                steps, self.layers, self.requests, quantized=self.quant == "w8a8", dual_batch=self.dual_batch
            )
        quant = None if self.quant == "none" else self.quant
        refuse_given(
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
