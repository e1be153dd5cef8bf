"""Fakes of the parts of vLLM-Ascend's first runner that policy mode patches, with the same order of events."""

import types

import torch
import torch.distributed as dist

LAYERS = 2
EXPERTS = 4
RANKS = 2
SLOTS = 3
TABLE = torch.tensor([[[0, 1, 2], [3, 0, 1]]] * LAYERS)
"""First table of each layer: experts 0 and 1 have two replicas."""


class Group:
    """The interface of vLLM's ``GroupCoordinator`` that the updater uses."""

    def __init__(self):
        self.cpu_group = dist.group.WORLD
        self.rank_in_group = dist.get_rank()

    def all_gather(self, tensor, dim):
        parts = [torch.empty_like(tensor) for _ in range(RANKS)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts, dim)


class Adaptor:
    """Adaptor with counters of this rank's slots: one row per layer, or ``steps`` rows per layer under policy 3."""

    def __init__(self, steps):
        self.steps = steps
        shape = (LAYERS, steps, SLOTS) if steps else (LAYERS, SLOTS)
        self.loads = torch.zeros(shape, dtype=torch.int64)

    def receive(self, counts_LS, step):
        if self.steps:
            self.loads[:, step % self.steps] += counts_LS
        else:
            self.loads += counts_LS

    def get_rank_expert_workload(self):
        return self.loads.clone()

    def clear_all_moe_loads(self):
        self.loads.zero_()


class EplbWorker:
    """The part of a rank's EPLB process that applies the policy. Here, it runs in the rank's own process."""

    def __init__(self, shared_dict, policy_type, enable_d2d=True, tp_size=None):
        self.policy = EnginePolicy()
        self.shared_dict = shared_dict
        self.table = TABLE.clone()

    def do_update(self):
        _, _, self.table = self.policy.rebalance_experts(self.table, self.shared_dict["moe_load"])
        self.shared_dict["expert_maps"] = maps_of(self.table)
        return self.table


class EnginePolicy:
    """The engine's own policy, whose tables can be recognised: it swaps the ranks' slots."""

    def rebalance_experts(self, table, _workload):
        return 1, [], table.flip(1)


def maps_of(table_LRS):
    """Return the slot of each expert on each rank, or -1, ``[L, R, E]``."""
    maps_LRE = torch.full((LAYERS, RANKS, EXPERTS), -1)
    slot_LRS = torch.arange(SLOTS).expand(table_LRS.shape)
    return maps_LRE.scatter(2, table_LRS, slot_LRS)


class Worker:
    """The engine's worker, reduced to the methods that policy mode patches."""

    def sleep(self, level=1):
        return level


class Runner:
    """The engine's model runner, reduced to the method that policy mode patches."""

    def reload_weights(self):
        return "loaded"


CONFIG = types.SimpleNamespace(load_config=types.SimpleNamespace(load_format="auto"))


class EplbUpdator:
    """The cycle of vLLM-Ascend's ``EplbUpdator``, without transfers."""

    def __init__(self, config, loader, eplb_process, process):
        self.multi_stage = config.eplb_policy_type == 3
        self.expert_heat_collection_interval = config.expert_heat_collection_interval
        self.algorithm_execution_interval = config.algorithm_execution_interval
        self.comm_group = Group()
        self.adaptor = Adaptor(self.expert_heat_collection_interval if self.multi_stage else 0)
        self.num_moe_layers = LAYERS
        self.shared_dict = {"expert_maps": maps_of(TABLE), "moe_load": None}
        worker = EplbWorker(self.shared_dict, config.eplb_policy_type)
        self.eplb_process = types.SimpleNamespace(
            planner_q=types.SimpleNamespace(put=self._woken), worker=worker
        )
        self.cur_iterations = 0
        self.events = []
        self.result = None

    def _woken(self, _message):
        self.events.append(("woken", self.cur_iterations))
        self.result = self.eplb_process.worker.do_update()

    def wakeup_eplb_worker(self):
        self.eplb_process.planner_q.put(1)

    def forward_before(self):
        if (
            self.cur_iterations
            == self.expert_heat_collection_interval + self.algorithm_execution_interval - 1
        ):
            assert self.result is not None, "the engine waits for a result that never arrives"
            self.events.append(("read", self.cur_iterations))
            self.result = None

    def forward_end(self, eplb_heat_collection_status=True):
        interval = self.expert_heat_collection_interval
        if self.cur_iterations == interval - 1:
            self.wakeup_eplb_worker()
        if self.cur_iterations >= interval - 1 or eplb_heat_collection_status:
            self.cur_iterations += 1
            if self.cur_iterations == interval + self.algorithm_execution_interval + self.num_moe_layers:
                self.adaptor.clear_all_moe_loads()
                self.cur_iterations = 0
