"""The vLLM adapter on vLLM's objects alone: what it derives and patches, and what follows a switch."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from tests.adapters.sglang_fakes import put_modules
from tests.adapters.vllm_fakes import (
    EXPERTS,
    LAYERS,
    RANKS,
    SLOTS,
    config,
    layer,
    model_state,
    run_pass,
    started,
)
from tests.ranks import run_ranks
from worker_agent.adapters import engine_host, plugins
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.engine_host import HeatRings
from worker_agent.adapters.vllm import hooks
from worker_agent.adapters.vllm.host import VllmHost, _dispatch_of, _TokenGroup, token_group
from worker_agent.agent import RestoreError


def layer_of_023(**dispatch):
    """Release 0.23 keeps what later runners know in three objects."""
    known = layer(**dispatch)
    return SimpleNamespace(
        runner=SimpleNamespace(do_naive_dispatch_combine=known.do_naive_dispatch_combine),
        quant_method=SimpleNamespace(is_monolithic=known.is_monolithic),
        moe_config=known.moe_config,
    )


ALONE, PARALLEL, NAIVE = layer(), layer(sequence_parallel=True), layer(naive=True)


@pytest.mark.parametrize(
    ("one", "data_parallel", "rank", "group"),
    [
        (ALONE, 1, 3, _TokenGroup(0, 0)),  # tensor parallel alone
        (ALONE, 2, 1, _TokenGroup(0, 0)),  # 2 x 2: ranks 0, 1 and 2, 3 share
        (ALONE, 2, 3, _TokenGroup(2, 2)),
        (ALONE, 4, 3, _TokenGroup(None, 3)),  # data parallel alone
        (PARALLEL, 2, 3, _TokenGroup(None, 3)),
        (NAIVE, 4, 3, _TokenGroup(0, 0)),  # all tokens are gathered before routing
    ],
)
def test_ranks_that_share_tokens_are_found(one, data_parallel, rank, group):
    assert token_group([one], config(data_parallel), rank, 4) == group


@pytest.mark.parametrize(
    ("layers", "parallel", "said"),
    [
        ([ALONE], config(prefill_context=2), "prefill context"),
        ([ALONE, NAIVE], config(2), "dispatch differently"),
        ([layer(monolithic=True)], config(), "monolithic kernel"),
        ([SimpleNamespace()], config(), "of the class SimpleNamespace.*Choose another MoE backend"),
    ],
)
def test_what_cannot_be_derived_is_refused(layers, parallel, said):
    with pytest.raises(UnsupportedEngineError, match=f"{said}.*unset EPLB_AGENT_SERVICE"):
        token_group(layers, parallel, 0, 4)


@pytest.mark.parametrize("make", [layer, layer_of_023])
@pytest.mark.parametrize("fact", [None, "naive", "sequence_parallel", "monolithic"])
def test_a_layer_s_way_of_dispatching_is_read_wherever_its_release_keeps_it(make, fact):
    flags = {one: one == fact for one in ("naive", "sequence_parallel", "monolithic")}
    assert _dispatch_of(make(**flags)) == tuple(flags.values())


def run(rings, layers=2):
    for index in range(layers):
        rings.layer_runs(index, layers)


@pytest.mark.parametrize("known", [True, False], ids=["on the host", "as on a device"])
def test_heat_of_a_pass_lands_in_its_row_by_logical_expert(known):
    rings = HeatRings(2, torch.device("cpu"), experts=3, rows=2)
    rings._known = known
    phy2log_LP = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
    chosen_LP = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    for chosen in (None, chosen_LP):
        run(rings)
        rings.record(None, chosen, phy2log_LP)
    assert rings.sources_LWE[:, 0].sum() == 0
    assert rings.sources_LWE[:, 1].tolist() == [[5, 2, 3], [7, 14, 5]]
    for chosen in (chosen_LP, None):
        run(rings)
        rings.record(None, chosen, phy2log_LP)
    assert rings.sources_LWE[:, 0].tolist() == [[5, 2, 3], [7, 14, 5]]
    assert rings.sources_LWE[:, 1].sum() == 0
    # A pass without a call leaves its row, and the next one has a row of its own.
    for _ in range(2):
        run(rings)
    rings.record(None, chosen_LP, phy2log_LP)
    assert rings.sources_LWE[:, 0].tolist() == [[5, 2, 3], [7, 14, 5]]
    assert rings.sources_LWE[:, 1].tolist() == [[5, 2, 3], [7, 14, 5]]


def test_a_pass_counts_once_however_it_is_cut_into_parts_and_not_where_it_fails_half_way():
    rings = HeatRings(3, torch.device("cpu"), experts=3)
    whole, in_parts, failed = [0, 1, 2], [0, 0, 1, 1, 2, 2], [0, 1]
    for passes, layers in enumerate((whole, in_parts), start=1):
        for index in layers:
            rings.layer_runs(index, 3)
        assert int(rings.passes) == passes
    for index in failed:
        rings.layer_runs(index, 3)
    assert int(rings.passes) == 2
    run(rings, 3)
    assert int(rings.passes) == 3


@pytest.mark.parametrize("package", ["vllm", "vllm_ascend", "sglang"])
def test_without_a_service_no_plugin_touches_anything(package, monkeypatch):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    monkeypatch.setattr(plugins, "_installed", set())
    getattr(plugins, f"register_{package}")()
    assert not plugins._installed


VLLM = {"__version__": "0.32.0", "envs": SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False)}


def modules(monkeypatch, vllm=VLLM, **named):
    """``vllm``, and other modules by their full names, with what is in each."""
    put_modules(monkeypatch, {"vllm": vllm, **named})


@pytest.mark.parametrize(
    ("release", "second_runner", "settings", "lora", "reason"),
    [
        ("0.23.0", True, {}, None, "second model runner of vLLM 0.23"),
        ("0.32.0", False, {"enable_elastic_ep": True}, None, "elastic expert parallelism"),
        ("0.32.0", False, {"pipeline_parallel_size": 2}, None, "--pipeline-parallel-size 2.*its own"),
        ("0.32.0", False, {}, "some", "LoRA .*stay behind"),
        ("0.23.0", False, {}, None, None),
        ("0.32.0", True, {}, None, None),
    ],
)
def test_what_no_model_can_be_balanced_with_is_refused(
    release, second_runner, settings, lora, reason, monkeypatch
):
    envs = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=second_runner)
    modules(monkeypatch, vllm={"__version__": release, "envs": envs})
    refused = nullcontext() if reason is None else pytest.raises(UnsupportedEngineError, match=reason)
    with refused:
        hooks.refuse_settings(vllm_config(lora, **settings))


@dataclass
class EplbConfig:
    num_redundant_experts: int = 0
    step_interval: int = 3000
    log_balancedness: bool = False
    communicator: str | None = None


def parallel_config(**settings):
    defaults = {"enable_eplb": True, "pipeline_parallel_size": 1, "eplb_config": EplbConfig()}
    return SimpleNamespace(**defaults | settings)


def vllm_config(lora=None, **settings):
    return SimpleNamespace(parallel_config=parallel_config(**settings), lora_config=lora)


class GptOssForCausalLM:
    """A model of which vLLM has no EPLB."""


@pytest.fixture
def load(monkeypatch):
    """Loads a model in a watched worker: with a host of the agent, or none as the class has no EPLB."""

    class Worker:
        rank = 0

        def load_model(self, *, load_dummy_weights=False):
            self.model_runner = SimpleNamespace(
                get_model=GptOssForCausalLM, eplb_state=SimpleNamespace(eplb_agent_host=self.host)
            )
            return "loaded"

    modules(monkeypatch, **{"vllm.v1.worker.gpu_worker": {"Worker": Worker}})
    hooks._watch_loading()

    def loaded(host, **settings):
        worker = Worker()
        worker.host, worker.vllm_config = host, vllm_config(**settings)
        assert worker.load_model(load_dummy_weights=True) == "loaded"

    return loaded


def test_a_model_that_vllm_cannot_balance_is_named_in_the_log(load, caplog):
    load(None)
    (said,) = caplog.messages
    assert said.startswith("GptOssForCausalLM is NOT balanced")
    caplog.clear()
    load(None, enable_eplb=False)
    load("a host")
    assert caplog.messages == []


def test_settings_that_the_agent_ignores_are_named_in_the_log(load, caplog):
    load("a host", eplb_config=EplbConfig(4, 50, True, "torch_gloo"))
    (said,) = caplog.messages
    assert said.endswith(": step_interval=50, log_balancedness=True")


def test_settings_are_refused_before_weights_are_loaded(load):
    with pytest.raises(UnsupportedEngineError, match="pipeline parallelism"):
        load("a host", pipeline_parallel_size=2)


def test_an_unknown_release_is_refused_and_left_as_it_is(monkeypatch):
    found = state_class()
    step = found.step
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(plugins, "_log_as", lambda _: None)
    eplb = {"EplbState": found}
    modules(monkeypatch, vllm={"__version__": "9.9.0"}, **{"vllm.distributed.eplb.eplb_state": eplb})
    with pytest.raises(UnsupportedEngineError, match=r"vLLM 9\.9\.0.*0\.32"):
        plugins.register_vllm()
    assert found.step is step


class Host:
    """Records what is asked of the agent's host."""

    def __init__(self, *_):
        self.asked = []

    def __getattr__(self, name):
        def ask(*arguments):
            self.asked.append((name, *arguments))

        return ask


def state_class():
    """As vLLM's ``EplbState``, whose own methods must not be reached but for ``add_model``."""

    class EplbState:
        def __init__(self):
            self.parallel_config = SimpleNamespace(enable_elastic_ep=False)
            self.model_states, self.is_async = {}, True
            self.should_record_tensor = torch.zeros((), dtype=torch.bool)

        def add_model(self, model, model_config, model_name=None):
            counts = torch.ones((2, 4), dtype=torch.int32)
            self.model_states[model_config.compute_hash()] = SimpleNamespace(
                expert_load_pass=counts, model=model
            )

        def step(self, *_, **__):
            raise AssertionError("vLLM's own balancer steps")

        rearrange = start_async_loop = step

    return EplbState


def model_config(runner):
    return SimpleNamespace(runner_type=runner, compute_hash=lambda: runner)


@pytest.fixture
def state(monkeypatch):
    """One that the agent has taken over, with a draft model added before the model itself, as vLLM does."""
    found = state_class()
    ranks = {"vllm.distributed.parallel_state": {"get_ep_group": lambda: "the ranks"}}
    modules(monkeypatch, **{"vllm.distributed.eplb.eplb_state": {"EplbState": found}}, **ranks)
    monkeypatch.setattr(hooks, "VllmHost", Host)
    hooks._replace_balancer()
    made = found()
    made.add_model("draft", model_config("draft"), model_name="draft")
    assert not hasattr(made, "eplb_agent_host")
    made.add_model("target", model_config("generate"))
    return made


def test_every_pass_is_a_step_but_those_of_profiling_and_counts_begin_again(state):
    # A draft model keeps its placement, the model is balanced.
    assert set(state.model_states) == {"draft", "generate"}
    assert state.is_async is False
    state.step(is_profile=True)
    state.step(is_dummy=True)
    state.step(log_stats=True)
    assert state.eplb_agent_host.asked == [("confirm_dispatch",), ("step", True), ("step", False)]
    assert all(not one.expert_load_pass.any() for one in state.model_states.values())
    assert bool(state.should_record_tensor)


def test_vllm_s_own_rearranging_is_off_and_nobody_may_ask_for_it(state):
    state.start_async_loop()
    with pytest.raises(RuntimeError, match="elastic expert parallelism is not supported"):
        state.rearrange()


CALLS = {
    "sleep": (["drain"], ["drain", "resume"]),
    "wake_up": (["resume"], []),
    "reload_weights": (["restore", "resume"], ["restore", "resume"]),
    "start_weight_update": (["restore"], ["restore", "resume"]),
    "update_weights": ([], ["resume"]),
    "finish_weight_update": (["resume"], ["resume"]),
}
"""Calls of vLLM's worker, and what is asked of the host around each: where it returns, and where it raises."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_under_way_while_an_engine_sleeps_or_loads_weights(call, fails, monkeypatch):
    host = Host()

    class Worker:
        model_runner = SimpleNamespace(eplb_state=SimpleNamespace(eplb_agent_host=host))

    def done(_self):
        host.asked.append(("vLLM",))
        if fails:
            raise OSError("no room")
        return "done"

    for name in CALLS:
        setattr(Worker, name, done)
    modules(monkeypatch, **{"vllm.v1.worker.gpu_worker": {"Worker": Worker}})
    monkeypatch.setattr(hooks, "VllmHost", Host)
    for name in ("restore", "resume"):
        monkeypatch.setattr(Host, name, lambda self, name=name: self.asked.append((name,)), raising=False)
    hooks._guard_weights()
    if fails:
        with pytest.raises(OSError, match="no room"):
            getattr(Worker(), call)()
    else:
        assert getattr(Worker(), call)() == "done"
    asked = [name for name, *_ in host.asked]
    assert [name for name in asked if name != "vLLM"] == CALLS[call][fails]
    before = {"drain", "restore"}
    assert set(asked[: asked.index("vLLM")]) <= before
    assert not before & set(asked[asked.index("vLLM") :])


def test_a_refusal_to_restore_ends_in_balancing_as_before():
    host = Host()

    def refuses():
        raise RestoreError("not now")

    host.restore = refuses
    worker = SimpleNamespace(model_runner=SimpleNamespace(eplb_state=SimpleNamespace(eplb_agent_host=host)))
    restoring = {"before": lambda host: host.restore(), "failed": lambda host: host.resume()}
    load = hooks._between(lambda _: pytest.fail("it loads"), **restoring)
    with pytest.raises(RestoreError):
        load(worker)
    assert host.asked == [("resume",)]
    assert hooks._between(lambda _: "loaded")(SimpleNamespace(model_runner=None)) == "loaded"


def consistent(state, rank):
    """Whether tables lead to slots that hold the expert, by vLLM's own map, and weights are that expert's."""
    for index in range(LAYERS):
        phy2log_P = state.physical_to_logical_map[index]
        if not torch.equal(phy2log_P[state.logical_to_physical_map[index, :, 0]], torch.arange(EXPERTS)):
            return False
        mine = phy2log_P[rank * SLOTS : (rank + 1) * SLOTS].float() + 100 * index
        if not torch.equal(state.model.expert_weights[index][0], mine[:, None].repeat(1, 8)):
            return False
    return True


def switched_and_restored():
    rank, records = dist.get_rank(), []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    engine_host.log.addHandler(handler)
    engine_host.log.setLevel(logging.INFO)
    os.environ["EPLB_AGENT_DEPLOYMNT"] = "decode"
    state, host = started()
    tensors = (state.physical_to_logical_map, state.logical_to_physical_map, state.model.expert_weights[0][0])
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = state.physical_to_logical_map.clone()
    found = {"counts": state.logical_replica_count.unique().tolist(), "at first": consistent(state, rank)}
    state.expert_load_pass[:, 3] = 5
    for _ in range(3):
        run_pass(state)
        host.step(is_dummy=False)
    other = Placement(host.agent.installed.placement.phy2log_LRS[:, :, ::-1].copy(), EXPERTS)
    host.agent.restore(other, "the test wants it so")
    host.resume()
    found["switched"] = not torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    run_pass(state)
    host.step(is_dummy=True)
    host.restore()
    found["restored"] = torch.equal(first, state.physical_to_logical_map) and consistent(state, rank)
    found["same tensors"] = addresses == [tensor.data_ptr() for tensor in tensors]
    # Expert 3 was chosen five times a pass; of ranks that share their tokens the first counts them, dummies count not.
    found["logged"] = records
    found["heat"] = host._heat.sources_LWE[0, :4, 3].tolist()
    host.close()
    return found


def test_vllm_s_tables_maps_and_weights_follow_a_switch():
    for rank, facts in enumerate(run_ranks(RANKS, switched_and_restored)):
        assert facts.pop("heat") == ([5, 5, 5, 0] if rank == 0 else [0] * 4)
        assert facts.pop("counts") == [1]
        logged = "\n".join(facts.pop("logged"))
        assert logged.count("EPLB_AGENT_DEPLOYMNT is no setting") == 1
        attached = "balances 2 MoE layers of 6 experts over 2 ranks of 4 slots; deployment default, service 127.0.0.1"
        assert (attached in logged) is (rank == 0)
        assert logged.count("first switch: layer") == (rank == 0)
        assert set(facts.values()) == {True}, (rank, facts)


@pytest.mark.parametrize("home", ["routed_experts", None], ids=["0.32", "0.23"])
@pytest.mark.parametrize(
    ("name", "shape", "refused"),
    [
        ("w13_lora_a_stacked", (SLOTS, 2), True),
        ("g1_alphas", (SLOTS,), True),
        ("w13_weight", (SLOTS, 8), False),
        ("w13_input_scale", (SLOTS,), False),
        ("w2_input_scale", (SLOTS,), True),
        ("workspace", (SLOTS + 1,), False),
        ("factor", (), False),
    ],
)
def test_what_would_stay_behind_when_its_expert_moves_is_refused(home, name, shape, refused):
    state = model_state(0)
    one, tensor = state.model.moe_layers[1], torch.zeros(shape)
    if name == "w2_input_scale":
        # One per expert, and not one for all.
        tensor[1] = 0.5
    if name == "w13_weight":
        state.model.expert_weights[1].append(tensor)
    if home is not None:
        one.routed_experts = torch.nn.Module()
        one = one.routed_experts
        one.register_buffer(name, tensor)
    else:
        setattr(one, name, tensor)
    # The ranks would meet next, which one alone cannot.
    said = pytest.raises(UnsupportedEngineError, match=name) if refused else pytest.raises(AttributeError)
    group = SimpleNamespace(rank_in_group=0, world_size=RANKS)
    with said:
        VllmHost(state, config(), group)


def test_experts_that_are_not_as_they_were_written_are_refused_at_the_start():
    memory = torch.arange((SLOTS + 1) * 8.0).view(-1, 8)
    tables = {"expert_map": torch.arange(SLOTS, dtype=torch.int32), "log2phy": torch.arange(SLOTS)}
    for weights, shared in (([memory[1:]], False), ([memory[1:], memory[:-1]], True)):
        layer = SimpleNamespace(expert_weights=lambda weights=weights: weights, **tables)
        before = memory.clone()
        with (
            pytest.raises(UnsupportedEngineError, match="tensor 0 of an expert") if shared else nullcontext()
        ):
            engine_host.move_and_back(layer)
        assert shared or torch.equal(memory, before)


def kernels_change():
    state, host = started()
    host.confirm_dispatch()
    for one in state.model.moe_layers:
        one.moe_config.is_sequence_parallel = True
    try:
        host.step(is_dummy=False)
    except UnsupportedEngineError as error:
        return str(error)
    finally:
        host.close()


def test_kernels_that_dispatch_otherwise_than_at_the_start_are_refused():
    for said in run_ranks(RANKS, kernels_change):
        assert "changed after the model was loaded" in said
