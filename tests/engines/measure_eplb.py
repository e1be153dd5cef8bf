"""Measure balance in vLLM or SGLang: the imbalance of every step and the experts fetched. Runs in the engine.

The first rank appends one line of JSON per step or change of placement to the file that ``EPLB_TEST_MEASURE`` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

_last = {}
"""Placement of the last measured step, under the key ``placement``."""


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


def _note_moves(placed_LP, ranks):
    """Append the number of experts that ranks have fetched since the last call, if the placement has changed."""
    new_LP = placed_LP.cpu().clone()
    old_LP = _last.get("placement", new_LP)
    if not torch.equal(old_LP, new_LP):
        _append(fetched=_fetched(old_LP, new_LP, ranks))
    _last["placement"] = new_LP


def measure_vllm():
    """Measure each step of a model, before vLLM's EPLB or the agent sees it.

    With data parallelism, each rank counts only its own tokens, so the counts are summed.
    """
    from vllm.distributed.parallel_state import get_ep_group
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    step = GPUModelRunner.eplb_step

    def step_measured(self, is_dummy=False, is_profile=False):
        states = {} if self.eplb_state is None or is_profile else self.eplb_state.model_states
        for state in states.values():
            group = get_ep_group()
            loads_LP = state.expert_load_pass.double() * (not is_dummy)
            if self.parallel_config.data_parallel_size > 1:
                torch.distributed.all_reduce(loads_LP, group=group.device_group)
            if group.rank_in_group == 0 and float(loads_LP.sum()):
                _note_moves(state.physical_to_logical_map, group.world_size)
                loads_LR = loads_LP.reshape(len(loads_LP), group.world_size, -1).sum(dim=2)
                ratio_L = loads_LR.amax(dim=1) / loads_LR.mean(dim=1).clamp(min=1e-9)
                _append(imbalance=float(ratio_L.mean()))
        return step(self, is_dummy, is_profile)

    GPUModelRunner.eplb_step = step_measured


def measure_sglang_routing(routed, *_, **__):
    """Measure the imbalance of one layer's tokens, after SGLang has chosen their replicas."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is None or torch.distributed.get_rank():
        return
    slots = metadata.num_local_physical_experts
    ranks = metadata.num_physical_experts // slots
    _note_moves(metadata.physical_to_logical_map, ranks)
    ids_N = routed[0].reshape(-1)
    loads_R = torch.bincount(ids_N[ids_N >= 0] // slots, minlength=ranks).double()
    if float(loads_R.sum()):
        _append(imbalance=float(loads_R.max() / loads_R.mean()))
