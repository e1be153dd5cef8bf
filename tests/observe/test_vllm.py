"""Observe mode in vLLM, with fakes of its worker, routers and EPLB."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_service.io.open_trace import open_trace
from tests.adapters.vllm_fakes import layer as dispatch_flags
from tests.adapters.vllm_fakes import modules, scheduled
from worker_agent.adapters import plugins
from worker_agent.adapters.compat import Function
from worker_agent.adapters.vllm import step_split
from worker_agent.observe import observer as observer_module
from worker_agent.observe import vllm as observing
from worker_agent.observe import worker as worker_module
from worker_agent.observe.observer import Ranks

LAYERS = 2
EXPERTS = 4
IDS = torch.tensor([[0, 1], [0, 1], [0, 2], [3, 3]])
"""Choices of three tokens and one row of padding."""
HALVES = torch.tensor([0, 2, 1, 3])


class Engine:
    """A fake vLLM of two tensor-parallel ranks, one of them in this process.

    Parameters
    ----------
    monkeypatch
        Fixture that installs the fake modules.
    rank
        Rank of this process.
    eplb
        True if vLLM's EPLB is enabled.
    dispatch
        Dispatch flags of the layers.
    policy
        True if policy mode's step split patches vLLM before the observer does.
    parallel
        Changes to ``ParallelConfig``.
    """

    def __init__(
        self,
        monkeypatch,
        rank=0,
        eplb=False,
        dispatch=None,
        expert_map=True,
        ranks=2,
        policy=False,
        **parallel,
    ):
        self.seen = []
        engine = self

        class BaseRouter:
            global_num_experts = EXPERTS

            def _apply_eplb_mapping(self, topk_ids):
                return topk_ids + 100

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                flags = dispatch_flags(**dispatch or {})
                vars(self).update(vars(flags), router=BaseRouter(), is_monolithic=flags.is_monolithic)
                held = torch.arange(EXPERTS) // (EXPERTS // ranks) == rank
                local_E = torch.where(held, torch.arange(EXPERTS) % (EXPERTS // ranks), -1)
                self.routed_experts = SimpleNamespace(_expert_map=local_E if expert_map else None)

        class Worker:
            def __init__(self):
                self.rank = rank
                values = {"pipeline_parallel_size": 1, "data_parallel_size": 1, **parallel}
                self.vllm_config = SimpleNamespace(
                    parallel_config=SimpleNamespace(**values),
                    scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
                    compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
                )

            def load_model(self, *, load_dummy_weights=False):
                model = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
                state = None
                if eplb:
                    self.state = SimpleNamespace(
                        model=SimpleNamespace(moe_layers=list(model)),
                        logical_replica_count=torch.ones((LAYERS, EXPERTS)),
                        physical_to_logical_map=torch.arange(EXPERTS).repeat(LAYERS, 1),
                    )
                    state = SimpleNamespace(model_states={"hash": self.state})
                self.model_runner = SimpleNamespace(get_model=lambda: model, eplb_state=state, device="cpu")
                return "loaded"

            def compile_or_warm_up_model(self):
                return self.execute_model(scheduled([5]))

            def execute_model(self, scheduler_output):
                if scheduler_output.total_num_scheduled_tokens == 0:
                    return None
                return self.forward()

            def execute_dummy_batch(self):
                self.forward()

            def forward(self):
                for layer in self.model_runner.get_model():
                    assert torch.equal(layer.router._apply_eplb_mapping(IDS), IDS + 100)
                engine.seen.append("forward")
                return "output"

        def commit(model_state, new_physical_to_logical_map):
            model_state.physical_to_logical_map.copy_(new_physical_to_logical_map)

        def commit_layer(model_state, new_physical_to_logical_map, layer):
            model_state.physical_to_logical_map[layer].copy_(new_physical_to_logical_map)

        self.eplb_state = SimpleNamespace()
        group = SimpleNamespace(rank_in_group=rank, world_size=ranks, cpu_group=None)
        router_module = "vllm.model_executor.layers.fused_moe.router.base_router"
        eplb_module = {"_commit_eplb_maps": commit, "_commit_eplb_maps_for_layer": commit_layer}
        modules(
            monkeypatch,
            **{
                router_module: {"BaseRouter": BaseRouter},
                "vllm.distributed.parallel_state": {"get_ep_group": lambda: group},
                "vllm.distributed.eplb": {},
                "vllm.distributed.eplb.eplb_state": eplb_module,
                "vllm.v1.worker.gpu_worker": {"Worker": Worker},
            },
        )
        sys.modules["vllm.distributed.eplb"].eplb_state = sys.modules["vllm.distributed.eplb.eplb_state"]
        self.commits = sys.modules["vllm.distributed.eplb.eplb_state"]

        def meet(facts, token_group, _):
            groups = tuple(0 if token_group is not None else number for number in range(ranks))
            per_rank = EXPERTS // ranks
            slots = [[list(range(r * per_rank, (r + 1) * per_rank))] * LAYERS for r in range(ranks)]
            if ranks == 1:
                return Ranks.alone(), [facts]
            assert facts is None or facts == slots[rank]
            return Ranks(rank, "the group", groups), [None] * ranks if facts is None else slots

        monkeypatch.setattr(observing, "meet", meet)
        monkeypatch.setattr(observer_module, "_shared_store", dist.HashStore)
        monkeypatch.setattr(worker_module, "mismatches", lambda *_: [])
        monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
        monkeypatch.setenv("EPLB_AGENT_DATA_HOST", "127.0.0.1")
        self.splits = {}
        if policy:
            step_split.check_functions()
            step_split.patch_router()
            step_split.follow_commits(self.splits)
        observing.install()
        self.worker = Worker()
        assert self.worker.load_model(load_dummy_weights=True) == "loaded"

    @property
    def observation(self):
        return self.worker.eplb_observation

    def run(self, tokens=3, passes=1):
        for _ in range(passes):
            assert self.worker.execute_model(scheduled([tokens])) == "output"

    def heat(self):
        """Return the newest row of the heat rings, ``[L, E]``."""
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


def test_choices_are_counted_without_eplb_and_without_padding(engine, caplog):
    started = engine()
    started.run()
    assert started.heat() == [[3, 2, 1, 0]] * LAYERS
    assert "observes 2 MoE layers of 4 experts over 2 ranks of 2 slots in vLLM" in caplog.text
    layout = started.observation.observer.installed
    assert layout.placement.phy2log_LRS.tolist() == [[[0, 1], [2, 3]]] * LAYERS


def test_warm_up_batches_and_empty_batches_are_not_counted_as_passes(engine):
    started = engine()
    assert started.worker.compile_or_warm_up_model() == "output"
    assert started.worker.execute_model(scheduled([])) is None
    observer = started.observation.observer
    assert observer._step == 0
    started.run(passes=3)
    assert (observer._step, observer._heat.lost_steps) == (3, 0)


def test_a_rank_does_not_count_tokens_that_another_rank_counts(engine):
    started = engine(rank=1)
    started.run()
    assert started.heat() == [[0] * EXPERTS] * LAYERS
    assert started.observation.observer._step == 1


@pytest.mark.parametrize(
    ("dispatch", "expected"), [({}, [0, 0, 0, 0]), ({"naive": True}, [3, 2, 1, 2])], ids=["own", "gathered"]
)
def test_a_dummy_batch_counts_only_tokens_gathered_from_other_ranks(dispatch, expected, engine):
    started = engine(dispatch=dispatch, data_parallel_size=2)
    started.worker.execute_dummy_batch()
    assert started.heat() == [expected] * LAYERS
    assert started.observation.observer._step == 1


def test_without_expert_parallelism_the_imbalance_is_that_of_an_even_division(engine, caplog):
    started = engine(expert_map=False)
    assert "the imbalance shown is that of expert parallelism over 2 ranks" in caplog.text
    assert started.observation.observer.layout.phy2log_LRS.tolist() == [[[0, 1], [2, 3]]] * LAYERS


def test_one_rank_is_observed_although_it_cannot_be_imbalanced(engine, caplog):
    started = engine(ranks=1, expert_map=False)
    started.run()
    assert started.heat() == [[3, 2, 1, 0]] * LAYERS
    assert "With one rank, there is no imbalance" in caplog.text


def test_maps_committed_by_vllms_eplb_are_followed(engine, caplog):
    started = engine(eplb=True)
    assert "vLLM's EPLB moves experts" in caplog.text
    started.run()
    state = started.worker.state
    started.commits._commit_eplb_maps_for_layer(state, new_physical_to_logical_map=HALVES, layer=1)
    # The pass before the commit was served under the old map.
    observer = started.observation.observer
    assert observer.installed.epoch == 0
    started.run()
    assert observer.installed.layer_epochs == (0, 1)
    started.commits._commit_eplb_maps(state, new_physical_to_logical_map=HALVES.repeat(LAYERS, 1))
    started.run()
    assert observer.installed.layer_epochs == (2, 1)
    assert observer.installed.placement.phy2log_LRS.tolist() == [[[0, 2], [1, 3]]] * LAYERS
    assert torch.equal(state.physical_to_logical_map, HALVES.repeat(LAYERS, 1))
    # A draft model's state is not observed.
    draft = SimpleNamespace(physical_to_logical_map=HALVES.repeat(LAYERS, 1))
    started.commits._commit_eplb_maps(draft, new_physical_to_logical_map=HALVES.repeat(LAYERS, 1))
    assert observer.layout is observer._layout


def test_choices_are_counted_before_policy_modes_step_split_maps_them(engine):
    started = engine(eplb=True, policy=True)
    installed = []
    split = SimpleNamespace(
        applies=lambda rows: rows == len(IDS),
        map_and_record=lambda _, ids: ids + 100,
        install=lambda new_P: installed.append(new_P.tolist()),
    )
    for layer in started.worker.model_runner.get_model():
        layer.router.eplb_agent_split = split
        layer.router.eplb_state = "vLLM's state"
    started.splits[id(started.worker.state)] = [split] * LAYERS
    started.run()
    assert started.heat() == [[3, 2, 1, 0]] * LAYERS
    started.commits._commit_eplb_maps(started.worker.state, HALVES.repeat(LAYERS, 1))
    started.run()
    assert installed == [HALVES.tolist()] * LAYERS
    assert started.observation.observer.installed.layer_epochs == (1, 2)


def test_a_line_and_a_trace_are_written_without_a_service(engine, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("EPLB_AGENT_LOG_INTERVAL_STEPS", "16")
    monkeypatch.setenv("EPLB_AGENT_TRACE", str(tmp_path / "heat.npz"))
    started = engine()
    started.run(passes=20)
    started.observation.observer.close(60)
    assert "imbalance 1.667 (PAR) over 16 forward passes" in caplog.text
    assert np.array_equal(open_trace(tmp_path / "heat.npz").heat(0, 20), [[[3, 2, 1, 0]] * LAYERS] * 20)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "with pipeline parallelism, no rank sees all layers"),
        (
            {"dispatch": {"monolithic": True}},
            "a kernel routes the model's tokens.*choose another MoE backend",
        ),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
    ],
)
def test_an_engine_that_cannot_be_observed_keeps_serving_and_the_reason_is_logged(
    options, reason, engine, caplog
):
    started = engine(**options)
    (message,) = caplog.messages
    assert message.startswith("eplb-agent is NOT observing this engine, which keeps serving unchanged: ")
    assert re.search(reason, message)
    started.run()
    started.worker.execute_dummy_batch()
    assert started.seen == ["forward", "forward"]


def test_only_rank_0_logs_the_reason(engine, caplog):
    engine(rank=1, pipeline_parallel_size=2)
    assert caplog.messages == []


def test_a_model_without_routers_is_not_observed(engine, caplog, monkeypatch):
    monkeypatch.setattr(torch.nn.ModuleList, "modules", lambda _: iter(()))
    assert engine().observation is None
    assert "routers choose no experts in this model" in caplog.text


def test_an_error_while_counting_does_not_reach_the_engine(engine, caplog):
    started = engine()
    started.observation._counter = None
    started.run(passes=2)
    assert started.seen == ["forward", "forward"]
    assert sum("no longer observes" in message for message in caplog.messages) == 1


def test_an_error_at_the_start_does_not_reach_the_engine(engine, caplog, monkeypatch):
    monkeypatch.setattr(observing, "dispatch_of", lambda _: 1 / 0)
    engine().run()
    assert "could not start observing" in caplog.text
    assert caplog.messages[-1].endswith("which keeps serving unchanged: see the error above")


def test_hooks_that_do_not_fit_are_not_added(monkeypatch, caplog):
    functions = {target: Function(("self",), "") for target in observing.PATCHES}
    monkeypatch.setattr(observing, "read_known", lambda _: {"0.32": functions})
    modules(monkeypatch)
    observing.install()
    (message,) = caplog.messages
    assert "is NOT observing this engine" in message
    assert "BaseRouter._apply_eplb_mapping" in message


def test_the_plugin_installs_observe_mode_without_a_service(monkeypatch):
    installed = []
    monkeypatch.setenv("EPLB_AGENT_MODE", "observe")
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    monkeypatch.setattr(plugins, "_installed", set())
    monkeypatch.setattr(plugins, "_log_to", lambda _: None)
    monkeypatch.setattr(observing, "install", lambda: installed.append("observe"))
    plugins.register_vllm()
    plugins.register_vllm()
    assert installed == ["observe"]
