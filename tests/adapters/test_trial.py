"""The expert trial: engines whose experts compute different outputs in different slots are rejected at startup."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.adapters import sglang_fakes, vllm_fakes
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import experts as sglang_experts
from worker_agent.adapters.trial import exchange_and_compare, move_and_back
from worker_agent.adapters.vllm import experts as vllm_experts

SLOTS = 5
HIDDEN = 8
FIRST = 10
HIDDEN_FACTORS: dict[int, torch.Tensor] = {}
"""Per-expert factors that the search cannot reach, by the id of the method that uses them."""


class Experts(torch.nn.Module):
    """Module that owns the weights of this rank's physical experts, which start at ``FIRST``."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(
            torch.randn(SLOTS, HIDDEN, HIDDEN).to(dtype), requires_grad=False
        )
        map_P = torch.full((2 * FIRST,), -1, dtype=torch.int32)
        map_P[FIRST : FIRST + SLOTS] = torch.arange(SLOTS)
        self.register_buffer("_expert_map", map_P)
        self.moe_config = SimpleNamespace(in_dtype=dtype)
        self.hidden_size = HIDDEN
        self.quant_method = Method()

    def live(self):
        """Return the agent's view of the layer."""
        tables = {"expert_map": torch.arange(SLOTS), "log2phy": torch.arange(SLOTS)}
        return SimpleNamespace(expert_weights=lambda: [self.w13_weight.data], **tables)


class Method:
    """Quantisation method whose experts are plain products, with an extra factor if ``HIDDEN_FACTORS`` has one."""

    def __init__(self):
        self.moe_kernel = None
        self.calls = 0
        self.noise = 0.0

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """Compute the experts' output and overwrite the input, as vLLM's method may do."""
        assert shared_experts is None
        assert shared_experts_input is None
        self.calls += 1
        local_TK = layer._expert_map[topk_ids.long()]
        assert (local_TK >= 0).all()
        output = torch.einsum(
            "th,tkhj,tk->tj", x, layer.w13_weight[local_TK.long()], topk_weights.to(x.dtype)
        )
        if id(self) in HIDDEN_FACTORS:
            output *= HIDDEN_FACTORS[id(self)][local_TK[:, 0].long()].to(x.dtype)
        x.zero_()
        return output + self.noise * torch.rand_like(output)


def run_trial(experts):
    compute = vllm_experts.local_experts(experts, SLOTS, torch.device("cpu"))
    before = experts.w13_weight.clone()
    try:
        return exchange_and_compare(experts.live(), compute, "MoE layer 3")
    finally:
        assert torch.equal(experts.w13_weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_whose_values_all_move_pass_the_trial(dtype):
    experts = Experts(dtype)
    assert run_trial(experts) is None
    assert experts.quant_method.calls == 3


@pytest.mark.parametrize("factors", [[1, 1.1, 1, 1, 1], [1, 2, 3, 4, 5]])
def test_a_hidden_factor_is_detected_in_the_outputs(factors):
    experts = Experts()
    HIDDEN_FACTORS[id(experts.quant_method)] = torch.tensor(factors)[:, None]
    with pytest.raises(
        UnsupportedEngineError, match=r"MoE layer 3, whose experts in slots .*1.* different outputs"
    ):
        run_trial(experts)


def test_a_hidden_copy_of_the_weights_is_detected_in_the_outputs():
    experts = Experts()
    weights = experts.w13_weight.clone()

    def apply(layer, x, topk_weights, topk_ids):
        return torch.einsum("th,thj->tj", x, weights[layer._expert_map[topk_ids[:, 0].long()].long()])

    experts.quant_method.apply = apply
    with pytest.raises(UnsupportedEngineError, match="different outputs"):
        run_trial(experts)


def test_a_nondeterministic_kernel_is_accepted():
    experts = Experts()
    experts.quant_method.noise = 1e-3
    run_trial(experts)


@pytest.mark.parametrize("fails", [1, 3])
def test_a_trial_whose_kernel_fails_returns_the_error_and_keeps_the_weights(fails):
    experts = Experts()
    original = experts.quant_method.apply

    def apply(*arguments, **options):
        if experts.quant_method.calls == fails - 1:
            raise RuntimeError("needs a forward context")
        return original(*arguments, **options)

    experts.quant_method.apply = lambda layer, x, topk_weights, topk_ids: apply(
        layer, x, topk_weights, topk_ids, None, None
    )
    assert run_trial(experts) == "RuntimeError: needs a forward context"


def test_dummy_weights_with_nans_are_accepted():
    experts = Experts()
    experts.w13_weight.data[1] = float("nan")
    calls_before = experts.quant_method.calls
    compute = vllm_experts.local_experts(experts, SLOTS, torch.device("cpu"))
    exchange_and_compare(experts.live(), compute, "MoE layer 3")
    assert experts.quant_method.calls == calls_before + 3


def test_empty_experts_are_rejected():
    layer = Experts().live()
    layer.expert_weights = lambda: [torch.empty(SLOTS, 0)]
    with pytest.raises(UnsupportedEngineError, match="empty"):
        move_and_back(layer)


def test_a_kernel_runs_without_the_exchange_between_ranks(monkeypatch):
    class Local:
        pass

    sglang_fakes.put_modules(monkeypatch, {vllm_experts._LOCAL: {vllm_experts._LOCAL_CLASS: Local}})
    experts = Experts()
    used = []
    exchange = SimpleNamespace(activation_format=SimpleNamespace(name="Standard"))
    kernel = SimpleNamespace(prepare_finalize=exchange)
    experts.quant_method.moe_kernel = SimpleNamespace(impl=kernel)
    original = experts.quant_method.apply

    def apply(layer, x, topk_weights, topk_ids):
        used.append(type(kernel.prepare_finalize))
        return original(layer, x, topk_weights, topk_ids, None, None)

    experts.quant_method.apply = apply
    run_trial(experts)
    assert used == [Local] * 3
    assert kernel.prepare_finalize is exchange
    exchange.activation_format.name = "BatchedExperts"
    assert vllm_experts.local_experts(experts, SLOTS, torch.device("cpu")) is None


def test_vllm_layers_are_tested_before_the_agents_start(monkeypatch):
    state = vllm_fakes.model_state(0)
    for index, layer in enumerate(state.model.moe_layers):
        experts = Experts()
        state.model.expert_weights[index] = [experts.w13_weight.data.view(SLOTS, -1)]
        layer.routed_experts = experts
    broken = state.model.moe_layers[1].routed_experts.quant_method
    HIDDEN_FACTORS[id(broken)] = torch.arange(1.0, SLOTS + 1)[:, None]
    physical = torch.arange(2 * SLOTS) % 6
    state.physical_to_logical_map = physical.repeat(vllm_fakes.LAYERS, 1)
    monkeypatch.setattr("worker_agent.adapters.engine_host.refuse_unlike_ranks", lambda *_: None)
    group = SimpleNamespace(rank_in_group=0, world_size=2, cpu_group=None)
    with pytest.raises(UnsupportedEngineError, match="MoE layer 1, whose experts"):
        vllm_fakes.VllmHost(state, vllm_fakes.config(data_parallel=2), group)


class StandardDispatcher:
    """Fake of SGLang's dispatcher, which forwards tokens with local slots."""


@pytest.mark.parametrize("keeps", [False, True])
def test_sglang_layers_pass_only_if_their_weights_move(keeps, monkeypatch):
    modules = {
        "token_dispatcher.standard": {"StandardDispatchOutput": lambda x, _, choice: (x, choice)},
        "topk": {"StandardTopKOutput": lambda weights, ids, _: (weights, ids)},
    }
    sglang_fakes.put_modules(
        monkeypatch, {f"sglang.srt.layers.moe.{name}": contents for name, contents in modules.items()}
    )
    experts = Experts()
    weights = experts.w13_weight.clone() if keeps else None
    experts.dispatcher = StandardDispatcher()
    experts.params_dtype = torch.float32

    def apply(layer, dispatch_output):
        x, (scores, ids) = dispatch_output
        weight = layer.w13_weight if weights is None else weights
        return SimpleNamespace(hidden_states=torch.einsum("th,thj->tj", x * scores, weight[ids[:, 0].long()]))

    experts.quant_method.apply = apply
    compute = sglang_experts.local_experts(experts, SLOTS, torch.device("cpu"))
    if keeps:
        with pytest.raises(UnsupportedEngineError, match="different outputs"):
            exchange_and_compare(experts.live(), compute, "MoE layer 0")
    else:
        exchange_and_compare(experts.live(), compute, "MoE layer 0")
    experts.dispatcher = object()
    assert sglang_experts.local_experts(experts, SLOTS, torch.device("cpu")) is None
