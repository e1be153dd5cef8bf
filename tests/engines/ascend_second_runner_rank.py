"""One rank with the EPLB of vLLM-Ascend's second runner, in policy mode, on CPU. Runs in vLLM's own Python.

``python ascend_second_runner_rank.py RANK PORT SOURCE '{"cycles": 4}'``

The policy factory, the load statistics, the planning hook, the commits, the routing tables and the token mapping are
the engine's. Groups, streams and weight transfers are faked: each slot holds the expert that the last commit assigned
to it. The last line of the output contains the results as JSON.
"""

import contextlib
import json
import os
import sys
import types

os.environ.update(
    VLLM_PLUGINS="",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_LOGGING_LEVEL="ERROR",
    TORCH_DEVICE_BACKEND_AUTOLOAD="0",
)
import numpy as np
import torch
import torch.distributed as dist

EXPERTS = 8
RANKS = 2
SLOTS = 5
LAYERS = 2
WINDOW = 32
TOKENS = 400
KEY = "model"


class Stream(contextlib.nullcontext):
    """A stream that does nothing."""


def import_engine(source, group):
    """Import the engine's modules without the packages that need a device, and fake its groups."""
    built = types.ModuleType("vllm_ascend._build_info")
    built.__device_type__ = "A3"
    sys.modules[built.__name__] = built
    for name in ("patch", "patch.platform", "worker", "worker.v2"):
        package = types.ModuleType(f"vllm_ascend.{name}")
        package.__path__ = [f"{source}/vllm_ascend/{name.replace('.', '/')}"]
        sys.modules[package.__name__] = package
    for name, contents in {
        "worker.worker": {"NPUWorker": types.SimpleNamespace(sleep=None)},
        "worker.v2.model_runner": {"NPUModelRunner": None},
    }.items():
        module = types.ModuleType(f"vllm_ascend.{name}")
        vars(module).update(contents)
        sys.modules[module.__name__] = module
    import vllm.config
    import vllm.distributed
    from vllm.distributed.eplb import async_worker
    from vllm.distributed.eplb import eplb_state as upstream
    from vllm_ascend.distributed.eplb import eplb_state
    from vllm_ascend.patch.platform import patch_eplb

    for module in (vllm.distributed, async_worker, upstream, eplb_state, patch_eplb):
        for name in ("get_ep_group", "get_eplb_group"):
            setattr(module, name, lambda: group)
    upstream.move_from_buffer = lambda **_: None
    engine = types.SimpleNamespace(
        load_config=types.SimpleNamespace(load_format="auto"),
        parallel_config=types.SimpleNamespace(enable_eplb=True),
    )
    vllm.config.get_current_vllm_config = lambda: engine
    return async_worker, upstream, eplb_state, patch_eplb


def make_state(upstream, eplb_state, policy):
    """Return the engine's state with one model whose layers have the initial placement."""
    slots_LP = (torch.arange(RANKS * SLOTS) % EXPERTS).repeat(LAYERS, 1)
    logical_LEX, count_LE = upstream.compute_logical_maps(slots_LP, EXPERTS)
    # vLLM reserves room for more replicas than there are at start-up.
    logical_LEX = torch.nn.functional.pad(logical_LEX, (0, RANKS * SLOTS - logical_LEX.shape[2]), value=-1)
    layers = [types.SimpleNamespace(eplb_state=eplb_state.AscendEplbLayerState()) for _ in range(LAYERS)]
    for index, layer in enumerate(layers):
        layer.eplb_state.set_layer_state(
            index, torch.zeros(LAYERS, RANKS * SLOTS, dtype=torch.int32), logical_LEX, count_LE
        )
    model = types.SimpleNamespace(
        num_moe_layers=LAYERS,
        num_physical_experts=RANKS * SLOTS,
        num_logical_experts=EXPERTS,
        num_expert_groups=1,
        moe_layers=layers,
        expert_weights=[[]] * LAYERS,
    )
    model_state = types.SimpleNamespace(
        physical_to_logical_map=slots_LP,
        logical_to_physical_map=logical_LEX,
        logical_replica_count=count_LE,
        expert_load_window=torch.zeros(WINDOW, LAYERS, RANKS * SLOTS, dtype=torch.int32),
        model=model,
        model_name=KEY,
        communicator=types.SimpleNamespace(),
        expert_buffer=[],
        eplb_stats=None,
        pending_result=None,
        rebalanced=False,
    )
    state = eplb_state.AscendEplbState.__new__(eplb_state.AscendEplbState)
    state.policy = policy
    state.model_states = {KEY: model_state}
    state.expert_load_window_size = WINDOW
    state.rearrange_event = types.SimpleNamespace(record=lambda: None)
    state._rank_node_ids = np.zeros(RANKS, dtype=np.int64)
    assert state.uses_custom_load_stats
    state._initialize_load_stats_state(model_state)
    return state, model_state


class Server:
    """One rank's server. It runs forward passes with skewed expert choices, mapped by the engine's routing tables."""

    def __init__(self, model_state, rank):
        from vllm_ascend.ops.fused_moe.eplb import map_to_physical

        self.map = map_to_physical
        self.model_state = model_state
        self.rank = rank
        self.draw = np.random.default_rng(rank)
        popularity = 1.0 / np.arange(1, EXPERTS + 1)
        shuffle = np.random.default_rng(7)
        self.share_LE = np.stack([shuffle.permutation(popularity / popularity.sum()) for _ in range(LAYERS)])
        self.wrong = 0

    def step(self, row):
        """Run one step, and return the mean PAR of the layers."""
        pars = []
        for layer in range(LAYERS):
            ids_TK = torch.from_numpy(self.draw.choice(EXPERTS, (TOKENS, 1), p=self.share_LE[layer]))
            routing = self.model_state.model.moe_layers[layer].eplb_state.expert_replica_routing_table
            slot_TK = self.map(ids_TK, routing)
            held_TK = self.model_state.physical_to_logical_map[layer][slot_TK.long()]
            self.wrong += int((held_TK != ids_TK).sum())
            count_P = torch.bincount(slot_TK.flatten(), minlength=RANKS * SLOTS)
            dist.all_reduce(count_P)
            own_slots = slice(self.rank * SLOTS, (self.rank + 1) * SLOTS)
            self.model_state.expert_load_window[row, layer] = 0
            self.model_state.expert_load_window[row, layer, own_slots] = count_P[own_slots].int()
            loads_R = count_P.reshape(RANKS, SLOTS).sum(1).double()
            pars.append(float(loads_R.max() / loads_R.mean()))
        return float(np.mean(pars))


def rebalance(state, model_state, server, engine):
    """Run one asynchronous rebalancing as the engine's EPLB thread and ``step`` do, with a step before each commit."""
    async_worker, upstream, _, patch_eplb = engine
    state._local_load_collection_mask.fill_(1)
    state._physical_load_sample_slots.copy_(torch.arange(WINDOW))
    state._num_recorded_load_steps = WINDOW
    state.publish_async_load_stats(state.collect_global_load_stats())
    old_LP = model_state.physical_to_logical_map.clone()
    target = async_worker.run_rebalance_experts(model_state, state, old_LP, Stream())
    maps = patch_eplb._prepare_commit_maps(model_state, target)
    changed = torch.nonzero((old_LP != target).any(dim=1)).flatten().tolist()
    for layer in changed:
        server.step(0)
        model_state.pending_result = patch_eplb._AscendAsyncLayerResult(
            layer_idx=layer,
            new_physical_to_logical_map=maps[0][layer],
            new_logical_to_physical_map=maps[1][layer],
            new_logical_replica_count=maps[2][layer],
            transfer_metadata=None,
            consumed_event=types.SimpleNamespace(record=lambda _stream=None: None),
            is_last_result=layer == changed[-1],
        )
        upstream._move_to_workspace(model_state=model_state, ep_rank=server.rank)
    model_state.rebalanced = False
    return len(changed)


def main(rank, port, source, options):
    """Serve several windows, each followed by a rebalancing."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    group = types.SimpleNamespace(
        device_group=dist.group.WORLD, cpu_group=dist.group.WORLD, world_size=RANKS, rank_in_group=rank
    )
    engine = import_engine(source, group)
    from worker_agent.policy import vllm_ascend

    vllm_ascend.install()
    from vllm_ascend.worker.v2 import eplb as runner

    policy = runner.create_eplb_policy("default", None)
    if not options.get("warm", True):
        policy._agreement.decided_here = lambda *_, **__: None
    dist.barrier()
    state, model_state = make_state(engine[1], engine[2], policy)
    server = Server(model_state, rank)
    pars = []
    changed = []
    for _ in range(options["cycles"]):
        pars.append(round(float(np.mean([server.step(row) for row in range(WINDOW)])), 3))
        changed.append(rebalance(state, model_state, server, engine))
    tables = [layer.eplb_state.expert_replica_routing_table for layer in model_state.model.moe_layers]
    rows_LP = [torch.bincount(table.flatten(), minlength=RANKS * SLOTS).tolist() for table in tables]
    results = {
        "pars": pars,
        "changed": changed,
        "wrong": server.wrong,
        "placement": model_state.physical_to_logical_map.tolist(),
        "rows": rows_LP,
    }
    print("FOUND " + json.dumps(results), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
