"""What SGLang's registry is given, and what each hook does around the call that it wraps."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from worker_agent.adapters import compat
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.sglang import hooks, plugin
from worker_agent.adapters.sglang.balancer import SglangBalancer
from worker_agent.adapters.sglang.known import KNOWN


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
    modules = {
        "sglang.version": {"__version__": "0.5.23"},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
        },
        "sglang.srt.runtime_context": {"get_exec": lambda: execution},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return SimpleNamespace(registry=registry, moe=execution.moe)


def test_without_a_service_the_plugin_touches_nothing(monkeypatch, sglang):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    plugin.register()
    assert sglang.registry.registered == {}


def test_every_hook_is_on_a_function_whose_body_is_known():
    (functions,) = KNOWN.values()
    known = {target.replace(":", ".") for target in functions}
    assert {*hooks.AROUND, *hooks.AFTER} <= known


def test_all_hooks_are_registered_once_the_release_is_known(monkeypatch, sglang):
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(compat, "mismatches", lambda _: [])
    plugin.register()
    assert set(sglang.registry.registered) == {*hooks.AROUND, *hooks.AFTER}


def test_an_unknown_release_ends_the_engine_for_sglang_would_only_log_an_error(monkeypatch, sglang):
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "eplb:50551")
    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.6.1")
    with pytest.raises(SystemExit, match=r"SGLang 0\.6\.1.*0\.5\.23"):
        plugin.register()
    assert sglang.registry.registered == {}


@pytest.mark.parametrize(("enabled", "draft"), [(False, False), (True, True)])
def test_sglang_keeps_what_is_not_to_be_balanced(sglang, enabled, draft):
    sglang.moe.enable_eplb = enabled
    asked = []
    hooks.make_balancer(asked.append, SimpleNamespace(is_draft_worker=draft))
    assert len(asked) == 1


def test_a_hook_that_was_not_applied_ends_the_engine(sglang):
    sglang.registry._patched = {*hooks.AROUND}
    runner = SimpleNamespace(is_draft_worker=False)
    with pytest.raises(UnsupportedEngineError, match=r"ModelRunner\.forward"):
        hooks.make_balancer(pytest.fail, runner)
    assert not hasattr(runner, "eplb_manager")


class Balancer(SglangBalancer):
    """Records what a hook asks of it."""

    def __init__(self):
        self.asked, self._paused = [], False

    def start(self, *_):
        self.asked.append("start")

    def step(self, forward_batch):
        self.asked.append(forward_batch)

    def pause(self, reason):
        self._paused = True
        self.asked.append("pause")

    def go_on(self):
        self._paused = False
        self.asked.append("go on")


def runner_with(balancer):
    return SimpleNamespace(eplb_manager=balancer)


def test_a_pass_is_a_step():
    balancer = Balancer()
    hooks.step_balancer("output", runner_with(balancer), "batch", None)
    hooks.step_balancer("output", runner_with(None), "batch")
    assert balancer.asked == ["batch"]


def updater_of(balancer):
    return SimpleNamespace(get_model_runner=lambda: runner_with(balancer))


def test_loads_are_paused_each_or_all_of_a_session():
    balancer = Balancer()
    updater = updater_of(balancer)
    assert hooks.load_weights(lambda _, path: path, updater, "weights") == "weights"
    assert balancer.asked == ["pause", "go on"]
    balancer.asked.clear()
    hooks.begin_weight_update(lambda _: None, updater)
    hooks.load_weights(lambda _: None, updater)
    assert balancer._paused
    hooks.end_weight_update(lambda _: None, updater)
    assert balancer.asked == ["pause", "pause", "go on"]
    assert hooks.load_weights(lambda _: "loaded", updater_of(None)) == "loaded"


@pytest.mark.parametrize("hook", [hooks.load_weights, hooks.begin_weight_update, hooks.end_weight_update])
def test_a_load_that_fails_ends_in_balancing_as_before(hook):
    balancer = Balancer()
    balancer._paused = hook is hooks.end_weight_update

    def fails(_):
        raise OSError("no such checkpoint")

    with pytest.raises(OSError, match="checkpoint"):
        hook(fails, updater_of(balancer))
    assert balancer.asked[-1] == "go on"
    assert not balancer._paused


def test_an_engine_that_sleeps_is_balanced_again_when_all_its_memory_is_back():
    balancer = Balancer()
    manager = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner_with(balancer)), offload_tags=set()
    )
    hooks.release_memory(lambda one: one.offload_tags.update({"weights", "kv_cache"}), manager)
    hooks.resume_memory(lambda one: one.offload_tags.remove("weights"), manager)
    assert balancer.asked == ["pause"]
    hooks.resume_memory(lambda one: one.offload_tags.clear(), manager)
    assert balancer.asked == ["pause", "go on"]


def test_an_engine_that_is_too_busy_to_sleep_is_balanced_on():
    balancer = Balancer()
    manager = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner_with(balancer)), offload_tags=set()
    )

    def busy(_):
        raise AssertionError("server is not idle")

    with pytest.raises(AssertionError):
        hooks.release_memory(busy, manager)
    assert balancer.asked == ["pause", "go on"]
