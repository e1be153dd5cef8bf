"""Modes that the plugins install into each engine."""

import importlib
import logging

import pytest

from worker_agent.adapters import plugins

REGISTER = {
    "vllm": plugins.register_vllm,
    "vllm_ascend": plugins.register_vllm_ascend,
    "sglang": plugins.register_sglang,
}


@pytest.fixture
def installed(monkeypatch):
    """Return the list of installed modes, in order."""
    modes = []
    monkeypatch.setattr(plugins, "_installed", set())
    monkeypatch.setattr(plugins, "_log_to", lambda _: None)
    monkeypatch.setenv("EPLB_AGENT_MODE", "policy")
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    for mode, engine in plugins._HOOKS:
        module = importlib.import_module(plugins._HOOKS[mode, engine])
        monkeypatch.setattr(module, "install", lambda mode=mode: modes.append(mode))
    return modes


def register(engine, monkeypatch):
    has_ascend = "found" if engine == "vllm_ascend" else None
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda _: has_ascend)
    REGISTER[engine]()
    REGISTER[engine]()


@pytest.mark.parametrize("engine", REGISTER)
def test_policy_mode_observes_the_engine_only_if_a_service_is_named(engine, installed, monkeypatch):
    register(engine, monkeypatch)
    assert installed == ["policy"]
    plugins._installed.clear()
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    register(engine, monkeypatch)
    # The observer's hooks are the outer ones.
    assert installed == ["policy", "policy", "observe"]


def test_an_engine_that_cannot_be_observed_still_gets_its_policy(installed, monkeypatch, caplog):
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    monkeypatch.setattr("worker_agent.observe.vllm.install", lambda: 1 / 0)
    with caplog.at_level(logging.INFO, "eplb.agent"):
        register("vllm", monkeypatch)
    assert installed == ["policy"]
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "eplb-agent makes the EPLB decisions for vLLM with --enable-eplb",
        "the service will not show this engine's heat",
    ]
