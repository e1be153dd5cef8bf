"""Measure vLLM's or SGLang's own EPLB: the imbalance of every step and the experts fetched. Runs in the engine.

The first rank appends one line of JSON per step or rearrangement to the file that ``EPLB_TEST_MEASURE`` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch


def _append(**values):
    with Path(os.environ["EPLB_TEST_MEASURE"]).open("a") as out:
        out.write(json.dumps(values) + "\n")


def _fetched(old_LP, new_LP, ranks):
    """Return the number of experts that ranks must fetch."""
    pairs = zip(
        old_LP.reshape(len(old_LP) * ranks, -1).tolist(),
        new_LP.reshape(len(new_LP) * ranks, -1).tolist(),
        strict=True,
    )
    return sum(len(set(new_S) - set(old_S)) for old_S, new_S in pairs)


def measure_vllm():
    """Wrap ``EplbState.step`` and ``EplbState.rearrange``."""
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.parallel_state import get_ep_group

    step = EplbState.step
    rearrange = EplbState.rearrange

    def step_measured(self, is_dummy=False, is_profile=False, log_stats=False):
        group = get_ep_group()
        if group.rank_in_group == 0 and not is_dummy and not is_profile:
            for state in self.model_states.values():
                loads_LR = state.expert_load_pass.double().reshape(
                    len(state.expert_load_pass), group.world_size, -1
                )
                loads_LR = loads_LR.sum(dim=2)
                if float(loads_LR.sum()):
                    ratio_L = loads_LR.amax(dim=1) / loads_LR.mean(dim=1).clamp(min=1e-9)
                    _append(imbalance=float(ratio_L.mean()))
        return step(self, is_dummy, is_profile, log_stats)

    def rearrange_measured(self, is_profile=False, *arguments, **keywords):
        old = [state.physical_to_logical_map.cpu().clone() for state in self.model_states.values()]
        result = rearrange(self, is_profile, *arguments, **keywords)
        group = get_ep_group()
        if group.rank_in_group == 0 and not is_profile:
            new = [state.physical_to_logical_map.cpu() for state in self.model_states.values()]
            _append(
                fetched=sum(
                    _fetched(before, after, group.world_size) for before, after in zip(old, new, strict=True)
                )
            )
        return result

    EplbState.step = step_measured
    EplbState.rearrange = rearrange_measured


def measure_sglang(original, **arguments):
    """Measure a hooked ``rebalance_experts``, registered before the agent's hook."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    result = original(**arguments)
    metadata = get_global_expert_location_metadata()
    if metadata is not None and torch.distributed.get_rank() == 0:
        ranks = arguments["num_physical_experts"] // arguments["num_local_physical_experts"]
        _append(fetched=_fetched(metadata.physical_to_logical_map.cpu(), result[0].cpu(), ranks))
    return result


def measure_sglang_routing(routed, *_, **__):
    """Measure the imbalance of one layer's tokens, after SGLang has chosen their replicas."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is None or torch.distributed.get_rank():
        return
    slots = metadata.num_local_physical_experts
    ranks = metadata.num_physical_experts // slots
    ids_N = routed[0].reshape(-1)
    loads_R = torch.bincount(ids_N[ids_N >= 0] // slots, minlength=ranks).double()
    if float(loads_R.sum()):
        _append(imbalance=float(loads_R.max() / loads_R.mean()))
