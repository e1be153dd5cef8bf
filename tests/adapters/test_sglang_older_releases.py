"""SGLang 0.5.21 and 0.5.22: their options, and the refusal of anything that bypasses the expert tables."""

import linecache
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.adapters.sglang_fakes import put_modules
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import hooks
from worker_agent.adapters.sglang.older_releases import refuse_runner, refuse_unmapped_model
from worker_agent.adapters.sglang.options import SglangOptions

OLDER = ("0.5.21", "0.5.22")
MODELS = """
import torch

class TopK(torch.nn.Module):
    pass

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.topk = TopK()

class LookingBlock(Block):
    def forward_deepep(self, hidden):
        return self.topk(hidden, expert_location_dispatch_info=ExpertLocationDispatchInfo.init_new(layer_id=0))

class Inheriting(LookingBlock):
    def forward(self, hidden):
        return self.forward_deepep(hidden)

class LooksElsewhere(Block):
    def forward_deepep(self, hidden):
        return self.topk(hidden)

    def forward_mega_moe(self, hidden):
        return self.topk(hidden, expert_location_dispatch_info=ExpertLocationDispatchInfo.init_new(layer_id=0))
"""


def runner(device="cuda", *, speculative=False):
    return SimpleNamespace(
        device=device,
        is_draft_worker=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: not speculative),
    )


@pytest.mark.parametrize("release", [*OLDER, "0.5.23"])
@pytest.mark.parametrize(
    ("runner", "all_to_all", "reason"),
    [
        (runner(), "deepep", None),
        (runner(), "none", r"without an all-to-all backend\. In most models, .*--moe-a2a-backend deepep"),
        (runner("cpu"), "deepep", r"on cpu\. This release does not map chosen experts to slots"),
        (runner("npu"), "deepep", r"on npu\. This release does not map"),
        (
            runner(speculative=True),
            "deepep",
            r"speculative decoding with SGLang .*without --speculative-algorithm",
        ),
    ],
    ids=["cuda", "no all-to-all", "cpu", "npu", "speculative"],
)
def test_runners_that_bypass_the_tables_are_refused_in_older_releases(runner, all_to_all, reason, release):
    if reason is None or release == "0.5.23":
        refuse_runner(release, runner, all_to_all)
    else:
        with pytest.raises(UnsupportedEngineError, match=reason) as refusal:
            refuse_runner(release, runner, all_to_all)
        assert f"SGLang {release}" in str(refusal.value)
        assert "Install SGLang 0.5.23" in str(refusal.value)


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """Return an SGLang module with layers whose source can be read."""
    module = ModuleType("sglang.srt.models.toy")
    module.__file__ = str(tmp_path / "toy.py")
    (tmp_path / "toy.py").write_text(MODELS)
    exec(compile(MODELS, module.__file__, "exec"), module.__dict__)
    linecache.checkcache()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("release", [*OLDER, "0.5.23"])
@pytest.mark.parametrize(
    ("block", "fits"),
    [("Block", False), ("LookingBlock", True), ("Inheriting", True), ("LooksElsewhere", False)],
)
def test_models_that_do_not_look_up_expert_locations_are_refused_in_older_releases(
    block, fits, release, blocks
):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), getattr(blocks, block)())
    if fits or release == "0.5.23":
        refuse_unmapped_model(release, model)
    else:
        reason = rf"{block} \(1\) in SGLang {release}\. Its code passes no expert locations"
        with pytest.raises(UnsupportedEngineError, match=reason):
            refuse_unmapped_model(release, model)


def put_configuration(monkeypatch, release, parallel):
    """Install SGLang's configuration as a release publishes it."""
    moe = SimpleNamespace(
        enable_eplb=True,
        ep_dispatch_algorithm="dynamic",
        moe_a2a_backend="deepep",
        expert_distribution_recorder_mode="stat",
        elastic_ep_backend=None,
        kt_weight_path=None,
    )
    if release == "0.5.23":
        moe.enable_paged_experts = True
    offload = SimpleNamespace(cpu_offload_gb=0, offload_group_size=-1)
    sizes = {"tp_size": 4, "moe_ep_size": 4, "pp_size": 1, "attn_cp_size": 1, "dcp_size": 1}
    modules = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.version": {"__version__": release},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(_patched={*hooks.AROUND, *hooks.AFTER})
        },
        "sglang.srt.layers": {},
        "sglang.srt.layers.moe": {},
        "sglang.srt.layers.moe.utils": {"is_moe_input_scattered_across_dp_ranks": lambda: False},
        "sglang.srt.eplb": {},
        "sglang.srt.eplb.expert_distribution": {"megamoe_prefill_only_recorder_enabled": lambda: False},
        "sglang.srt.runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=moe, offload=offload),
            "get_parallel": lambda: SimpleNamespace(**sizes, **parallel),
            "get_disagg": lambda: SimpleNamespace(enable_pdmux=False),
            "get_lora": lambda: SimpleNamespace(enable_lora=False),
            "get_model": lambda: SimpleNamespace(
                is_startup_weight_load_overlap=False, weight_cache_mode="off"
            ),
        },
    }
    put_modules(monkeypatch, modules)


@pytest.mark.parametrize(
    ("release", "parallel", "replicas"),
    [
        ("0.5.21", {"dp_size": 2, "enable_dp_attention": True}, 1),
        ("0.5.21", {"dp_size": 2, "enable_dp_attention": False}, 2),
        ("0.5.22", {"dp_size": 2, "enable_dp_attention": True}, 2),
        ("0.5.22", {"dp_size": 1, "enable_dp_attention": True}, 1),
    ],
)
def test_attention_ranks_do_not_count_as_replicas(release, parallel, replicas, monkeypatch):
    put_configuration(monkeypatch, release, parallel)
    options = SglangOptions.of_this_process(release)
    assert (options.replicas, options.unsupported) == (replicas, ())


def test_paged_experts_are_refused_in_the_release_that_has_them(monkeypatch):
    put_configuration(monkeypatch, "0.5.23", {"dp_size": 1})
    options = SglangOptions.of_this_process("0.5.23")
    assert [name for name, _ in options.unsupported] == ["--enable-paged-experts"]


@pytest.mark.parametrize("version", ["0.5.21.post1", "0.5.22+cu13"])
def test_refusals_depend_on_the_installed_release(version, monkeypatch):
    put_configuration(monkeypatch, version, {"dp_size": 1, "enable_dp_attention": False})
    accepted = runner()
    hooks._make_host(pytest.fail, accepted)
    assert accepted.eplb_manager is not None
    with pytest.raises(UnsupportedEngineError, match=rf"SGLang {version[:6]} on cpu"):
        hooks._make_host(pytest.fail, runner("cpu"))
