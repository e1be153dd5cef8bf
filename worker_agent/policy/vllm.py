"""Policy mode in vLLM 0.24 and later: the planner takes the place of vLLM's ``default`` EPLB policy."""

from __future__ import annotations

import inspect
import logging
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.planner.settings import EVEN, STEP
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm import step_split
from worker_agent.policy.agreement import Agreement
from worker_agent.policy.figures import Int64
from worker_agent.policy.initial_placement import InitialPlacementError, read_initial_placement
from worker_agent.policy.parts import heat_of_slots, parts_of_window, without_copies
from worker_agent.policy.reload import return_before_loading, return_experts
from worker_agent.policy.service import service_decision
from worker_agent.settings import AgentSettings
from worker_agent.step_split import StepSplitSetting, is_requested

_log = logging.getLogger("eplb.agent")

_PARAMETERS = ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices")
"""Parameters of ``rebalance_experts`` in vLLM 0.24 to 0.33."""
_REARRANGE = ("self", "is_profile", "rank_mapping")
"""First parameters of ``EplbState.rearrange`` in vLLM 0.24 to 0.33."""
_KEY = "default"
"""Name of the policy to replace, because vLLM's asynchronous EPLB accepts no other name."""


class PlannerPolicy:
    """Implementation of vLLM's ``AbstractEplbPolicy``. It lets this project's planner decide.

    vLLM calls ``rebalance_experts`` on the class, on the model's thread or on the thread of its asynchronous EPLB, with
    the sum of the window. Before that call, the patched ``EplbState.rearrange`` stores the same window in parts, on the
    model's thread.

    Attributes
    ----------
    fallback
        vLLM's own policy, which decides if the planner cannot.
    agreement
        Agreement of the EP ranks; ``None`` before the first model is loaded.
    """

    fallback: Any = None
    agreement: Agreement | None = None
    _leave_to_vllm = False
    _windows: list[tuple[torch.Tensor, torch.Tensor]] = []  # noqa: RUF012, replaced as a whole, never modified
    _starts: list[Int64] = []  # noqa: RUF012, as above

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the new placement, equal on all ranks.

        All ranks take the same branches, because vLLM passes the same arguments to all of them.

        Parameters
        ----------
        weight
            ``[L, E]``, tokens of the window, summed over all ranks.
        num_replicas
            P, number of physical slots.
        num_groups
            Number of expert groups; only vLLM's own policy uses it.
        num_nodes
            Number of nodes.
        num_ranks
            R, number of ranks.
        old_global_expert_indices
            int64 ``[L, P]``, current placement.

        Returns
        -------
        torch.Tensor
            int64 ``[L, P]`` on the CPU.
        """
        old = old_global_expert_indices
        agreement = None if cls._leave_to_vllm else cls.agreement
        shape = (weight.shape[0], num_replicas)
        if agreement is not None and old is not None and tuple(old.shape) == shape and int(old.min()) >= 0:
            new_LP = cls._decided(agreement, weight, old.numpy().astype(np.int64), num_ranks, num_nodes)
            if new_LP is not None:
                return torch.from_numpy(new_LP.copy())
        new: torch.Tensor = cls.fallback.rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, old
        )
        return new

    @classmethod
    def _decided(
        cls, agreement: Agreement, weight: torch.Tensor, old_LP: Int64, ranks: int, nodes: int
    ) -> Int64 | None:
        """Return the placement on which the ranks agree; ``None`` if vLLM's own policy must decide."""
        start_LP = cls._start_for(old_LP)
        if start_LP is not None:
            return start_LP
        if not bool(weight.any()):
            return old_LP
        parts = next(
            (parts for total, parts in cls._windows if torch.equal(total, weight.to(total.dtype))), None
        )
        heat_NLE = weight.unsqueeze(0) if parts is None else parts
        return agreement.placement(
            without_copies(heat_NLE.numpy(), ranks), old_LP, ranks, nodes=nodes, timed=parts is not None
        )

    @classmethod
    def _start_for(cls, old_LP: Any) -> Int64 | None:
        """Remove and return the initial placement for a model of this shape; ``None`` if there is none."""
        for start_LP in cls._starts:
            if start_LP.shape == old_LP.shape:
                cls._starts = [other for other in cls._starts if other is not start_LP]
                return start_LP
        return None


def install() -> None:
    """Replace vLLM's default EPLB policy, and pass the window to the new one in parts.

    Raises
    ------
    UnsupportedEngineError
        If this vLLM has a different interface, or if the planner is not installed. In either case, nothing is patched.
    """
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    settings = AgentSettings()
    check_interface()
    splits = _Splits(settings.step_split)
    splits.patch()
    PlannerPolicy.fallback = EPLB_POLICIES[_KEY]
    EPLB_POLICIES[_KEY] = PlannerPolicy
    add_model = EplbState.add_model
    initial: dict[str, Int64] = {}

    @wraps(add_model)
    def add_model_and_join(
        self: Any, model: Any, model_config: Any, *arguments: Any, **keywords: Any
    ) -> None:
        add_model(self, model, model_config, *arguments, **keywords)
        is_draft = getattr(model_config, "runner_type", None) == "draft"
        key = model_config.compute_hash()
        model_state = self.model_states[key]
        initial[key] = model_state.physical_to_logical_map.cpu().numpy().astype(np.int64)
        if not is_draft:
            splits.start(model_state, self.parallel_config)
        if PlannerPolicy.agreement is None:
            PlannerPolicy.agreement = _join(self, STEP if splits.whole else EVEN)
            if PlannerPolicy.agreement is not None:
                PlannerPolicy.agreement.wait_until_warm()
        if PlannerPolicy.agreement is not None and settings.initial_placement is not None and not is_draft:
            start_LP = _initial_placement(settings.initial_placement, model_state, PlannerPolicy.agreement)
            PlannerPolicy._starts = [*PlannerPolicy._starts, start_LP]
            # With this count, vLLM rearranges after the first step.
            self.expert_rearrangement_step = max(0, self.expert_rearrangement_step_interval - 1)

    def return_all(state: Any) -> None:
        def rearrange_to(placements: list[Int64]) -> None:
            PlannerPolicy._starts = placements
            state.rearrange()

        return_experts(state, initial, rearrange_to)

    EplbState.add_model = add_model_and_join
    hand_over_windows(settings.window_parts)
    return_before_loading(return_all)


def hand_over_windows(parts: int) -> None:
    """Patch vLLM's ``EplbState.rearrange`` so that it passes the window to ``PlannerPolicy`` in parts."""
    from vllm.distributed.eplb.eplb_state import EplbState

    rearrange = EplbState.rearrange

    @wraps(rearrange)
    def rearrange_by_parts(
        self: Any, is_profile: bool = False, rank_mapping: Any = None, *rest: Any, **keywords: Any
    ) -> Any:
        PlannerPolicy._leave_to_vllm = is_profile or rank_mapping is not None
        if not PlannerPolicy._leave_to_vllm and not any((*rest, *keywords.values())):
            PlannerPolicy._windows = _windows_of(self, parts)
        return rearrange(self, is_profile, rank_mapping, *rest, **keywords)

    EplbState.rearrange = rearrange_by_parts


def check_interface() -> None:
    """Raise ``UnsupportedEngineError`` unless this vLLM has the known interface and the planner is installed."""
    import vllm
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    policy = EPLB_POLICIES.get(_KEY)
    actual = tuple(inspect.signature(policy.rebalance_experts).parameters) if policy is not None else ()
    if actual != _PARAMETERS:
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__}",
            f"Its policy {_KEY!r} takes ({', '.join(actual)}) instead of ({', '.join(_PARAMETERS)})",
            "Install vLLM 0.24 to 0.33 or a newer agent",
        )
    leading = tuple(inspect.signature(EplbState.rearrange).parameters)[: len(_REARRANGE)]
    if leading != _REARRANGE:
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__}",
            f"EplbState.rearrange takes ({', '.join(leading)}) instead of ({', '.join(_REARRANGE)})",
            "Install vLLM 0.24 to 0.33 or a newer agent",
        )
    require_planner()


def require_planner() -> None:
    """Raise ``UnsupportedEngineError`` if numba, which the planner needs, is not installed."""
    from importlib.util import find_spec

    if find_spec("numba") is None:
        raise UnsupportedEngineError(
            "the planner is not installed in this environment",
            "EPLB_AGENT_MODE=policy needs numba",
            "Install 'eplb-agent[policy]'",
        )


class _Splits:
    """Per-step splits of this process's models.

    Parameters
    ----------
    setting
        The setting ``step_split``.

    Attributes
    ----------
    whole
        True if all passes are split per step, so that the planner may place experts for this split.
    """

    def __init__(self, setting: StepSplitSetting) -> None:
        self.whole = False
        self._setting = setting
        self._by_state: dict[int, list[step_split.RouterSplit]] = {}

    def patch(self) -> None:
        """Patch vLLM's routers and commits if the split is requested. Raises ``UnsupportedEngineError``."""
        if is_requested(self._setting):
            step_split.check_functions()
            step_split.patch_router()
            step_split.follow_commits(self._by_state)

    def start(self, model_state: Any, parallel_config: Any) -> None:
        """Split a model's passes per step if the setting and the dispatch permit it (collective over the EP group)."""
        from vllm.distributed.parallel_state import get_ep_group

        group = get_ep_group()
        choice = step_split.choose_for_model(model_state, parallel_config, group, self._setting)
        splits = step_split.start_splits(model_state, group, choice)
        self._by_state[id(model_state)] = splits
        self.whole = choice.whole and bool(splits)


def _join(state: Any, split: str) -> Agreement | None:
    """Create the ``Agreement`` of the EP ranks, which communicates over the group that only vLLM's EPLB uses.

    Returns ``None`` if elastic expert parallelism is enabled.
    """
    from vllm.distributed.parallel_state import get_eplb_group

    if getattr(state.parallel_config, "enable_elastic_ep", False):
        _log.warning("elastic expert parallelism is enabled, so vLLM's own policy decides")
        return None
    return Agreement(get_eplb_group().cpu_group, split, service_decision(AgentSettings(), split))


def _initial_placement(path: Path, model_state: Any, agreement: Agreement) -> Int64:
    """Read a placement on the first rank and return it on all ranks, int64 ``[L, P]`` (collective over the EP group).

    Raises ``InitialPlacementError`` on all ranks if the file does not contain a placement for this model. The engine
    then stops.
    """
    layers, physical = model_state.physical_to_logical_map.shape
    ranks = agreement.ranks
    experts = model_state.model.num_logical_experts
    if not agreement.is_first:
        shared_LP = agreement.share(None, (layers, physical))
        if shared_LP is None:
            raise InitialPlacementError(f"{path}: the first rank could not read this placement file")
        return shared_LP
    try:
        start_LP = read_initial_placement(path, layers, ranks, physical // ranks, experts)
    except InitialPlacementError:
        agreement.share(None, (layers, physical))
        raise
    agreement.share(start_LP, (layers, physical))
    _log.info("the engine starts from the placement in %s", path)
    return start_LP


def _windows_of(state: Any, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the sum and the parts of each model's window, over all ranks (collective over the EP group).

    Returns
    -------
    list of tuple
        For each model, the sum that vLLM passes to the policy, int64 ``[L, E]``, and the parts, int64 ``[N, L, E]``.
    """
    from vllm.distributed.parallel_state import get_ep_group

    windows = []
    for model_state in state.model_states.values():
        window_TLP = model_state.expert_load_window
        rows = window_TLP.shape[0]
        ordered_TLP = torch.roll(window_TLP, -state.expert_load_window_step, 0)
        # vLLM assigns every row to the experts that are in the slots now, but rows from before the last rearrangement
        # are counts of other experts.
        valid = min(rows, state.expert_rearrangement_step_interval)
        older_LP = ordered_TLP[: rows - valid].sum(dim=0, keepdim=True)
        counts_NLP = torch.cat([older_LP, parts_of_window(ordered_TLP[rows - valid :], parts)]).long()
        slots_LP = model_state.physical_to_logical_map[:, : window_TLP.shape[2]]
        heat_NLE = heat_of_slots(counts_NLP, slots_LP, model_state.model.num_logical_experts)
        dist.all_reduce(heat_NLE, group=get_ep_group().device_group)
        heat_NLE = heat_NLE.cpu()
        windows.append((heat_NLE.sum(dim=0), heat_NLE[1:]))
    return windows
