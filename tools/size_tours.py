"""Three tours through the code, whose stops ``make size`` counts: what a reader must open to follow one datum."""

from __future__ import annotations

from typing import NamedTuple


class Tour(NamedTuple):
    """The way of one datum: where it passes, and the types, or names, that it has on the way.

    Parameters
    ----------
    datum
        What is followed.
    carrier_word
        ``types`` or ``names``.
    carriers
        The types that carry the datum, or the names that it goes by.
    stops
        File and definition, in the order of the way.
    """

    datum: str
    carrier_word: str
    carriers: tuple[str, ...]
    stops: tuple[tuple[str, str], ...]


_SERVER = "eplb_service/control/server"

TOURS = (
    Tour(
        "a setting",
        "names",
        ("min_gain",),
        (
            ("eplb_service/cli/serve.py", "serve"),
            (f"{_SERVER}/settings.py", "load_settings"),
            ("eplb_core/planner/settings.py", "min_gain"),
            (f"{_SERVER}/deciding/computing.py", "decide"),
            ("eplb_core/planner/decide.py", "plan"),
            ("eplb_core/planner/solver_call.py", "solve_layers"),
            ("eplb_core/solver/engine.py", "solve_many"),
            ("eplb_core/solver/layer.py", "solve_layer"),
        ),
    ),
    Tour(
        "heat",
        "types",
        ("HeatReport", "RememberedHeat", "DecisionInputs", "Window"),
        (
            ("worker_agent/live_layer.py", "LiveLayer"),
            ("worker_agent/heat.py", "HeatRecorder"),
            ("worker_agent/agent.py", "_publish_heat"),
            ("worker_agent/stream.py", "ServiceStream"),
            ("eplb_core/wire/heat.py", "decode_heat_report"),
            (f"{_SERVER}/agents.py", "_take_heat"),
            (f"{_SERVER}/plane/control_plane.py", "heat_report"),
            ("eplb_service/control/core/deployment.py", "heat_report"),
            ("eplb_core/heat/assembler.py", "RememberedHeat"),
            (f"{_SERVER}/deciding/computing.py", "DecisionInputs"),
            ("eplb_core/planner/decide.py", "plan"),
        ),
    ),
    Tour(
        "a plan",
        "types",
        (
            "Plan",
            "LayerPlan",
            "PlanTracker",
            "SharedPlan",
            "RankPlan",
            "RankLayer",
            "StartTransfer",
            "Commit",
        ),
        (
            ("eplb_core/planner/decide.py", "plan"),
            (f"{_SERVER}/deciding/computing.py", "decide"),
            (f"{_SERVER}/deciding/decider.py", "Decider"),
            ("eplb_service/control/core/plan_tracker.py", "PlanTracker"),
            (f"{_SERVER}/deciding/decider.py", "Decider"),
            (f"{_SERVER}/outgoing/streams.py", "Streams"),
            (f"{_SERVER}/agents.py", "_send_on"),
            (f"{_SERVER}/outgoing/streams.py", "RankStream"),
            ("eplb_core/wire/plan.py", "SharedPlan"),
            ("worker_agent/swap/rank_layout.py", "check_plan"),
            ("worker_agent/stream.py", "ServiceStream"),
            ("worker_agent/agent.py", "_take_events"),
            ("worker_agent/swap/driver.py", "SwitchDriver"),
            ("worker_agent/swap/machine.py", "SwitchState"),
            ("worker_agent/swap/transfer.py", "TransferWorker"),
            ("worker_agent/swap/lane.py", "Lane"),
            ("worker_agent/swap/transfer.py", "TransferWorker"),
            ("worker_agent/swap/staging.py", "install_layer"),
        ),
    ),
)
