"""One rank that serves real ``AscendFusedMoE`` layers on CPU, balanced by the agent. Runs in the engine's own Python.

``python vllm_ascend_rank.py RANK PORT CONFIG_FOLDER '{"comm": "MC2", "redundant": 2, "policy": 1, ...}'``

The last line of its output contains the results as JSON.
"""

import json
import multiprocessing
import os
import sys
import time

os.environ.update(
    VLLM_PLUGINS="",
    VLLM_USE_V2_MODEL_RUNNER="0",
    DYNAMIC_EPLB="true",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    TORCH_DEVICE_BACKEND_AUTOLOAD="0",
)
import torch
import torch.distributed as dist
from commit_without_weights import commit_without_weights
from vllm_ascend_dense import EXPERTS, HIDDEN, LAYERS, TOKENS, choices_of
from vllm_ascend_host import build, experts_layers, forward, start_balancer


def kept_tensors(layer):
    """Return the tensors that graphs have captured: the table, the counts, and each tensor of the experts."""
    from worker_agent.adapters.vllm_ascend.weights import NAMES

    kinds = [getattr(layer, name) for name in NAMES[layer.quant_type.name]]
    experts = [tensor for kind in kinds for tensor in (kind if isinstance(kind, list) else [kind])]
    return [layer.log2phy, layer.moe_load, *experts]


def host_map(layer):
    """Return the map that dispatchers read. vLLM's own map in release 0.30 has another name."""
    return getattr(layer, "ascend_expert_map", layer._expert_map).tolist()


def main(rank, port, config_folder, options):
    """Serve until enough layers have switched."""
    config, model = build(rank, port, config_folder, options)
    from worker_agent.adapters import compat
    from worker_agent.adapters.vllm_ascend.refusals import KNOWN

    # The worker and the runner cannot be imported without a device, so ``test_known_functions.py`` reads their source.
    functions = {
        target: function
        for target, function in KNOWN[options["release"]].items()
        if not target.startswith("vllm_ascend.worker")
    }
    mismatches = [str(mismatch) for mismatch in compat.mismatches(functions, {})]
    if options.get("broken"):
        commit_without_weights()
    updator = start_balancer(config, model)
    agent = updator.agent
    layers = experts_layers(model)
    tensors = [tensor for layer in layers for tensor in kept_tensors(layer)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    host_maps = [host_map(layer) for layer in layers]
    draw = torch.Generator().manual_seed(11)
    turns = torch.Generator().manual_seed(12)
    bias_E = torch.tensor([3.0, 2.5] + [0.0] * (EXPERTS - 2))
    worst = 0.0
    steps = miscounted = 0
    # All ranks switch at the same step, so they all leave the loop at the same step.
    while steps < options["most_steps"] and agent.stats.layers_switched < options["switches"]:
        if steps % 60 == 59:
            # Choose any two experts. Two neighbours are always one even and one odd expert, so a single placement would
            # suit all pairs.
            bias_E = bias_E[torch.randperm(EXPERTS, generator=turns)]
        hidden_TH = torch.randn(TOKENS, HIDDEN, generator=draw)
        logits_LTE = torch.randn(LAYERS, TOKENS, EXPERTS, generator=draw) + bias_E
        updator.forward_before()
        worst = max(worst, forward(config, model, options, hidden_TH, logits_LTE))
        expected_LE = choices_of(logits_LTE, rank, options["comm"] == "ALLGATHER")
        miscounted += not torch.equal(updator.heat.chosen_LE.long(), expected_LE)
        updator.forward_end(True)
        steps += 1
        time.sleep(0.005)
    facts = {
        "rank": rank,
        "mismatches": mismatches,
        "steps": steps,
        "worst": worst,
        "miscounted": miscounted,
        "switched": agent.stats.layers_switched,
        "experts_received": agent.stats.experts_received,
        "halted": agent.halted,
        "same_addresses": addresses
        == [tensor.data_ptr() for layer in layers for tensor in kept_tensors(layer)],
        "host_maps_unchanged": host_maps == [host_map(layer) for layer in layers],
        "tables": [layer.log2phy.tolist() for layer in layers],
        "children": len(multiprocessing.active_children()),
    }
    updator.shutdown()
    print("FOUND " + json.dumps(facts), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
