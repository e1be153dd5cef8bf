"""What SGLang's registry is given, and what each hook does around the call that it wraps."""

import sys
from types import SimpleNamespace

import pytest

from tests.adapters.sglang_fakes import put_modules
from worker_agent.adapters import compat, plugins
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import hooks
from worker_agent.adapters.sglang.host import SglangHost


class Registry:
    """``HookRegistry``; what it has applied is in ``_patched``."""

    def __init__(self):
        self.registered, self._patched = {}, set()

    def register(self, target, hook, hook_type):
        self.registered[target] = (hook, hook_type)


@pytest.fixture
def sglang(monkeypatch):
    """The modules that the hooks import, with EPLB on, and the registry."""
    registry = Registry()
    execution = SimpleNamespace(moe=SimpleNamespace(enable_eplb=True))
    kinds = SimpleNamespace(AROUND="around", AFTER="after")
    modules = {
        "sglang.version": {"__version__": "0.5.23"},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
        "sglang.srt.runtime_context": {"get_exec": lambda: execution},
    }
    put_modules(monkeypatch, {"sglang": {}, "sglang.srt": {}, "sglang.srt.plugins": {}, **modules})
    return SimpleNamespace(registry=registry, moe=execution.moe)


def test_every_hook_is_on_a_function_whose_body_is_known():
    (functions,) = hooks.KNOWN.values()
    assert set(hooks.PATCHES) <= set(functions)
    assert {target.replace(":", ".") for target in hooks.PATCHES} == {*hooks.AROUND, *hooks.AFTER}


def test_all_hooks_are_registered_once_the_release_is_known(monkeypatch, sglang):
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(compat, "mismatches", lambda *_: [])
    plugins.register_sglang()
    assert set(sglang.registry.registered) == {*hooks.AROUND, *hooks.AFTER}


def test_an_unknown_release_ends_the_engine_for_sglang_would_only_log_an_error(monkeypatch, sglang):
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.6.1")
    with pytest.raises(SystemExit, match=r"SGLang 0\.6\.1.*0\.5\.23"):
        plugins.register_sglang()
    assert sglang.registry.registered == {}


@pytest.mark.parametrize(("enabled", "draft"), [(False, False), (True, True)])
def test_sglang_keeps_what_is_not_to_be_balanced(sglang, enabled, draft):
    sglang.moe.enable_eplb = enabled
    asked = []
    hooks._make_host(asked.append, SimpleNamespace(is_draft_worker=draft))
    assert len(asked) == 1


def test_a_hook_that_was_not_applied_ends_the_engine(sglang):
    sglang.registry._patched = {*hooks.AROUND}
    runner = SimpleNamespace(is_draft_worker=False)
    with pytest.raises(UnsupportedEngineError, match=r"ModelRunner\.forward"):
        hooks._make_host(pytest.fail, runner)
    assert not hasattr(runner, "eplb_manager")


class Host(SglangHost):
    """Records what a hook asks of it."""

    def __init__(self):
        self.asked, self._drained = [], False

    def start(self, *_):
        self.asked.append("start")

    def count_pass(self):
        self.asked.append("count")

    def step(self, forward_batch):
        self.asked.append(forward_batch)

    def drain(self, reason):
        self._drained = True
        self.asked.append("drain")

    def resume(self):
        self._drained = False
        self.asked.append("resume")


def runner_with(host):
    return SimpleNamespace(eplb_manager=host)


def test_a_pass_is_counted_where_it_runs_and_is_a_step():
    host = Host()
    for runner in (runner_with(host), runner_with(None)):
        hooks._count_pass("output", runner, "batch", None)
    assert host.asked == ["count"]
    host.asked.clear()
    hooks._step_host("output", runner_with(host), "batch", None)
    hooks._step_host("output", runner_with(None), "batch")
    assert host.asked == ["batch"]


def updater_of(host):
    return SimpleNamespace(get_model_runner=lambda: runner_with(host))


def test_loads_are_drained_each_or_all_of_a_session():
    host = Host()
    updater = updater_of(host)
    assert hooks._load_weights(lambda _, path: path, updater, "weights") == "weights"
    assert host.asked == ["drain", "resume"]
    host.asked.clear()
    hooks._begin_weight_update(lambda _: None, updater)
    hooks._load_weights(lambda _: None, updater)
    assert host._drained
    hooks._end_weight_update(lambda _: None, updater)
    assert host.asked == ["drain", "drain", "resume"]
    assert hooks._load_weights(lambda _: "loaded", updater_of(None)) == "loaded"


@pytest.mark.parametrize("hook", [hooks._load_weights, hooks._begin_weight_update, hooks._end_weight_update])
def test_a_load_that_fails_ends_in_balancing_as_before(hook):
    host = Host()
    host._drained = hook is hooks._end_weight_update
    with pytest.raises(ZeroDivisionError):
        hook(lambda _: 1 / 0, updater_of(host))
    assert host.asked[-1] == "resume"
    assert not host._drained


def test_an_engine_that_sleeps_is_balanced_again_when_all_its_memory_is_back():
    host = Host()
    manager = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner_with(host)), offload_tags=set())
    # One that is too busy to sleep is balanced on.
    with pytest.raises(ZeroDivisionError):
        hooks._release_memory(lambda _: 1 / 0, manager)
    assert host.asked == ["drain", "resume"]
    host.asked.clear()
    hooks._release_memory(lambda one: one.offload_tags.update({"weights", "kv_cache"}), manager)
    hooks._resume_memory(lambda one: one.offload_tags.remove("weights"), manager)
    assert host.asked == ["drain"]
    hooks._resume_memory(lambda one: one.offload_tags.clear(), manager)
    assert host.asked == ["drain", "resume"]
