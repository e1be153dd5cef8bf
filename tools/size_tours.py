"""Tours through the code that ``make size`` measures: the files and types that one datum passes through.

A tour lists definitions in the order that the datum takes. ``measure`` checks each step of the path in the syntax
trees, so a tour fails if the code takes a different path.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tools.sources import Source


class TourError(Exception):
    """Raised if a tour does not match the code."""


class Stop(NamedTuple):
    """A definition that the datum passes through.

    Parameters
    ----------
    path
        File of the definition.
    name
        Dotted name within the file: a class, function, method, parameter or attribute. Empty for the whole module, if
        only private functions handle the datum.
    """

    path: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" if self.name else self.path


@dataclass(frozen=True)
class Tour:
    """The path of one datum through the code.

    Parameters
    ----------
    datum
        Name of the datum.
    types
        Types that carry the datum. Each must occur in the definition of a stop.
    stops
        Definitions in path order.
    """

    datum: str
    types: tuple[str, ...]
    stops: tuple[Stop, ...]


class TourSize(NamedTuple):
    """Numbers of distinct files and types on a tour."""

    files: int
    types: int


def measure(tour: Tour, sources: Mapping[str, Source]) -> TourSize:
    """Follow a tour through the code and count its files and types.

    Two consecutive stops are connected if they are in one file, if the definition of one uses the name of the other, or
    if both use the same protobuf message.

    Parameters
    ----------
    tour
        The tour to follow.
    sources
        Modules by path.

    Returns
    -------
    TourSize
        Numbers of distinct files and types.

    Raises
    ------
    TourError
        If a stop does not exist, two consecutive stops are not connected, or no stop uses one of the types.
    """
    used = {stop: _used_names(_definition(stop, sources)) for stop in tour.stops}
    for before, after in pairwise(tour.stops):
        messages = {name for name in used[before] & used[after] if name.startswith("agent_pb2.")}
        connected = _short_name(after) in used[before] or _short_name(before) in used[after]
        if before.path != after.path and not connected and not messages:
            raise TourError(f"the tour of {tour.datum} does not connect {before} to {after}")
    all_used = set[str]().union(*used.values(), (_short_name(stop) for stop in tour.stops))
    if missing := [name for name in tour.types if name not in all_used]:
        raise TourError(f"no stop on the tour of {tour.datum} uses {', '.join(missing)}")
    return TourSize(len({stop.path for stop in tour.stops}), len(set(tour.types)))


def _definition(stop: Stop, sources: Mapping[str, Source]) -> ast.AST:
    """Return the syntax tree of a stop's definition."""
    if stop.path not in sources:
        raise TourError(f"the file {stop.path}, which a stop names, does not exist")
    node: ast.AST = sources[stop.path].tree
    for name in filter(None, stop.name.split(".")):
        definitions = [child for child in ast.walk(node) if name in _defined_names(child)]
        if not definitions:
            raise TourError(f"{stop.path} does not define {stop.name}")
        node = definitions[0]
    return node


def _defined_names(node: ast.AST) -> Sequence[str]:
    """Return the names that a definition, assignment or parameter defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [
            target.attr if isinstance(target, ast.Attribute) else target.id
            for target in targets
            if isinstance(target, ast.Attribute | ast.Name)
        ]
    return []


def _used_names(definition: ast.AST) -> set[str]:
    """Return the names, attributes and keywords in a definition, and the protobuf messages with their module."""
    used: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id.endswith("_pb2"):
                used.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.keyword | ast.arg) and node.arg is not None:
            used.add(node.arg)
    return used


def _short_name(stop: Stop) -> str:
    """Return the name by which other code refers to a stop. For a constructor, this is the class name."""
    return stop.name.removesuffix(".__init__").rpartition(".")[2]


_SERVER = "eplb_service/control/server"
_AGENTS = Stop(f"{_SERVER}/agents.py")
_SNAPSHOT = f"{_SERVER}/deciding/snapshot.py"
_DECISION = "eplb_core/planner/decision.py"
_DECIDER = f"{_SERVER}/deciding/decider.py"
_DEPLOYMENT = "eplb_service/control/core/deployment.py"
_DECIDE = "eplb_core/planner/decide.py"
_ENGINE_HOST = "worker_agent/adapters/engine_host.py"
_TRANSFER = "worker_agent/swap/transfer.py"

SETTING = Tour(
    "a setting",
    ("ServiceSettings", "PlannerSettings", "DecisionInputs", "SolveRequest", "SearchRules"),
    (
        Stop("eplb_service/cli/options.py", "setting_option"),
        Stop("eplb_service/cli/serve.py"),
        Stop(f"{_SERVER}/settings.py", "load_settings"),
        Stop(f"{_SERVER}/settings.py", "ServiceSettings.planner"),
        Stop("eplb_core/planner/settings.py", "planner_settings"),
        Stop("eplb_core/planner/settings.py", "PlannerSettings.min_gain"),
        Stop("eplb_core/planner/settings.py", "PlannerSettings"),
        Stop(f"{_SERVER}/settings.py", "ServiceSettings.planner"),
        Stop(f"{_SERVER}/plane/control_plane.py", "ControlPlane.__init__"),
        Stop(_DECIDER, "Decider"),
        Stop(_SNAPSHOT, "Snapshot.of"),
        Stop(_SNAPSHOT, "Snapshot.inputs"),
        Stop(_DECISION, "DecisionInputs"),
        Stop(_DECISION, "decide"),
        Stop(_DECIDE, "plan"),
        Stop("eplb_core/planner/solver_call.py", "solve_layers"),
        Stop("eplb_core/solver/engine.py", "solve_many"),
        Stop("eplb_core/solver/layer.py", "solve_layer"),
        Stop("eplb_core/solver/engine.py", "solve_many"),
        Stop("eplb_core/planner/solver_call.py", "solve_layers"),
        Stop(_DECIDE),
        Stop("eplb_core/planner/small_batches.py", "unpaid_changes"),
        Stop("eplb_core/planner/holdout.py", "paying"),
    ),
)
"""``min_gain``, from the flag of ``eplb serve`` to the solver and the hold-out."""

HEAT = Tour(
    "a heat report",
    (
        "HeatRings",
        "_Copy",
        "HeatReport",
        "agent_pb2.HeatReport",
        "Parts",
        "_Step",
        "HeatSnapshot",
        "DecisionInputs",
        "Window",
        "SolveRequest",
    ),
    (
        Stop("worker_agent/adapters/vllm/host.py", "VllmHost.step"),
        Stop(_ENGINE_HOST, "HeatRings.record"),
        Stop(_ENGINE_HOST, "EngineLayer.__init__"),
        Stop("worker_agent/live_layer.py", "LiveLayer.source_load"),
        Stop("worker_agent/heat.py", "HeatRecorder"),
        Stop("worker_agent/heat.py", "HeatRecorder.take"),
        Stop("worker_agent/agent.py", "Agent"),
        Stop("worker_agent/stream.py", "Outbox.put"),
        Stop("worker_agent/stream.py", "ServiceStream"),
        Stop("eplb_core/wire/codec.py", "in_parts"),
        Stop("eplb_core/wire/codec.py", "Parts"),
        _AGENTS,
        Stop("eplb_core/wire/heat.py", "decode_heat_report"),
        _AGENTS,
        Stop(f"{_SERVER}/plane/control_plane.py", "ControlPlane.heat_report"),
        Stop(_DEPLOYMENT, "Deployment.heat_report"),
        Stop("eplb_core/heat/assembler.py", "HeatAssembler.take"),
        Stop("eplb_core/heat/assembler.py", "PendingSteps"),
        Stop("eplb_core/heat/assembler.py", "HeatAssembler.take"),
        Stop("eplb_core/heat/sources.py", "SourceHeat.add"),
        Stop("eplb_core/heat/sources.py", "SourceHeat.by_rank"),
        Stop("eplb_core/heat/assembler.py", "HeatAssembler.remembered"),
        Stop(_SNAPSHOT, "Snapshot.of"),
        Stop(_DECIDER, "Decider"),
        Stop(_SNAPSHOT, "Snapshot.inputs"),
        Stop("eplb_core/heat/window.py", "Window"),
        Stop(_DECIDE, "plan"),
        Stop("eplb_core/planner/request.py", "SolveRequest"),
    ),
)
"""Token counts of a forward pass, from vLLM's counter to the planner."""

PLAN = Tour(
    "a plan",
    (
        "LayerPlan",
        "Plan",
        "PlanTracker",
        "RankLayer",
        "RankPlan",
        "SharedPlan",
        "_PlanSending",
        "agent_pb2.Plan",
        "SwitchState",
        "StartTransfer",
        "Parcel",
        "StagedLayer",
        "TransferResult",
        "Commit",
        "RankLayout",
    ),
    (
        Stop(_DECIDE),
        Stop("eplb_core/planner/plan.py", "LayerPlan"),
        Stop("eplb_core/planner/plan.py", "Plan"),
        Stop(_DECISION, "decide"),
        Stop(_DECIDER, "Decider"),
        Stop(_DEPLOYMENT, "Deployment.offer"),
        Stop(_DECIDER, "Decider"),
        Stop(f"{_SERVER}/store.py", "Store.begin_plan"),
        Stop(_DECIDER),
        Stop("eplb_service/control/core/plan_tracker.py", "PlanTracker.rank_plan"),
        Stop("eplb_core/wire/plan.py", "RankPlan"),
        Stop("eplb_core/wire/plan.py", "SharedPlan.__init__"),
        Stop("eplb_core/wire/codec.py", "to_narrowest"),
        Stop("eplb_core/wire/plan.py", "SharedPlan.__init__"),
        Stop(f"{_SERVER}/outgoing/streams.py", "Streams.send"),
        Stop(f"{_SERVER}/outgoing/streams.py", "RankStream"),
        _AGENTS,
        Stop("worker_agent/stream.py", "ServiceStream"),
        Stop("worker_agent/swap/rank_layout.py", "check_plan"),
        Stop("worker_agent/stream.py", "ServiceStream"),
        Stop("worker_agent/stream.py", "ServiceStream.plans"),
        Stop("worker_agent/agent.py", "Agent"),
        Stop("worker_agent/swap/driver.py", "SwitchDriver.process_events"),
        Stop("worker_agent/swap/machine.py", "SwitchState.offer"),
        Stop("worker_agent/swap/machine.py", "SwitchState"),
        Stop("worker_agent/swap/machine.py", "StartTransfer"),
        Stop("worker_agent/swap/driver.py", "SwitchDriver"),
        Stop(_TRANSFER, "TransferWorker.start"),
        Stop(_TRANSFER),
        Stop("worker_agent/swap/lane.py", "Parcel"),
        Stop(_TRANSFER),
        Stop(_TRANSFER, "TransferWorker.poll"),
        Stop("worker_agent/swap/driver.py", "SwitchDriver"),
        Stop("worker_agent/swap/vote.py", "Voter.cast"),
        Stop("worker_agent/swap/vote_link.py", "VoteLink.begin"),
        Stop("worker_agent/swap/vote.py", "Voter.cast"),
        Stop("worker_agent/swap/vote.py", "Voter.count"),
        Stop("worker_agent/swap/commit_register.py", "CommitRegister.may_commit"),
        Stop("worker_agent/swap/vote.py", "Voter.count"),
        Stop("worker_agent/swap/driver.py", "SwitchDriver"),
        Stop("worker_agent/swap/staging.py", "install_layer"),
        Stop("worker_agent/live_layer.py", "LiveLayer"),
        Stop("worker_agent/swap/staging.py", "install_layer"),
        Stop("worker_agent/swap/staging.py", "install_layer.on_commit"),
        Stop(_ENGINE_HOST, "EngineHost"),
        Stop("worker_agent/adapters/vllm/host.py", "VllmHost"),
    ),
)
"""A new placement, from the planner to the live weights and tables in vLLM's layers."""

TOURS = (SETTING, HEAT, PLAN)
