"""The hooks that the adapter registers with SGLang, and their effect before and after the calls that they wrap."""

import sys
from types import SimpleNamespace

import pytest

from tests.adapters.sglang_fakes import put_modules
from worker_agent.adapters import compat, plugins
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import hooks
from worker_agent.adapters.sglang.host import SglangHost


class Registry:
    """Fake of ``HookRegistry``; ``_patched`` holds the applied hooks."""

    def __init__(self):
        self.registered = {}
        self._patched = set()

    def register(self, target, hook, hook_type):
        self.registered[target] = (hook, hook_type)


@pytest.fixture
def sglang(monkeypatch):
    """Install the modules that the hooks import, with EPLB enabled; return the registry and the MoE settings."""
    registry = Registry()
    execution = SimpleNamespace(moe=SimpleNamespace(enable_eplb=True))
    kinds = SimpleNamespace(AROUND="around", AFTER="after")
    modules = {
        "sglang.version": {"__version__": "0.5.23"},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
        "sglang.srt.runtime_context": {"get_exec": lambda: execution},
    }
    monkeypatch.setattr(plugins, "_installed", set())
    put_modules(monkeypatch, {"sglang": {}, "sglang.srt": {}, "sglang.srt.plugins": {}, **modules})
    return SimpleNamespace(registry=registry, moe=execution.moe)


def test_every_hooked_function_has_a_known_body():
    for functions in hooks.KNOWN.values():
        assert set(hooks.PATCHES) <= set(functions)
    assert {target.replace(":", ".") for target in hooks.PATCHES} == {*hooks.AROUND, *hooks.AFTER}


def test_all_hooks_are_registered_for_a_known_release(monkeypatch, sglang):
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(compat, "mismatches", lambda *_: [])
    plugins.register_sglang()
    assert set(sglang.registry.registered) == {*hooks.AROUND, *hooks.AFTER}


def test_an_unknown_release_stops_the_engine(monkeypatch, sglang):
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.6.1")
    with pytest.raises(SystemExit, match=r"SGLang 0\.6\.1.*0\.5\.23"):
        plugins.register_sglang()
    assert sglang.registry.registered == {}


@pytest.mark.parametrize(("enabled", "draft"), [(False, False), (True, True)])
def test_sglang_keeps_its_own_manager_for_models_that_are_not_balanced(sglang, enabled, draft):
    sglang.moe.enable_eplb = enabled
    calls = []
    hooks._make_host(calls.append, SimpleNamespace(is_draft_worker=draft))
    assert len(calls) == 1


def test_a_hook_that_was_not_applied_stops_the_engine(sglang):
    sglang.registry._patched = {*hooks.AROUND}
    runner = SimpleNamespace(is_draft_worker=False)
    with pytest.raises(UnsupportedEngineError, match=r"ModelRunner\.forward"):
        hooks._make_host(pytest.fail, runner)
    assert not hasattr(runner, "eplb_manager")


class Host(SglangHost):
    """Host that records the hooks' calls."""

    def __init__(self):
        self.calls = []
        self._drained = False

    def start(self, *_):
        self.calls.append("start")

    def count_pass(self):
        self.calls.append("count")

    def step(self, forward_batch):
        self.calls.append(forward_batch)

    def drain(self, reason):
        self._drained = True
        self.calls.append("drain")

    def resume(self):
        self._drained = False
        self.calls.append("resume")


def runner_with(host):
    return SimpleNamespace(eplb_manager=host)


def test_a_forward_pass_is_counted_and_followed_by_a_step():
    host = Host()
    for runner in (runner_with(host), runner_with(None)):
        hooks._count_pass("output", runner, "batch", None)
    assert host.calls == ["count"]
    host.calls.clear()
    hooks._step_host("output", runner_with(host), "batch", None)
    hooks._step_host("output", runner_with(None), "batch")
    assert host.calls == ["batch"]


def updater_of(host):
    return SimpleNamespace(get_model_runner=lambda: runner_with(host))


def test_the_host_is_drained_during_a_load_or_a_load_session():
    host = Host()
    updater = updater_of(host)
    assert hooks._load_weights(lambda _, path: path, updater, "weights") == "weights"
    assert host.calls == ["drain", "resume"]
    host.calls.clear()
    hooks._begin_weight_update(lambda _: None, updater)
    hooks._load_weights(lambda _: None, updater)
    assert host._drained
    hooks._end_weight_update(lambda _: None, updater)
    assert host.calls == ["drain", "drain", "resume"]
    assert hooks._load_weights(lambda _: "loaded", updater_of(None)) == "loaded"


@pytest.mark.parametrize("hook", [hooks._load_weights, hooks._begin_weight_update, hooks._end_weight_update])
def test_balancing_resumes_after_a_failed_load(hook):
    host = Host()
    host._drained = hook is hooks._end_weight_update
    with pytest.raises(ZeroDivisionError):
        hook(lambda _: 1 / 0, updater_of(host))
    assert host.calls[-1] == "resume"
    assert not host._drained


def test_balancing_resumes_after_a_sleep_once_all_memory_is_restored():
    host = Host()
    manager = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner_with(host)), offload_tags=set())
    # Balancing resumes if the engine refuses to sleep because it is busy.
    with pytest.raises(ZeroDivisionError):
        hooks._release_memory(lambda _: 1 / 0, manager)
    assert host.calls == ["drain", "resume"]
    host.calls.clear()
    hooks._release_memory(lambda manager: manager.offload_tags.update({"weights", "kv_cache"}), manager)
    hooks._resume_memory(lambda manager: manager.offload_tags.remove("weights"), manager)
    assert host.calls == ["drain"]
    hooks._resume_memory(lambda manager: manager.offload_tags.clear(), manager)
    assert host.calls == ["drain", "resume"]
