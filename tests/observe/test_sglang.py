"""Observe mode in SGLang, with fakes of its runner, hooks and expert locations."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.adapters.sglang_fakes import Mode, put_modules
from worker_agent.adapters import plugins
from worker_agent.observe import observer as observer_module
from worker_agent.observe import sglang as observing
from worker_agent.observe.observer import Ranks
from worker_agent.observe.sglang import SglangObservation

EXPERTS = 4
LAYER_IDS = (1, 2)
"""Layer 0 is dense."""
RANKS = 2
IDS = torch.tensor([[0, 1], [0, 1], [0, 2], [3, 3]])
SLOTS = [0, 1, 0, 2, 3, 1]
"""Placement with three slots per rank. Experts 0 and 1 have two replicas each."""


class Metadata:
    """Fake of ``ExpertLocationMetadata``."""

    num_logical_experts = EXPERTS

    def __init__(self, static):
        self.physical_to_logical_map_cpu = torch.tensor(SLOTS).repeat(3, 1)
        self.physical_to_logical_map = self.physical_to_logical_map_cpu.clone()
        table_E = torch.tensor([0, 5, 3, 4])
        self.logical_to_rank_dispatch_physical_map = table_E.repeat(3, 1) if static else None

    def update(self, slots_P, update_layer_ids):
        for layer in update_layer_ids:
            self.physical_to_logical_map_cpu[layer] = slots_P


class TopK(torch.nn.Module):
    def __init__(self, layer_id, output_format="STANDARD"):
        super().__init__()
        self.layer_id = layer_id
        self.topk_config = SimpleNamespace(
            top_k=2, num_shared_topk_slots=0, output_format=SimpleNamespace(name=output_format)
        )


class Engine:
    """A fake SGLang of two ranks, one of them in this process, with the hooks applied."""

    def __init__(
        self, monkeypatch, rank=0, scattered=False, static=False, model=None, metadata=True, **parallel
    ):
        registered = {}
        registry = SimpleNamespace(
            register=lambda target, hook, kind: registered.update({target: (hook, kind)})
        )
        values = {
            "tp_size": RANKS,
            "moe_ep_size": RANKS,
            "pp_size": 1,
            "dp_size": 1,
            "attn_dp_size": 1,
        } | parallel
        published = SimpleNamespace(tp_rank=rank, tp_group=SimpleNamespace(cpu_group=None), **values)
        self.metadata = Metadata(static) if metadata else None
        kinds = SimpleNamespace(AROUND="around", AFTER="after")
        put_modules(
            monkeypatch,
            {
                "sglang": {},
                "sglang.srt": {},
                "sglang.srt.plugins": {},
                "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
                "sglang.srt.runtime_context": {"get_parallel": lambda: published},
                "sglang.srt.eplb.expert_location": {
                    "get_global_expert_location_metadata": lambda: self.metadata
                },
                "sglang.srt.layers.moe.utils": {"is_moe_input_scattered_across_dp_ranks": lambda: scattered},
            },
        )
        groups = (0, 1) if scattered else (0, 0)
        monkeypatch.setattr(observing, "meet", lambda *_: (Ranks(rank, "the group", groups), [None] * RANKS))
        monkeypatch.setattr(observer_module, "_shared_store", dist.HashStore)
        monkeypatch.setattr(SglangObservation, "current", None)
        monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
        monkeypatch.setenv("EPLB_AGENT_DATA_HOST", "127.0.0.1")
        observing.install()
        self.hooks = {target.rpartition(".")[2]: hook for target, (hook, _) in registered.items()}
        self.kinds = {target.rpartition(".")[2]: kind for target, (_, kind) in registered.items()}
        model = model or torch.nn.ModuleList([TopK(layer_id) for layer_id in LAYER_IDS])
        self.runner = SimpleNamespace(model=model, is_draft_worker=False)
        self.hooks["initialize"](None, self.runner)

    @property
    def observation(self):
        return getattr(self.runner, "eplb_observation", None)

    def route(self, topk_ids, **named):
        """Route in all layers, as SGLang does, and return the physical ids of the last layer."""
        for layer in self.runner.model:
            result = self.hooks["_post_process_topk_ids"](
                lambda topk_ids, topk_weights, topk_config, layer_id, num_token_non_padded: topk_ids + 100,
                topk_ids=topk_ids,
                topk_weights=None,
                topk_config=layer.topk_config,
                layer_id=layer.layer_id,
                num_token_non_padded=named.get("real"),
            )
        return result

    def run(self, ids=IDS, mode="decode", tokens=4, within=lambda: None, **named):
        """Run one forward pass. ``within`` is called at its end, when SGLang's EPLB runs."""

        def forward(runner, forward_batch):
            if ids is not None:
                assert torch.equal(self.route(ids, **named), ids + 100)
            self.hooks["_forward_raw"](None, runner)
            within()
            return "output"

        batch = SimpleNamespace(forward_mode=Mode(mode), global_num_token_non_padded_cpu=tokens)
        assert self.hooks["forward"](forward, self.runner, batch) == "output"

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


def test_choices_are_counted_before_they_are_mapped(engine, caplog):
    started = engine()
    assert started.kinds == {
        "forward": "around",
        "_post_process_topk_ids": "around",
        "initialize": "after",
        "_forward_raw": "after",
        "update": "after",
    }
    started.run(real=torch.tensor(3))
    assert started.heat() == [[3, 2, 1, 0]] * 2
    assert "observes 2 MoE layers of 4 experts over 2 ranks of 3 slots in SGLang" in caplog.text
    # Expert 0 is twice on rank 0, so a different expert is reported for the second of these slots.
    reported = started.observation.observer.installed.placement
    assert reported.phy2log_LRS.tolist() == [[[0, 1, 2], [2, 3, 1]]] * 2


def test_a_rank_does_not_count_tokens_that_another_rank_counts(engine):
    started = engine(rank=1)
    started.run()
    assert started.heat() == [[0] * EXPERTS] * 2


def test_an_idle_rank_counts_the_pass_but_no_tokens(engine):
    started = engine(scattered=True)
    started.run()
    started.run(ids=None, mode="idle", tokens=0)
    assert started.heat() == [[0] * EXPERTS] * 2
    assert started.observation.observer._step == 2


def test_choices_of_fused_shared_experts_are_not_counted(engine):
    started = engine()
    for layer in started.runner.model:
        layer.topk_config.num_shared_topk_slots = 1
    started.run(ids=torch.tensor([[0, 3], [1, 3]]))
    assert started.heat() == [[1, 1, 0, 0]] * 2


def test_draft_model_layers_and_warm_ups_are_not_counted(engine):
    started = engine()
    started.route(IDS)
    layer = started.runner.model[0]
    layer.layer_id = 7
    started.run()
    assert started.heat() == [[0] * EXPERTS, [3, 2, 1, 2]]
    draft = SimpleNamespace(model=started.runner.model, is_draft_worker=True)
    started.hooks["initialize"](None, draft)
    assert not hasattr(draft, "eplb_observation")


def test_a_pass_before_sglangs_eplb_moves_experts_is_reported_under_the_old_placement(engine):
    started = engine()
    metadata = started.metadata

    def update():
        metadata.update(torch.tensor([0, 1, 2, 3, 0, 1]), [1])
        started.hooks["update"](None, metadata, None, [1])

    started.run(within=update)
    observer = started.observation.observer
    assert observer.installed.epoch == 0
    started.run()
    assert observer.installed.layer_epochs == (1, 0)
    assert observer.layout.phy2log_LRS[0].tolist() == [[0, 1, 2], [3, 0, 1]]
    started.hooks["update"](None, Metadata(static=False), None, [1])
    assert observer.layout is observer._layout


def test_a_ranks_own_table_is_reported_if_each_rank_uses_one_replica_per_expert(engine):
    assert (
        engine(scattered=True, static=True).observation.observer.installed.log2phy_LE.tolist()
        == [[0, 5, 3, 4]] * 2
    )
    assert engine(scattered=True).observation.observer.layout.table_LE is None


def test_without_expert_parallelism_the_imbalance_is_that_of_an_even_division(engine, caplog):
    started = engine(moe_ep_size=1)
    assert "Expert parallelism is off; the imbalance shown is that of" in caplog.text
    assert started.observation.observer.layout.phy2log_LRS.tolist() == [[[0, 1], [2, 3]]] * 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pp_size": 2}, "with pipeline parallelism"),
        ({"dp_size": 2}, "would need its own deployment"),
        ({"moe_ep_size": 2, "tp_size": 4}, "--ep-size 2 with --tp-size 4"),
        ({"metadata": False}, "how many experts a model of this class has"),
        ({"model": torch.nn.ModuleList([torch.nn.Linear(1, 1)])}, "chooses no experts in this model"),
        (
            {"model": torch.nn.ModuleList([TopK(1, "BYPASSED")])},
            "leaves routing to a kernel, where choices cannot be counted",
        ),
    ],
)
def test_an_engine_that_cannot_be_observed_keeps_serving_and_the_reason_is_logged(
    options, reason, engine, caplog
):
    started = engine(**options)
    (message,) = caplog.messages
    assert message.startswith("eplb-agent is NOT observing this engine, which keeps serving unchanged: ")
    assert reason in message
    started.run(ids=None)


def test_an_error_does_not_reach_the_engine(engine, caplog):
    started = engine()
    started.observation._counter = None
    started.run()
    started.run()
    assert sum("no longer observes" in message for message in caplog.messages) == 1


def test_nothing_is_counted_while_a_compiler_traces_the_hook(engine, monkeypatch):
    started = engine()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    started.run()
    assert started.heat() == [[0] * EXPERTS] * 2


def test_the_plugin_installs_observe_mode_without_a_service(monkeypatch):
    installed = []
    monkeypatch.setenv("EPLB_AGENT_MODE", "observe")
    monkeypatch.setattr(plugins, "_installed", set())
    monkeypatch.setattr(observing, "install", lambda: installed.append("observe"))
    plugins.register_sglang()
    assert installed == ["observe"]
