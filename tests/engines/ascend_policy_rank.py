"""One rank with the real EPLB classes of vLLM-Ascend's first runner, in policy mode, on CPU.

``python ascend_policy_rank.py RANK PORT SOURCE '{"policy": 1, "cycles": 8, ...}'``

The updater, the EPLB process, the policies, the adaptor and the transfers are the engine's. The rest of vLLM and
vLLM-Ascend, including the layers, is faked. The last line of the output contains the results as JSON.
"""

import contextlib
import json
import multiprocessing
import sys
import types

import numpy as np
import torch
import torch.distributed as dist

EXPERTS = 8
RANKS = 2
REDUNDANT = 2
SLOTS = (EXPERTS + REDUNDANT) // RANKS
LAYERS = 3
TOKENS = 600
INTERVAL = 24
EXECUTION = 6
CYCLE = INTERVAL + EXECUTION + LAYERS


class Group:
    """The interface of vLLM's ``GroupCoordinator`` that the EPLB classes use."""

    def __init__(self):
        self.device_group = dist.group.WORLD
        self.cpu_group = dist.new_group()
        self.world_size = dist.get_world_size()
        self.rank_in_group = dist.get_rank()
        self.ranks = list(range(self.world_size))

    def all_gather(self, tensor, dim):
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor, group=self.device_group)
        return torch.cat(parts, dim)


def put(name, **contents):
    """Install a module with the given contents, and set it as an attribute of its package."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    package, _, leaf = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], leaf, module)
    return module


def put_fakes(source, config, group):
    """Install fakes of all modules that the engine's EPLB classes import, except the EPLB package itself."""
    put("torch_npu")
    torch.npu = types.SimpleNamespace(device_count=lambda: RANKS)
    put("vllm", __path__=[]).envs = put(
        "vllm.envs", VLLM_ALLOW_EXPERT_LOAD_COLLECTING=True, VLLM_USE_V2_MODEL_RUNNER=None
    )
    engine = types.SimpleNamespace(load_config=types.SimpleNamespace(load_format="auto"))
    put("vllm.config", get_current_vllm_config=lambda: engine)
    put("vllm.distributed", __path__=[], get_ep_group=lambda: group)
    put("vllm.distributed.parallel_state", get_pp_group=lambda: group, _node_count=lambda _group: 1)
    import logging

    put("vllm.logger", logger=logging.getLogger("vllm"))
    put("vllm.v1", __path__=[])
    put("vllm.v1.utils", record_function_or_nullcontext=lambda _name: contextlib.nullcontext())
    for name in ("vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"):
        put(name, __path__=[])
    put("vllm.model_executor.layers.fused_moe.expert_map_manager", determine_expert_map=None)
    # The package's own modules import torch_npu's operators.
    put("vllm_ascend", __path__=[f"{source}/vllm_ascend"])
    put("vllm_ascend._version", __version__="0.30.0")
    ascend = types.SimpleNamespace(enable_fused_mc2=0, mix_placement=False, eplb_config=config)
    put("vllm_ascend.ascend_config", get_ascend_config=lambda: ascend)
    put("vllm_ascend.worker", __path__=[])
    put("vllm_ascend.worker.worker", NPUWorker=types.SimpleNamespace(sleep=None))
    put("vllm_ascend.worker.model_runner_v1", NPUModelRunner=None)
    put("vllm_ascend.distributed", __path__=[])
    put("vllm_ascend.distributed.parallel_state", get_dynamic_eplb_group=lambda: group)
    put("vllm_ascend.eplb.core.policy.policy_flashlb", FlashLB=StandStill, warm_up=lambda: None)


class StandStill:
    """Replacement for the engine's policy 3, because that policy needs scipy. It keeps the table."""

    def rebalance_experts(self, current, _workload):
        return 0, [], current


class Layer(torch.nn.Module):
    """A vLLM-Ascend MoE layer, reduced to the state that EPLB accesses. Each weight depends only on its expert."""

    def __init__(self, index, rank, maps_RE, log2phy, steps):
        super().__init__()
        self.index = index
        self.rank = self.ep_rank = rank
        self.local_num_experts = SLOTS
        self.global_expert_map = maps_RE
        self.log2phy = log2phy
        self.steps = steps
        self.moe_load = torch.zeros((steps, SLOTS) if steps else SLOTS, dtype=torch.int64)
        self.counted = 0
        slot_E = maps_RE[rank]
        expert_S = torch.stack([(slot_E == slot).nonzero().squeeze() for slot in range(SLOTS)])
        self.w13_weight = weight_of(index, expert_S)[:, None].repeat(1, 4)
        self.w2_weight = -self.w13_weight

    def get_log2phy_map(self):
        return self.log2phy

    def clear_moe_load(self):
        self.moe_load.zero_()
        self.counted = 0

    def receive(self, counts_S):
        if self.steps:
            self.moe_load[self.counted % self.steps] += counts_S
            self.counted += 1
        else:
            self.moe_load.add_(counts_S)


def weight_of(layer, expert):
    return (100 * layer + expert).float()


def start(config, group, options):
    """Create and call the EPLB parts of ``NPUModelRunner``, as its constructor and ``eplb_warmup`` do."""
    from vllm_ascend.eplb.adaptor.vllm_adaptor import VllmEplbAdaptor
    from vllm_ascend.eplb.core.eplb_device_transfer_loader import D2DExpertWeightLoader
    from vllm_ascend.eplb.core.eplb_utils import generate_global_placement, generate_log2phy_map
    from vllm_ascend.eplb.core.eplb_worker import EplbProcess
    from vllm_ascend.eplb.eplb_updator import EplbUpdator

    placement_RS = generate_global_placement(EXPERTS, RANKS, REDUNDANT, 0)
    maps_RE = torch.full((RANKS, EXPERTS), -1, dtype=torch.int32)
    for rank in range(RANKS):
        maps_RE[rank, placement_RS[rank].long()] = torch.arange(SLOTS, dtype=torch.int32)
    layers = [
        Layer(
            index,
            group.rank_in_group,
            maps_RE.clone(),
            generate_log2phy_map(maps_RE, group.rank_in_group),
            INTERVAL if options["policy"] == 3 else 0,
        )
        for index in range(LAYERS)
    ]
    VllmEplbAdaptor._registered_moe_layers = layers
    loader = D2DExpertWeightLoader()
    shared = multiprocessing.Manager().dict({"expert_map": None, "moe_load": None, "expert_maps": None})
    process = EplbProcess(shared_dict=shared, policy_type=options["policy"], enable_d2d=True)
    updator = EplbUpdator(config, loader, process, process._launch_process())
    if options.get("broken"):
        VllmEplbAdaptor.do_update_expert_weight = lambda *_: None
    adaptor = VllmEplbAdaptor(
        types.SimpleNamespace(config=types.SimpleNamespace(first_k_dense_replace=0), quant_config=None)
    )
    loader.set_adator(adaptor)
    updator.set_adaptor(adaptor)
    updator.warm_up_eplb()
    return updator, layers


def forward(layers, tokens_LRE, group):
    """Dispatch one step's tokens with all ranks' tables.

    Return the rank loads, ``[L, R]``, and the number of wrong weights.
    """
    tables_RLE = group.all_gather(torch.stack([layer.log2phy for layer in layers])[None], 0)
    loads_LR = np.zeros((LAYERS, RANKS))
    wrong = 0
    for layer in layers:
        counts_P = torch.zeros(RANKS * SLOTS, dtype=torch.int64)
        for rank in range(RANKS):
            slot_E = tables_RLE[rank, layer.index].long()
            counts_P.index_add_(0, slot_E, torch.from_numpy(tokens_LRE[layer.index, rank]))
            for expert, slot in enumerate(slot_E.tolist()):
                if slot // SLOTS == layer.rank:
                    expected = weight_of(layer.index, torch.tensor(expert))
                    wrong += int(layer.w13_weight[slot % SLOTS, 0] != expected)
                    wrong += int(layer.w2_weight[slot % SLOTS, 0] != -expected)
        counts_RS = counts_P.reshape(RANKS, SLOTS)
        layer.receive(counts_RS[layer.rank])
        loads_LR[layer.index] = counts_RS.sum(1)
    return loads_LR, wrong


def main(rank, port, source, options):
    """Serve several EPLB cycles with skewed heat that changes halfway."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    config = types.SimpleNamespace(
        eplb_policy_type=options["policy"],
        expert_map_path=None,
        expert_map_record_path=None,
        expert_heat_collection_interval=INTERVAL,
        algorithm_execution_interval=EXECUTION,
    )
    group = Group()
    put_fakes(source, config, group)
    from worker_agent.policy import vllm_ascend

    vllm_ascend.install()
    updator, layers = start(config, group, options)
    draw = np.random.default_rng(5)
    popularity_LE = draw.permuted(np.tile(1.0 / np.arange(1, EXPERTS + 1), (LAYERS, 1)), axis=1)
    pars = []
    agreed = wrong = 0
    tables = [layer.log2phy.tolist() for layer in layers]
    for step in range(CYCLE * options["cycles"]):
        if step == CYCLE * options["cycles"] // 2:
            popularity_LE = popularity_LE[:, ::-1]
        share_LE = popularity_LE / popularity_LE.sum(axis=1, keepdims=True)
        tokens_LRE = draw.poisson(TOKENS * share_LE[:, None], size=(LAYERS, RANKS, EXPERTS))
        updator.forward_before()
        loads_LR, wrong_now = forward(layers, tokens_LRE, group)
        updator.forward_end(True)
        wrong += wrong_now
        pars.append((loads_LR.max(1) / loads_LR.mean(1)).mean())
        if updator.cur_iterations == 0:
            agreed += updator.shared_dict.get("eplb_agent_table") is not None
    par_of_cycles = np.reshape(pars, (options["cycles"], CYCLE)).mean(axis=1)
    results = {
        "rank": rank,
        "agreed": agreed,
        "wrong": wrong,
        "pars": par_of_cycles.round(3).tolist(),
        "moved": tables != [layer.log2phy.tolist() for layer in layers],
        "maps": updator.shared_dict["expert_maps"].tolist(),
    }
    updator.shutdown()
    print("FOUND " + json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
