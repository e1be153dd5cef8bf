"""The per-step split in SGLang, with stand-ins: hooks, padding, equal outputs, commits and refused configurations."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from tests.adapters import sglang_fakes as fakes
from tests.adapters.sglang_fakes import put_modules
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.adapters import engine_host
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import step_split
from worker_agent.adapters.sglang.host import SglangHost
from worker_agent.adapters.sglang.options import SglangOptions
from worker_agent.policy import sglang as policy
from worker_agent.step_split import choose_split

LAYERS = range(fakes.DENSE_LAYERS, fakes.DENSE_LAYERS + fakes.MOE_LAYERS)
IDS_TK = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3], [0, 1], [4, 5], [1, 0], [0, 2]] * 3)
REAL = 20
NEW_RS = np.array([[1, 0, 2, 3], [0, 1, 4, 5]])


class HookRegistry:
    """Fake of SGLang's registry. ``apply_hooks`` wraps functions of modules and methods as SGLang does."""

    _patched = frozenset()
    _hooks = ()

    @classmethod
    def register(cls, target, hook, kind):
        cls._hooks.append((target, hook, kind))

    @classmethod
    def apply_hooks(cls):
        for target, hook, kind in cls._hooks:
            path, _, name = target.rpartition(".")
            module, _, owner = path.rpartition(".")
            holder = sys.modules[path] if path in sys.modules else getattr(sys.modules[module], owner)
            original = getattr(holder, name)

            def wrapped(*arguments, _hook=hook, _original=original, _kind=kind, **keywords):
                if _kind == "around":
                    return _hook(_original, *arguments, **keywords)
                result = _original(*arguments, **keywords)
                _hook(result, *arguments, **keywords)
                return result

            setattr(holder, name, wrapped)
            cls._patched.add(target)


def put_sglang(patch, rank, dispatch="dynamic", **exec_moe):
    """Install fake SGLang modules. Return SGLang's metadata and its two functions that call the mapping."""
    metadata = fakes.Metadata(rank, dispatch)

    class ExpertLocationMetadata:
        def update(self, other, update_layer_ids):
            for layer in update_layer_ids:
                self.physical_to_logical_map_cpu[layer] = other[layer]

    metadata.__class__ = type("Metadata", (ExpertLocationMetadata, fakes.Metadata), {})

    def _topk_ids_logical_to_physical_static(topk_ids, info):
        return metadata.to_physical(info.layer, topk_ids)

    def _topk_ids_logical_to_physical_dynamic(topk_ids, info):
        return metadata.to_physical(info.layer, topk_ids)

    def _post_process_topk_ids(
        topk_ids, layer_id, num_token_non_padded=None, expert_location_dispatch_info=None
    ):
        module = sys.modules["sglang.srt.eplb.expert_location_dispatch"]
        mapped = getattr(module, f"_topk_ids_logical_to_physical_{dispatch}")(
            topk_ids, expert_location_dispatch_info
        )
        if num_token_non_padded is not None:
            mapped[int(num_token_non_padded) :] = -1
        return mapped

    moe = SimpleNamespace(
        **{"ep_dispatch_algorithm": dispatch, "moe_a2a_backend": "none", "elastic_ep_backend": None}
        | exec_moe
    )
    HookRegistry._hooks, HookRegistry._patched = [], set()
    modules = {
        "sglang": {},
        "sglang.version": {"__version__": "0.5.23"},
        "sglang.srt.eplb": {},
        "sglang.srt.eplb.expert_location_dispatch": {
            "_topk_ids_logical_to_physical_static": _topk_ids_logical_to_physical_static,
            "_topk_ids_logical_to_physical_dynamic": _topk_ids_logical_to_physical_dynamic,
        },
        "sglang.srt.layers.moe": {},
        "sglang.srt.layers.moe.topk": {"_post_process_topk_ids": _post_process_topk_ids},
        "sglang.srt.layers.moe.utils": {"is_moe_input_scattered_across_dp_ranks": lambda: False},
        "sglang.srt.eplb.expert_location": {
            "ExpertLocationMetadata": ExpertLocationMetadata,
            "get_global_expert_location_metadata": lambda: metadata,
        },
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": HookRegistry,
            "HookType": SimpleNamespace(AROUND="around", AFTER="after", BEFORE="before"),
        },
        "sglang.srt.runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=moe),
            "get_parallel": lambda: SimpleNamespace(
                attn_dp_size=1, tp_group=SimpleNamespace(cpu_group=dist.group.WORLD)
            ),
        },
    }
    put_modules(patch, modules)
    for package, module in (("eplb", "expert_location_dispatch"), ("layers.moe", "topk")):
        setattr(sys.modules[f"sglang.srt.{package}"], module, sys.modules[f"sglang.srt.{package}.{module}"])
    return metadata


def route(metadata, layer, ids_TK, real=None):
    """Route choices in a layer as SGLang does, and return physical experts, -1 for padding."""
    info = SimpleNamespace(
        layer=layer, partial_logical_to_all_physical_map=metadata.logical_to_all_physical_map[layer, :]
    )
    process = sys.modules["sglang.srt.layers.moe.topk"]._post_process_topk_ids
    count = None if real is None else torch.tensor(real, dtype=torch.int32)
    return process(ids_TK, layer, num_token_non_padded=count, expert_location_dispatch_info=info)


def output(metadata, layer, physical_TK, rank, counted=REAL):
    """Return the sum over ranks of a toy layer whose experts multiply by their number, and the load of each rank."""
    placed_P = metadata.physical_to_logical_map_cpu[layer]
    own_TK = (physical_TK >= 0) & (physical_TK // fakes.SLOTS == rank)
    out_T = ((placed_P[physical_TK.clamp(min=0)] + 1.0) * own_TK).sum(dim=1)
    dist.all_reduce(out_T)
    load_R = torch.bincount(physical_TK[:counted].reshape(-1) // fakes.SLOTS, minlength=fakes.RANKS)
    return out_T.tolist(), load_R.tolist()


def policy_run(dispatch):
    """Return a rank's outputs, loads and agreed split in policy mode, before and after a commit."""
    rank = dist.get_rank()
    os.environ["EPLB_AGENT_STEP_SPLIT"] = "on"
    splits = []
    policy.Agreement = lambda group, split, remote: (
        splits.append(split) or SimpleNamespace(wait_until_warm=int)
    )
    with pytest.MonkeyPatch.context() as patch:
        metadata = put_sglang(patch, rank, dispatch)
        step_split.register_hooks("on")
        HookRegistry.register(policy._UPDATE, policy._install, "after")
        HookRegistry.apply_hooks()
        HookRegistry._patched.add(policy._ALGORITHM)
        policy._join()
        results = []
        for commit in (False, True):
            if commit:
                new = {layer: torch.from_numpy(NEW_RS.reshape(-1)) for layer in LAYERS}
                metadata.update(new, update_layer_ids=list(LAYERS))
            for layer in LAYERS:
                garbage_TK = IDS_TK.clone()
                garbage_TK[REAL:] = 5 - 5 * rank  # ranks need not agree on padding
                physical_TK = route(metadata, layer, garbage_TK, REAL)
                results.append(output(metadata, layer, physical_TK, rank))
    return results, splits


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
def test_policy_mode_splits_real_rows_and_installs_commits(dispatch):
    dense_T = (IDS_TK[:REAL] + 1.0).sum(dim=1).tolist()
    for results, splits in run_ranks(fakes.RANKS, policy_run, dispatch):
        assert splits == ["step"]
        assert len(results) == 4
        for out_T, load_R in results:
            assert out_T[:REAL] == dense_T
            assert sum(load_R) == 2 * REAL
            assert max(load_R) <= REAL + 1


def full_run():
    """Return a rank's loads in full mode, before and after a switch."""
    rank = dist.get_rank()
    os.environ["EPLB_AGENT_STEP_SPLIT"] = "on"
    engine_host.AgentSettings = live.settings
    with pytest.MonkeyPatch.context() as patch:
        metadata = put_sglang(patch, rank)
        step_split.register_hooks("on")
        HookRegistry.apply_hooks()
        host = SglangHost(fakes.runner(rank), SglangOptions("dynamic", "none", True, "stat", 2, 2, 1, 1))
        host.start(metadata, fakes.Recorder(), rank, dist.group.WORLD)
        results = [output(metadata, layer, route(metadata, layer, IDS_TK), rank, 24) for layer in LAYERS]
        target = Placement(np.stack([NEW_RS.astype(np.int32)] * fakes.MOE_LAYERS), fakes.EXPERTS)
        host.agent.restore(target)
        host.agent.resume()
        placed = metadata.physical_to_logical_map_cpu[LAYERS[0]].tolist()
        results += [output(metadata, layer, route(metadata, layer, IDS_TK), rank, 24) for layer in LAYERS]
        declared = host.agent.identity.shape.splits_by_step
        host.close()
    return declared, placed, results


def test_full_mode_installs_switches_and_declares_the_split():
    for declared, placed, results in run_ranks(fakes.RANKS, full_run):
        assert declared
        assert placed == NEW_RS.reshape(-1).tolist()
        for out_T, load_R in results:
            assert out_T == (IDS_TK + 1.0).sum(dim=1).tolist()
            assert max(load_R) <= IDS_TK.numel() / fakes.RANKS + 1


@pytest.mark.parametrize(
    ("moe", "attention", "message"),
    [
        ({}, 1, "on for all passes"),
        ({"ep_dispatch_algorithm": "lp"}, 1, "off; --ep-dispatch-algorithm lp"),
        ({"elastic_ep_backend": "mooncake"}, 1, "off; elastic"),
        ({"moe_a2a_backend": "deepep"}, 1, "off; ranks without tokens do not route"),
        ({}, 2, "off; with attention data parallelism"),
    ],
)
def test_the_configuration_determines_whether_passes_are_split(monkeypatch, moe, attention, message):
    put_sglang(monkeypatch, 0)
    context = sys.modules["sglang.srt.runtime_context"]
    vars(context.get_exec().moe).update(moe)
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_dp_size=attention))
    assert message in str(step_split.choose_for_engine("on", "cpu"))
    assert "off" in str(step_split.choose_for_engine("auto", "cpu"))


def test_nothing_is_hooked_unless_the_split_is_requested(monkeypatch):
    put_sglang(monkeypatch, 0)
    for setting in ("auto", "off"):
        step_split.register_hooks(setting)
    assert HookRegistry._hooks == []


def test_a_different_interface_is_refused(monkeypatch):
    put_sglang(monkeypatch, 0)
    dispatch = sys.modules["sglang.srt.eplb.expert_location_dispatch"]
    monkeypatch.setattr(dispatch, "_topk_ids_logical_to_physical_static", lambda topk_ids: topk_ids)
    with pytest.raises(UnsupportedEngineError, match="does not take info"):
        step_split.register_hooks("on")
    assert HookRegistry._hooks == []


def without_hooks():
    with pytest.MonkeyPatch.context() as patch:
        metadata = put_sglang(patch, dist.get_rank())
        step_split.register_hooks("on")
        choice = choose_split("on", sees_all=True, device_type="cpu")
        splits = step_split.start_splits(metadata, LAYERS, dist.group.WORLD, choice)
        same = route(metadata, 1, IDS_TK).tolist() == metadata.to_physical(1, IDS_TK).tolist()
        return splits, same


def test_sglang_keeps_its_mapping_if_it_did_not_apply_the_hooks():
    assert run_ranks(fakes.RANKS, without_hooks) == [([], True)] * fakes.RANKS
