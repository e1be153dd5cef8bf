"""One rank whose vLLM-Ascend EPLB moves experts before weights are loaded again, on CPU. Runs in vLLM's own Python.

``python ascend_reload_rank.py RANK PORT SOURCE '{"release": "0.30", "runner": 1}'``

The layers, the weight loaders, the worker, the model runner's methods, the first runner's updater and its transfers are
the engine's. The planner, the weight transfer from the trainer and the second runner's transfers are faked. The last
line of the output contains the results as JSON.
"""

import importlib.machinery
import itertools
import json
import os
import sys
import tempfile
import types
from pathlib import Path

os.environ.update(
    VLLM_PLUGINS="",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_DIST_IDENT=sys.argv[2],
    VLLM_ASCEND_ENABLE_NZ="0",
    DYNAMIC_EPLB=str(json.loads(sys.argv[4])["runner"] == 1).lower(),
    HF_HUB_OFFLINE="1",
    TORCH_DEVICE_BACKEND_AUTOLOAD="0",
)
import torch
import torch.distributed as dist
import torch_npu
from ascend_engine_config import engine_config
from vllm_ascend_dense import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, RANKS, TOP_K, experts_of

RANK, PORT, SOURCE = int(sys.argv[1]), sys.argv[2], sys.argv[3]
OPTIONS = json.loads(sys.argv[4])
FIRST = OPTIONS["runner"] == 1
REDUNDANT = 2
SLOTS = (EXPERTS + REDUNDANT) // RANKS
SWAPPED = 2
"""Slot of each rank whose expert moves to the other rank. These experts have no other replica."""
CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "float32"}
CONFIG |= {"vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": EXPERTS}
CONFIG |= {"num_experts_per_tok": TOP_K, "moe_intermediate_size": INTERMEDIATE, "mlp_only_layers": []}


def put(name, **contents):
    """Install a fake module."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    sys.modules[name] = module


def put_fakes():
    """Install fakes of modules and functions that the engine only imports, but never calls here."""
    put("vllm_ascend._build_info", __device_type__="A3")
    put("vllm_ascend.eplb.core.policy.policy_flashlb", FlashLB=object, warm_up=None)
    for name in ("patch", "patch.platform", "patch.worker"):
        # Replace the packages, because importing them applies all patches, and many of these need a device.
        put(f"vllm_ascend.{name}", __path__=[f"{SOURCE}/vllm_ascend/{name.replace('.', '/')}"])
    for name in ("scipy", "scipy.linalg", "scipy.optimize"):
        put(name, __path__=[], __version__="1.14.0", __getattr__=torch_npu.Unused(name).__getattr__)
    torch.npu.memory = torch_npu.Unused("memory")
    torch.npu.config = types.SimpleNamespace()
    torch.accelerator.synchronize = lambda *_: None


def build():
    """Build vLLM's configuration and groups, and a model that only has MoE layers."""
    import vllm.platforms  # noqa: F401
    from vllm.config import set_current_vllm_config

    put_fakes()
    eplb = {"dynamic_eplb": True, "num_redundant_experts": REDUNDANT} if FIRST else {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = engine_config(folder, RANKS, eplb_config=eplb, weight_nz_mode=0)
    if not FIRST:
        # Without a device, vLLM rejects these settings.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        type(config).use_v2_model_runner = True
        config.parallel_config.enable_eplb = True
        config.parallel_config.eplb_config.num_redundant_experts = REDUNDANT
    from vllm_ascend.ascend_config import init_ascend_config

    with set_current_vllm_config(config):
        init_ascend_config(config)
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

        init_distributed_environment(RANKS, RANK, f"tcp://127.0.0.1:{PORT}", RANK, "gloo")
        ensure_model_parallel_initialized(RANKS, 1)
        init_ascend_model_parallel(config.parallel_config)
        make = layers_of_030 if OPTIONS["release"] == "0.30" else layers_of_023
        return config, make()


def layers_of_023():
    """Return layers of 0.23, which own their weights."""
    from vllm_ascend.ops.fused_moe import fused_moe, fused_moe_0_23_0

    fused_moe_0_23_0.setup_moe_comm_method = lambda _config: None
    return [fused_moe.AscendFusedMoE(**layer_options(index)) for index in range(LAYERS)]


def layers_of_030():
    """Return layers of 0.30 without the modules around them, because these own no weights."""
    from vllm_ascend.ops.fused_moe import fused_moe, routed_experts
    from vllm_ascend.patch.platform import patch_eplb, patch_fused_moe  # noqa: F401

    fused_moe.setup_moe_comm_method = lambda _config: None
    classes = {
        "routed_experts_cls": routed_experts.AscendRoutedExperts,
        "runner_cls": fused_moe.AscendMoERunner,
    }
    if not FIRST:
        classes |= {"enable_eplb": True, "num_redundant_experts": REDUNDANT}
    make = patch_fused_moe._ascend_FusedMoE
    return [make(**layer_options(index), **classes).routed_experts for index in range(LAYERS)]


def layer_options(index):
    return {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "params_dtype": torch.float32,
        "renormalize": True,
        "quant_config": None,
        "prefix": f"model.layers.{index}.mlp.experts",
    }


def checkpoint():
    """Yield the names and weights of a checkpoint."""
    for index in range(LAYERS):
        w13_EJH, w2_EHI = experts_of(index)
        for expert in range(EXPERTS):
            gate_IH, up_IH = w13_EJH[expert].chunk(2)
            for name, weight in (("gate", gate_IH), ("up", up_IH), ("down", w2_EHI[expert])):
                yield f"{index}.{expert}.{name}_proj.weight", weight.clone()


class Model(torch.nn.Module):
    """A model with MoE layers only. Its ``load_weights`` calls the layers' loaders as the engine's models do."""

    quant_config = None

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.config = types.SimpleNamespace(first_k_dense_replace=0)

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for index, named in itertools.groupby(weights, lambda pair: pair[0].partition(".")[0]):
            of_layer = [(name.partition(".")[2], weight) for name, weight in named]
            if OPTIONS["release"] == "0.30":
                assert set(self.layers[int(index)].load_weights(of_layer)) == {"w13_weight", "w2_weight"}
                continue
            for name, weight in of_layer:
                expert, projection, _ = name.split(".")
                shard = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[projection]
                param_name = "w2_weight" if shard == "w2" else "w13_weight"
                param = params[f"layers.{index}.{param_name}"]
                param.weight_loader(param, weight, param_name, shard_id=shard, expert_id=int(expert))
        return set(params)


def start(config, layers):
    """Load the model as the engine does when it starts, and return it with the engine's worker and model runner."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm_ascend.worker.worker import NPUWorker

    if FIRST:
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
    else:
        from vllm_ascend.worker.v2.model_runner import NPUModelRunner

    model = Model(layers)
    record_metadata_for_reloading(model)
    model.load_weights(checkpoint())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    runner = NPUModelRunner.__new__(NPUModelRunner)
    worker = NPUWorker.__new__(NPUWorker)
    vars(runner).update(
        model=model,
        model_config=config.model_config,
        load_config=config.load_config,
        lora_config=None,
        reset_encoder_cache=lambda: None,
        reset_mm_cache=lambda: None,
    )
    vars(worker).update(
        model_runner=runner,
        model_config=config.model_config,
        device=torch.device("cpu"),
        weight_transfer_engine=trainer(model, config),
        _weight_update_active=False,
    )
    return model, worker, runner


def trainer(model, config):
    """Return the engine's weight transfer engine with a fake transfer."""
    from vllm_ascend.distributed.weight_transfer.hccl_engine import HCCLWeightTransferEngine

    class Engine(HCCLWeightTransferEngine):
        def __init__(self):
            self.model = model
            self.model_config = config.model_config

        def parse_update_info(self, info):
            return info

        def receive_weights(self, _info, load_weights=model.load_weights):
            load_weights(checkpoint())

    return Engine()


def move_in_first_runner(config, model):
    """Create the engine's EPLB, and let it swap one expert of each rank with the other rank in all layers."""
    from vllm.config import set_current_vllm_config
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.eplb.adaptor.vllm_adaptor import VllmEplbAdaptor
    from vllm_ascend.eplb.core.eplb_device_transfer_loader import D2DExpertWeightLoader
    from vllm_ascend.eplb.core.eplb_utils import generate_log2phy_map
    from vllm_ascend.eplb.eplb_updator import EplbUpdator

    eplb_config = get_ascend_config().eplb_config
    loader = D2DExpertWeightLoader()
    process = types.SimpleNamespace(shared_dict={}, pid=0)
    with set_current_vllm_config(config):
        updator = EplbUpdator(eplb_config, loader, process, process)
    adaptor = VllmEplbAdaptor(model)
    loader.set_adator(adaptor)
    updator.set_adaptor(adaptor)
    updator.warm_up_eplb()
    for index, layer in enumerate(model.layers):
        maps_RE = layer.global_expert_map.clone()
        first, second = ((maps_RE[rank] == SWAPPED).nonzero().item() for rank in range(RANKS))
        maps_RE[:, [first, second]] = maps_RE[:, [second, first]]
        leaving, arriving = (first, second) if RANK == 0 else (second, first)
        loader.set_log2phy_map(generate_log2phy_map(maps_RE, RANK, tp_size=RANKS))
        loader.generate_expert_d2d_transfer_task(
            [(1 - RANK, leaving)], [(1 - RANK, arriving)], maps_RE[RANK], index
        )
        requests = []
        loader.asyn_expert_weight_transfer(requests)
        loader.update_expert_map_and_weight(requests)


def wrong_in_first_runner(model):
    """Return the number of experts that a table maps to a slot of this rank with another expert's weights."""
    wrong = 0
    for index, layer in enumerate(model.layers):
        tables = [torch.empty_like(layer.log2phy) for _ in range(RANKS)]
        dist.all_gather(tables, layer.log2phy)
        for table_E in tables:
            for expert, slot in enumerate(table_E.tolist()):
                if not 0 <= slot < RANKS * SLOTS:
                    wrong += 1
                elif slot // SLOTS == RANK:
                    wrong += not holds(layer, slot % SLOTS, index, expert)
    return wrong


def move_in_second_runner(config, model):
    """Create the engine's policy and placement, and swap one expert of each rank with the other rank in all layers."""
    from vllm.config import set_current_vllm_config
    from vllm_ascend.patch.platform.patch_eplb import _build_distributed_initial_expert_map
    from vllm_ascend.worker.v2 import eplb

    with set_current_vllm_config(config):
        eplb.create_eplb_policy("default", None)
    initial_P = _build_distributed_initial_expert_map(EXPERTS, REDUNDANT, RANKS)
    model.placement_LP = torch.tensor(initial_P).repeat(LAYERS, 1)
    swapped_P = torch.arange(RANKS * SLOTS)
    first = SWAPPED
    second = SLOTS + SWAPPED
    swapped_P[[first, second]] = swapped_P[[second, first]]
    for layer in model.layers:
        for weight_SN in layer.get_expert_weights():
            parts = [torch.empty_like(weight_SN) for _ in range(RANKS)]
            dist.all_gather(parts, weight_SN.contiguous())
            weight_SN.copy_(torch.cat(parts)[swapped_P].chunk(RANKS)[RANK])
    model.placement_LP = model.placement_LP[:, swapped_P]


def wrong_in_second_runner(model):
    """Return the number of this rank's slots that do not hold the weights of the expert in the placement."""
    wrong = 0
    for index, layer in enumerate(model.layers):
        for slot, expert in enumerate(model.placement_LP[index].tolist()):
            if slot // SLOTS == RANK:
                wrong += not holds(layer, slot % SLOTS, index, expert)
    return wrong


def holds(layer, slot, index, expert):
    """Return True if a slot holds an expert's weights, in the layout that the engine computes with."""
    w13_EJH, w2_EHI = experts_of(index)
    return torch.equal(layer.w13_weight[slot], w13_EJH[expert].T) and torch.equal(
        layer.w2_weight[slot], w2_EHI[expert].T
    )


def install_policy_mode():
    """Install policy mode without its planner, which would first compile its kernels."""
    from worker_agent.policy import vllm_ascend

    if FIRST:
        from worker_agent.policy.vllm_ascend import first_runner

        first_runner.CyclePlanner = lambda *_: None
    else:
        from worker_agent.policy.vllm_ascend import second_runner

        second_runner.Agreement = torch_npu.Unused("Agreement")
        second_runner.PlannerPolicy = lambda *_: None
    vllm_ascend.install()


def update(worker):
    """Load weights that a trainer sends."""
    worker.start_weight_update()
    worker.update_weights({})
    worker.finish_weight_update()


def refusals(worker, runner):
    """Return the errors of all calls that would load or discard weights."""
    calls = {
        "reload_weights": lambda: runner.reload_weights(weights_iterator=checkpoint()),
        "update": lambda: update(worker),
        "sleep": lambda: worker.sleep(level=2),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            errors[name] = str(error)
    return errors


def remove_guard(*owners):
    """Restore the engine's own methods."""
    for owner in owners:
        for name in ("reload_weights", "start_weight_update", "update_weights"):
            guarded = getattr(owner, name, None)
            if hasattr(guarded, "__wrapped__"):
                setattr(owner, name, guarded.__wrapped__)


def main():
    """Move experts, and count those in wrong slots after refused calls and after the engine's own calls."""
    # With this setting, torch fills uninitialised memory with NaN or the largest integer, so the test recognises it.
    torch.use_deterministic_algorithms(True)
    config, layers = build()
    install_policy_mode()
    model, worker, runner = start(config, layers)
    move = move_in_first_runner if FIRST else move_in_second_runner
    count_wrong = wrong_in_first_runner if FIRST else wrong_in_second_runner
    move(config, model)
    tables = [layer.log2phy.clone() for layer in layers] if FIRST else []
    wrong = {"moves": count_wrong(model)}
    refused = refusals(worker, runner)
    wrong["refusals"] = count_wrong(model)
    remove_guard(type(worker), type(runner))
    runner.reload_weights(weights_iterator=checkpoint())
    wrong["reload"] = count_wrong(model)
    tables_kept = all(torch.equal(layer.log2phy, table) for layer, table in zip(layers, tables, strict=False))
    for layer, table in zip(layers, tables, strict=False):
        layer.log2phy.copy_(table)
    for param in model.parameters():
        param.data.zero_()
    update(worker)
    wrong["update"] = count_wrong(model)
    results = {"refused": refused, "wrong": wrong, "tables_kept": tables_kept}
    print("FOUND " + json.dumps(results), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
