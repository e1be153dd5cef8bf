"""What the vLLM adapter derives from vLLM's own objects; real engines are in tests/engines."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.vllm import hooks, plugin
from worker_agent.adapters.vllm.dispatch import Dispatch, TokenGroup, dispatch_of, token_group
from worker_agent.adapters.vllm.layer import HeatRings
from worker_agent.agent import RestoreError


def layer(naive=False, sequence_parallel=False, monolithic=False):
    return SimpleNamespace(
        do_naive_dispatch_combine=naive,
        is_monolithic=monolithic,
        moe_config=SimpleNamespace(is_sequence_parallel=sequence_parallel),
    )


def layer_of_023(**dispatch):
    """Release 0.23 keeps what later runners know in three objects."""
    known = layer(**dispatch)
    return SimpleNamespace(
        runner=SimpleNamespace(do_naive_dispatch_combine=known.do_naive_dispatch_combine),
        quant_method=SimpleNamespace(is_monolithic=known.is_monolithic),
        moe_config=known.moe_config,
    )


def config(data_parallel=1, prefill_context=1):
    return SimpleNamespace(data_parallel_size=data_parallel, prefill_context_parallel_size=prefill_context)


@pytest.mark.parametrize(
    ("layers", "data_parallel", "rank", "group"),
    [
        ([layer()], 1, 3, TokenGroup(0, 0)),  # tensor parallel alone
        ([layer()], 2, 1, TokenGroup(0, 0)),  # 2 x 2: ranks 0, 1 and 2, 3 share
        ([layer()], 2, 3, TokenGroup(2, 2)),
        ([layer()], 4, 3, TokenGroup(None, 3)),  # data parallel alone
        ([layer(sequence_parallel=True)], 2, 3, TokenGroup(None, 3)),
        (
            [layer(naive=True)],
            4,
            3,
            TokenGroup(0, 0),
        ),  # all tokens are gathered before routing
    ],
)
def test_ranks_that_share_tokens_are_found(layers, data_parallel, rank, group):
    assert token_group(layers, config(data_parallel), rank, 4) == group


@pytest.mark.parametrize("make", [layer, layer_of_023])
@pytest.mark.parametrize("fact", ["naive", "sequence_parallel", "monolithic"])
def test_a_layer_s_way_of_dispatching_is_read_wherever_its_release_keeps_it(make, fact):
    nothing = Dispatch(naive=False, sequence_parallel=False, monolithic=False)
    assert dispatch_of(make()) == nothing
    assert dispatch_of(make(**{fact: True})) == replace(nothing, **{fact: True})


@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        ([layer()], config(prefill_context=2)),
        ([layer(), layer(naive=True)], config(2)),
        ([layer(monolithic=True)], config()),
    ],
)
def test_what_cannot_be_derived_is_refused(layers, parallel):
    with pytest.raises(UnsupportedEngineError, match="unset EPLB_AGENT_SERVICE"):
        token_group(layers, parallel, 0, 4)


def test_heat_of_a_pass_lands_in_its_row_by_logical_expert():
    rings = HeatRings(layers=2, experts=3, rows=2, device=torch.device("cpu"))
    phy2log_LP = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
    chosen_LP = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    rings.record(None, phy2log_LP)
    rings.record(chosen_LP, phy2log_LP)
    assert rings.sources_LWE[:, 0].sum() == 0
    assert rings.sources_LWE[:, 1].tolist() == [[5, 2, 3], [7, 14, 5]]
    rings.record(chosen_LP, phy2log_LP)
    rings.record(None, phy2log_LP)
    assert rings.sources_LWE[:, 0].tolist() == [[5, 2, 3], [7, 14, 5]]
    assert rings.sources_LWE[:, 1].sum() == 0
    assert int(rings.counter) == 4


def test_without_a_service_the_plugin_touches_nothing(monkeypatch):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    plugin.register()
    assert not plugin._installed


@pytest.mark.parametrize(
    ("release", "second_runner", "elastic", "reason"),
    [
        ("0.23.0", True, False, "second model runner of vLLM 0.23"),
        ("0.32.0", False, True, "elastic expert parallelism"),
        ("0.23.0", False, False, None),
        ("0.32.0", True, False, None),
    ],
)
def test_what_no_model_can_be_balanced_with_is_refused(release, second_runner, elastic, reason, monkeypatch):
    vllm = ModuleType("vllm")
    vllm.__version__, vllm.envs = release, SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=second_runner)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    parallel = SimpleNamespace(enable_elastic_ep=elastic)
    if reason is None:
        hooks._refuse(parallel)
        return
    with pytest.raises(UnsupportedEngineError, match=reason):
        hooks._refuse(parallel)


class Host:
    """Records what a worker's call asks of it."""

    def __init__(self, refuses=False):
        self.asked, self._refuses = [], refuses

    def restore(self):
        self.asked.append("restore")
        if self._refuses:
            raise RestoreError("not now")

    def resume(self):
        self.asked.append("resume")


def worker_with(host, loads=lambda: "loaded"):
    class Worker:
        model_runner = SimpleNamespace(eplb_state=SimpleNamespace(eplb_agent_host=host))
        reload_weights = hooks._between(
            lambda _self: loads(), before=Host.restore, after=Host.resume, failed=Host.resume
        )

    return Worker()


def fails():
    raise OSError("no such checkpoint")


def test_weights_are_loaded_between_restoring_and_resuming():
    host = Host()
    assert worker_with(host).reload_weights() == "loaded"
    assert host.asked == ["restore", "resume"]
    assert worker_with(None).reload_weights() == "loaded"


@pytest.mark.parametrize(("refuses", "loads", "error"), [(True, None, RestoreError), (False, fails, OSError)])
def test_weights_that_cannot_be_loaded_end_in_balancing_as_before(refuses, loads, error):
    host = Host(refuses)
    with pytest.raises(error):
        worker_with(host, loads).reload_weights()
    assert host.asked == ["restore", "resume"]
