"""The EPLB calls of ``NPUModelRunner``, one by one, because the runner itself needs a device.

``vllm_ascend_rank.py`` imports this module in the engine's own Python.
"""

import multiprocessing
import sys
import types
from functools import partial

import torch
import torch.distributed as dist
import torch_npu
from ascend_engine_config import engine_config
from vllm_ascend_dense import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    RANKS,
    TOKENS,
    TOP_K,
    dense,
    experts_of,
    product,
    product_w8a8,
)


def build(rank, port, config_folder, options):
    """Build vLLM's configuration and groups, and the host's layers with their weights."""
    built = types.ModuleType("vllm_ascend._build_info")
    built.__device_type__ = "A2" if options["comm"] == "ALLGATHER" else "A3"
    sys.modules[built.__name__] = built
    # The host's solver is never started, but importing it needs scipy.
    solver = types.ModuleType("vllm_ascend.eplb.core.policy.policy_flashlb")
    solver.FlashLB = object
    solver.warm_up = None
    sys.modules[solver.__name__] = solver
    from vllm.config import set_current_vllm_config

    eplb = {
        "dynamic_eplb": True,
        "num_redundant_experts": options["redundant"],
        "expert_heat_collection_interval": 4,
        "algorithm_execution_interval": 2,
        "eplb_policy_type": options["policy"],
    }
    config = engine_config(config_folder, RANKS, eplb_config=eplb)
    from vllm_ascend.ascend_config import init_ascend_config

    with set_current_vllm_config(config):
        init_ascend_config(config)
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        from vllm_ascend.ascend_forward_context import set_mc2_tokens_capacity
        from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

        # vLLM's collectives in shared memory need names that only its CPU worker sets.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
        set_mc2_tokens_capacity(config, 8, 1)
        init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(RANKS, 1)
        init_ascend_model_parallel(config.parallel_config)
        old = options["release"] == "0.23"
        if options["custom_ops"]:
            install_kernel_for_lists(old)
        model = make_model(rank, w8a8_config(old) if options["quant"] == "W8A8" else None, old)
    return config, model


def w8a8_config(old):
    """Return a quantisation config that makes every MoE layer W8A8, like a ModelSlim checkpoint's config."""
    from vllm_ascend.quantization.method_adapters import AscendFusedMoEMethod

    if old:
        from vllm_ascend.quantization.methods import w8a8_dynamic
    else:
        from vllm_ascend.quantization.methods.w8a8 import w8a8_dynamic
    w8a8_dynamic.torch = torch_npu.TorchOfTokenDispatcher()

    class Config:
        def get_name(self):
            return "ascend"

        def is_mxfp4_quant(self, _prefix, _layer):
            return False

        def get_quant_method(self, layer, _prefix, tid2eid=None):
            scheme = w8a8_dynamic.AscendW8A8DynamicFusedMoEMethod()
            return AscendFusedMoEMethod(scheme, layer.moe_config, tid2eid)

    return Config()


def install_kernel_for_lists(old):
    """Install the host's kernel for lists of int8 experts.

    It multiplies each row by its expert's matrix and scales, applies SwiGLU, and quantises the result to int8.
    """
    if old:
        from vllm_ascend.ops.fused_moe import moe_mlp as caller
    else:
        from vllm_ascend.ops.fused_moe import moe_utils as caller

    def kernel(*, x, weight, weight_scale, x_scale, group_list, **_):
        gated = x.new_zeros(len(x), weight[0].shape[1] // 2, dtype=torch.float32)
        begin = 0
        for matrix_HJ, scale_J, end in zip(weight, weight_scale, group_list.tolist(), strict=True):
            rows = slice(begin, end)
            wide = x[rows].double() @ matrix_HJ.double() * scale_J * x_scale[rows, None]
            gate, up = wide.float().chunk(2, dim=-1)
            gated[rows] = torch.nn.functional.silu(gate) * up
            begin = end
        return *torch_npu.npu_dynamic_quant(gated), None

    torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz_tensor_list = kernel
    caller.enable_custom_op = lambda: True


def load(layer, slot, name, weight_YX):
    """Load one expert's weight into its slot, quantised if the layer is quantised."""
    parameter = getattr(layer, name)
    if parameter.dtype == torch.int8:
        weight_YX, scale_Y = torch_npu.npu_dynamic_quant(weight_YX)
        getattr(layer, f"{name}_scale").data[slot] = scale_Y[:, None]
        getattr(layer, f"{name}_offset").data[slot] = 0
    parameter.data[slot] = weight_YX


def make_model(rank, quant_config, old):
    """Return a model that only has MoE layers, with weights loaded as from a checkpoint."""
    # In release 0.30, importing ``device_op`` first would be a circular import.
    from vllm_ascend.ops.fused_moe import token_dispatcher  # isort: skip
    from vllm_ascend.device import device_op

    from eplb_lab.layer.operators import reference

    token_dispatcher.torch = torch_npu.TorchOfTokenDispatcher()

    def init_routing(hidden, ids, *, act_quant_type=None, **named):
        return reference.npu_moe_init_routing_v2(hidden, ids, **named)

    for operators in vars(device_op).values():
        if isinstance(operators, type) and hasattr(operators, "npu_moe_init_routing"):
            operators.npu_moe_init_routing = staticmethod(init_routing)
    make_layer = layer_of_023() if old else layer_of_030()
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        make_layer(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            params_dtype=torch.float32,
            renormalize=True,
            quant_config=quant_config,
            prefix=f"model.layers.{index}.mlp.experts",
        )
        for index in range(LAYERS)
    )
    for index, layer in enumerate(experts_layers(model)):
        w13_EJH, w2_EHI = experts_of(index)
        slot_of_E = layer.global_expert_map[rank].tolist()
        for expert, slot in enumerate(slot_of_E):
            if slot >= 0:
                load(layer, slot, "w13_weight", w13_EJH[expert])
                load(layer, slot, "w2_weight", w2_EHI[expert])
        layer.quant_method.process_weights_after_loading(layer)
    model.quant_config = quant_config
    return model


def layer_of_023():
    """Return the function that makes a layer in release 0.23. The layer chooses experts without an NPU's operator."""
    import vllm_ascend.ops.fused_moe.experts_selector as selector
    from vllm_ascend.ops.fused_moe.fused_moe import AscendFusedMoE

    selector.check_npu_moe_gating_top_k = lambda **_: False
    return AscendFusedMoE


def layer_of_030():
    """Return the function that makes a layer in release 0.30, as ``layer_of_023``."""
    import vllm_ascend
    from vllm_ascend.ops.fused_moe.fused_moe import AscendMoERunner
    from vllm_ascend.ops.fused_moe.routed_experts import AscendRoutedExperts
    from vllm_ascend.ops.fused_moe.router import router_factory

    for name in ("patch", "patch.platform"):
        package = types.ModuleType(f"vllm_ascend.{name}")
        package.__path__ = [f"{vllm_ascend.__path__[0]}/{name.replace('.', '/')}"]
        sys.modules[package.__name__] = package
    from vllm_ascend.patch.platform.patch_fused_moe import _ascend_FusedMoE

    router_factory.check_npu_moe_gating_top_k = lambda **_: False
    return partial(_ascend_FusedMoE, runner_cls=AscendMoERunner, routed_experts_cls=AscendRoutedExperts)


def experts_layers(model):
    """Return the modules that hold experts, which are parts of the layers in release 0.30."""
    return [getattr(layer, "routed_experts", layer) for layer in model.layers]


def start_balancer(config, model):
    """Create and call the EPLB parts of ``NPUModelRunner.__init__`` and ``eplb_warmup``, under the adapter's names."""
    from vllm.config import set_current_vllm_config
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.eplb.adaptor.vllm_adaptor import VllmEplbAdaptor
    from vllm_ascend.eplb.core.eplb_device_transfer_loader import D2DExpertWeightLoader
    from vllm_ascend.eplb.core.eplb_worker import EplbProcess
    from vllm_ascend.eplb.eplb_updator import EplbUpdator

    from worker_agent.adapters.vllm_ascend import hooks

    runner = types.ModuleType("vllm_ascend.worker.model_runner_v1")
    runner.Manager = multiprocessing.Manager
    runner.EplbProcess = EplbProcess
    runner.EplbUpdator = EplbUpdator
    runner.VllmEplbAdaptor = VllmEplbAdaptor
    hooks._replace_balancer(runner)
    hooks._count_sources()
    with set_current_vllm_config(config):
        loader = D2DExpertWeightLoader()
        manager = runner.Manager()
        shared = manager.dict({"expert_map": None, "moe_load": None, "expert_maps": None})
        process = runner.EplbProcess(shared_dict=shared, policy_type=1, enable_d2d=True, tp_size=RANKS)
        updator = runner.EplbUpdator(
            get_ascend_config().eplb_config, loader, process, process._launch_process()
        )
        adaptor = runner.VllmEplbAdaptor(model=model)
        loader.set_adator(adaptor)
        updator.set_adaptor(adaptor)
        updator.warm_up_eplb()
    return updator


def forward(config, model, options, hidden_TH, logits_LTE):
    """Run one forward pass of all layers, set up as in the runner. Return the largest difference from ``dense``."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import get_forward_context, set_forward_context
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX, MoECommType
    from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

    worst = 0.0
    comm = options["comm"]
    multiply = product_w8a8 if options["quant"] == "W8A8" else product
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=TOKENS):
        facts = {
            "moe_comm_type": MoECommType[comm],
            "moe_comm_method": get_moe_comm_method(MoECommType[comm]),
            "in_profile_run": False,
            "flash_comm_v1_enabled": False,
            "eplb_heat_collection_status": True,
            "mc2_mask": torch.ones(TOKENS, dtype=torch.bool),
            "padded_num_tokens": TOKENS,
            "num_tokens": TOKENS,
            "pad_size": 0,
            "max_tokens_across_dp": TOKENS,
        }
        for name, value in facts.items():
            try:
                setattr(_EXTRA_CTX, name, value)
            except AttributeError:
                setattr(get_forward_context(), name, value)
        for index, layer in enumerate(experts_layers(model)):
            out_TH = layer.forward_impl(
                hidden_states=hidden_TH.clone(), router_logits=logits_LTE[index].clone()
            )
            if comm == "ALLGATHER":
                # The runner does this for the whole layer, including shared experts.
                dist.all_reduce(out_TH)
            expected_TH = dense(index, hidden_TH, logits_LTE[index], multiply)
            worst = max(worst, float((out_TH - expected_TH).abs().max()))
    return worst
