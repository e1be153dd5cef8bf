"""Observe mode in vLLM-Ascend, with fakes of its worker, communication methods and dynamic EPLB."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.adapters.sglang_fakes import put_modules
from tests.adapters.vllm_fakes import scheduled
from worker_agent.adapters import plugins
from worker_agent.observe import observer as observer_module
from worker_agent.observe import vllm_ascend as observing
from worker_agent.observe import worker as worker_module
from worker_agent.observe.observer import Ranks
from worker_agent.observe.vllm_ascend import AscendObservation

LAYERS = 2
EXPERTS = 4
RANKS = 2
IDS = torch.tensor([[0, 1], [0, 1], [0, 2], [3, 3]])
MASK = torch.tensor([True, True, True, False])
MAPS_RE = np.array([[0, 1, -1, 2], [2, -1, 0, 1]])
"""Slot of each expert on each rank: rank 0 holds experts 0, 1 and 3, rank 1 holds 2, 3 and 0."""
NEW_MAPS_RE = np.array([[0, 1, 2, -1], [2, -1, 0, 1]])


class Engine:
    """A fake vLLM-Ascend of two ranks, one of them in this process."""

    def __init__(
        self, monkeypatch, rank=0, eplb=False, parallel_experts=True, as_lists=False, maps_first=False
    ):
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.global_redundant_expert_num = 2 if eplb else 0
                self.global_num_experts = EXPERTS + self.global_redundant_expert_num
                self.global_expert_map = torch.tensor(MAPS_RE) if eplb else None
                self.log2phy = torch.tensor([5, 1, 3, 4]) if eplb else None
                local_E = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, 1]])[rank]
                self._expert_map = local_E if parallel_experts else None
                weight = torch.zeros(2)
                self.w1 = [weight, weight] if as_lists else weight

        class MoECommMethod:
            def fused_experts(self, fused_experts_input, quant_method=None):
                return "computed"

        class AllGatherCommImpl(MoECommMethod):
            pass

        class FusedMC2CommImpl(MoECommMethod):
            def fused_experts(self, fused_experts_input):
                return "fused"

        class D2DExpertWeightLoader:
            def __init__(self):
                self.layer_id = -1
                self.updated_log2phy_map = None
                self.waits = False

            def update_expert_map_and_weight(self, reqs):
                if not self.waits:
                    self.layer_id = -1

        class NPUWorker:
            def __init__(self):
                self.rank = rank
                parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
                self.vllm_config = SimpleNamespace(parallel_config=parallel)

            def load_model(self):
                self.model = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
                self.model_runner = SimpleNamespace(get_model=lambda: self.model, device="cpu")

            def compile_or_warm_up_model(self):
                self.forward()

            def execute_model(self, scheduler_output):
                return self.forward()

            def execute_dummy_batch(self):
                self.forward()

            def forward(self):
                for layer in self.model:
                    routing = SimpleNamespace(mc2_mask=MASK)
                    weights = SimpleNamespace(w1=layer.w1)
                    choices = SimpleNamespace(topk_ids=IDS, routing=routing, weights=weights)
                    if maps_first:  # as in release 0.30
                        choices.layer = layer
                        choices.weights.w1 = None
                        choices.topk_ids = IDS if layer.log2phy is None else layer.log2phy[IDS]
                    result = self.method.fused_experts(choices)
                return result

        self.methods = {"mc2": MoECommMethod, "gather": AllGatherCommImpl, "fused": FusedMC2CommImpl}
        group = SimpleNamespace(rank_in_group=rank, world_size=RANKS, cpu_group=None)
        methods = {method.__name__: method for method in self.methods.values()}
        loader = {"D2DExpertWeightLoader": D2DExpertWeightLoader}
        put_modules(
            monkeypatch,
            {
                "vllm_ascend": {},
                "vllm_ascend._version": {"__version__": "0.23.0"},
                "vllm_ascend.ops": {},
                "vllm_ascend.ops.fused_moe": {},
                "vllm_ascend.ops.fused_moe.moe_comm_method": methods,
                "vllm_ascend.eplb.core.eplb_device_transfer_loader": loader,
                "vllm_ascend.worker.worker": {"NPUWorker": NPUWorker},
                "vllm.distributed.parallel_state": {
                    "get_ep_group": lambda: group,
                    "get_dp_group": lambda: SimpleNamespace(world_size=1),
                },
            },
        )
        modules = sys.modules
        modules["vllm_ascend.ops.fused_moe"].moe_comm_method = modules[
            "vllm_ascend.ops.fused_moe.moe_comm_method"
        ]

        def meet(facts, *_):
            every = [[[0, 1]] * LAYERS, [[2, 3]] * LAYERS]
            assert facts is None or facts == every[rank]
            return Ranks(rank, "the group", (0, 1)), [None] * RANKS if facts is None else every

        monkeypatch.setattr(observing, "meet", meet)
        monkeypatch.setattr(observer_module, "_shared_store", dist.HashStore)
        monkeypatch.setattr(worker_module, "mismatches", lambda *_: [])
        monkeypatch.setattr(AscendObservation, "current", None)
        monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
        monkeypatch.setenv("EPLB_AGENT_DATA_HOST", "127.0.0.1")
        observing.install()
        self.loader = D2DExpertWeightLoader()
        self.worker = NPUWorker()
        self.worker.method = MoECommMethod()
        self.worker.load_model()

    @property
    def observation(self):
        return self.worker.eplb_observation

    def heat(self):
        rings = self.observation._counter.rings
        return rings.sources_LWE[:, (int(rings.passes) - 1) % rings.sources_LWE.shape[1]].tolist()


@pytest.fixture
def engine(monkeypatch, caplog):
    """Return a function that starts a fake engine, whose observation ends with the test."""
    caplog.set_level(logging.INFO, "eplb.agent")
    engines = []

    def start(**options):
        engines.append(Engine(monkeypatch, **options))
        return engines[-1]

    yield start
    for started in engines:
        if started.observation is not None:
            started.observation.observer.close(60)


@pytest.mark.parametrize("as_lists", [False, True])
@pytest.mark.parametrize(("method", "result"), [("mc2", "computed"), ("fused", "fused")])
def test_choices_are_counted_without_eplb(method, result, as_lists, engine, caplog):
    started = engine(as_lists=as_lists)
    started.worker.method = started.methods[method]()
    started.worker.compile_or_warm_up_model()
    assert started.worker.execute_model(scheduled([3])) == result
    assert started.heat() == [[3, 2, 1, 0]] * LAYERS
    assert started.observation.observer._step == 1
    assert "observes 2 MoE layers of 4 experts over 2 ranks of 2 slots in vLLM-Ascend" in caplog.text
    assert started.observation.observer.layout.phy2log_LRS.tolist() == [[[0, 1], [2, 3]]] * LAYERS


@pytest.mark.parametrize("eplb", [False, True])
def test_choices_that_the_layer_has_mapped_are_counted_by_logical_expert(eplb, engine):
    started = engine(eplb=eplb, maps_first=True)
    assert started.worker.execute_model(scheduled([3])) == "computed"
    assert started.heat() == [[3, 2, 1, 0]] * LAYERS


@pytest.mark.parametrize(("rank", "expected"), [(0, [3, 2, 1, 2]), (1, [0, 0, 0, 0])])
def test_tokens_that_every_rank_gathers_are_counted_once(rank, expected, engine):
    started = engine(rank=rank)
    started.worker.method = started.methods["gather"]()
    started.worker.execute_model(scheduled([4]))
    assert started.heat() == [expected] * LAYERS
    assert started.observation.observer._step == 1


def test_a_dummy_run_counts_the_pass_but_no_tokens(engine):
    started = engine()
    started.worker.execute_dummy_batch()
    assert started.heat() == [[0] * EXPERTS] * LAYERS
    assert started.observation.observer._step == 1


def test_layers_that_run_after_the_target_model_are_not_counted(engine):
    started = engine()
    started.worker.execute_model(scheduled([3]))
    draft = SimpleNamespace(w1=torch.zeros(1))
    choices = SimpleNamespace(topk_ids=IDS, weights=draft, routing=SimpleNamespace(mc2_mask=None))
    assert started.worker.method.fused_experts(choices) == "computed"
    started.worker.execute_model(scheduled([3]))
    assert started.heat() == [[3, 2, 1, 0]] * LAYERS


def test_placements_installed_by_dynamic_eplb_are_followed(engine, caplog):
    started = engine(eplb=True)
    assert "EPLB moves experts" in caplog.text
    started.worker.execute_model(scheduled([3]))
    observer = started.observation.observer
    assert observer.installed.placement.phy2log_LRS.tolist() == [[[0, 1, 3], [2, 3, 0]]] * LAYERS
    assert observer.installed.log2phy_LE.tolist() == [[5, 1, 3, 4]] * LAYERS
    maps_LRE = torch.tensor(np.stack([MAPS_RE, NEW_MAPS_RE]))
    started.worker.model_runner.eplb_updator = SimpleNamespace(shared_dict={"expert_maps": maps_LRE})
    loader = started.loader
    loader.layer_id = 1
    loader.updated_log2phy_map = torch.tensor([0, 1, 2, 4])
    loader.waits = True
    loader.update_expert_map_and_weight([])
    assert observer.layout is observer._layout
    loader.waits = False
    loader.update_expert_map_and_weight([])
    assert observer.installed.epoch == 0
    started.worker.execute_model(scheduled([3]))
    assert observer.installed.layer_epochs == (0, 1)
    assert observer.installed.placement.phy2log_LRS[1].tolist() == [[0, 1, 2], [2, 3, 0]]
    assert observer.installed.log2phy_LE[1].tolist() == [0, 1, 2, 4]


def test_without_expert_parallelism_the_imbalance_is_that_of_an_even_division(engine, caplog):
    started = engine(parallel_experts=False)
    assert "Expert parallelism is off; the imbalance shown is that of" in caplog.text
    assert started.observation.observer.layout.phy2log_LRS.tolist() == [[[0, 1], [2, 3]]] * LAYERS


def test_the_second_model_runner_is_not_observed(engine, caplog, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    started = engine()
    (message,) = caplog.messages
    assert "is NOT observing this engine" in message
    assert started.worker.execute_model(scheduled([3])) == "computed"


def test_a_dense_model_is_not_observed(engine, caplog, monkeypatch):
    monkeypatch.setattr(torch.nn.ModuleList, "modules", lambda _: iter(()))
    assert engine().observation is None
    assert "no MoE layers in this model" in caplog.text


def test_hooks_that_do_not_fit_are_not_added(monkeypatch, caplog):
    monkeypatch.setattr(observing, "hooks_fit", lambda *_: False)
    put_modules(monkeypatch, {"vllm_ascend": {}, "vllm_ascend._version": {"__version__": "9.0"}})
    observing.install()


def test_the_plugin_installs_observe_mode_without_a_service(monkeypatch):
    installed = []
    monkeypatch.setenv("EPLB_AGENT_MODE", "observe")
    monkeypatch.setattr(plugins, "_installed", set())
    monkeypatch.setattr(plugins, "_log_to", lambda _: None)
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda _: "found")
    monkeypatch.setattr(observing, "install", lambda: installed.append("observe"))
    plugins.register_vllm()
    plugins.register_vllm_ascend()
    assert installed == ["observe"]
