"""An engine whose functions are not the known ones is refused with their names, before anything is patched."""

import importlib.util
import linecache
import logging
import sys
import types

import pytest

from tools import engine_fingerprints
from worker_agent.adapters import compat, plugins
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.sglang import hooks as sglang_hooks

BODY = "class State:\n    def step(self, is_dummy=False):\n        return is_dummy\n"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Writes the source of a module ``toy_engine`` that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        sys.modules.pop("toy_engine", None)
        (tmp_path / "toy_engine.py").write_text(source)
        module = types.ModuleType("toy_engine")
        module.__file__ = str(tmp_path / "toy_engine.py")
        exec(compile(source, module.__file__, "exec"), module.__dict__)
        linecache.checkcache()
        monkeypatch.setitem(sys.modules, "toy_engine", module)

    return write


TARGET = "toy_engine:State.step"
EXACT, HANDED_ON = {TARGET: None}, {TARGET: 1}
"""A patch that takes the known parameters, and one that hands on all but ``self``."""


def known_as(engine, release):
    """The fingerprints of an engine of ``BODY``."""
    engine(BODY)
    return {release: {TARGET: compat.fingerprint(TARGET)}}


def test_the_known_function_passes_whatever_its_comments(engine):
    known = known_as(engine, "1.2")
    engine(BODY.replace("        return", '        """A docstring."""\n        # a comment\n        return'))
    assert compat.require("Toy", "1.2.3+cpu", known, EXACT) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (BODY.replace("def step", "def advance"), "is missing"),
        (BODY.replace("is_dummy=False", "is_dummy=False, log=None"), "takes (self, is_dummy, log)"),
        (BODY.replace("return is_dummy", "return not is_dummy"), "has a different body"),
        ("", "is missing"),
    ],
)
def test_a_function_that_moved_is_named(engine, changed, said):
    known = known_as(engine, "1.2")
    engine(changed)
    with pytest.raises(UnsupportedEngineError, match=r"toy_engine:State\.step") as refusal:
        compat.require("Toy", "1.2.3", known, EXACT)
    assert said in str(refusal.value)
    assert "unset EPLB_AGENT_SERVICE" in str(refusal.value)


RENAMED, GONE = BODY.replace("is_dummy=False", "dummy=False"), ""


@pytest.mark.parametrize(
    ("changed", "patches", "fits"),
    [
        (BODY.replace("return is_dummy", "return not is_dummy"), EXACT, True),
        (RENAMED, EXACT, False),
        (RENAMED, HANDED_ON, True),
        (BODY.replace("self, ", "cls, "), HANDED_ON, False),
        (RENAMED, {}, True),
        (GONE, HANDED_ON, False),
        (GONE, {}, True),
    ],
)
def test_only_what_no_longer_fits_a_patch_cannot_be_allowed(engine, changed, patches, fits):
    known = known_as(engine, "1.2")
    engine(changed)
    with pytest.raises(UnsupportedEngineError) as refusal:
        compat.require("Toy", "1.2.3", known, patches)
    assert ("ALLOW_UNVERIFIED" in str(refusal.value)) is fits
    assert ("no longer fit toy_engine:State.step" in str(refusal.value)) is not fits
    if fits:
        differs = compat.require("Toy", "1.2.3", known, patches, allow_unverified=True)
        assert differs.startswith("Toy 1.2.3 is served unverified: functions that")
        assert "State.step" in differs
    else:
        with pytest.raises(UnsupportedEngineError):
            compat.require("Toy", "1.2.3", known, patches, allow_unverified=True)


def test_an_unknown_release_is_refused_with_those_that_are_known():
    with pytest.raises(UnsupportedEngineError, match=r"Toy 2\.0\.1.*never tested.*Install Toy 1\.4, 1\.12"):
        compat.require("Toy", "2.0.1", {"1.12": {}, "1.4": {}}, {})


def test_an_engine_may_be_known_by_its_patch_releases_alone(engine):
    known = known_as(engine, "0.5.23")
    compat.require("Toy", "0.5.23+cu13", known, {})
    with pytest.raises(UnsupportedEngineError, match=r"Toy 0\.5\.24.*never tested.*Install Toy 0\.5\.23"):
        compat.require("Toy", "0.5.24", known, {})


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.31.1", "0.32"),
        ("0.24.0rc1", "0.23"),
        ("0.40", "0.33"),
        ("0.9.2", "0.23"),
        ("0.27.3", "0.23"),
        ("0.28.0", "0.33"),  # as far from 0.23: the newer one
        ("dev", "0.23"),
        ("1.0.0", "0.33"),
    ],
)
def test_an_unknown_release_is_compared_with_the_nearest(version, release):
    names = ("0.23", "0.33") if version.startswith("0.2") else ("0.23", "0.32", "0.33")
    known = {name: {} for name in names}
    assert compat.nearest(version, known) == release


def test_an_unknown_release_can_be_tried_where_patches_still_fit(engine):
    known = {"1.9": {}} | known_as(engine, "1.12")
    with pytest.raises(UnsupportedEngineError, match=r"not changed since 1\.12\..*ALLOW_UNVERIFIED"):
        compat.require("Toy", "1.11", known, EXACT)
    assert "never tested" in compat.require("Toy", "1.11", known, EXACT, allow_unverified=True)
    engine(BODY.replace("def step", "def advance"))
    with pytest.raises(UnsupportedEngineError, match=r"changed since 1\.12: toy_engine:State") as refusal:
        compat.require("Toy", "1.11", known, EXACT, allow_unverified=True)
    assert "ALLOW_UNVERIFIED" not in str(refusal.value)


@pytest.mark.parametrize("package", ["vllm", "vllm_ascend", "sglang"])
def test_every_patched_function_is_compared(package):
    adapter = importlib.import_module(f"worker_agent.adapters.{package}.hooks")
    assert set(adapter.PATCHES) <= {target for functions in adapter.KNOWN.values() for target in functions}


def test_a_source_that_is_not_installed_is_read_as_an_installed_one(engine, tmp_path):
    """Decorated, under ``if``, with every kind of parameter."""
    source = (
        "if True:\n    class State:\n        @property\n        def near(self):\n            return 1\n\n"
        "        @staticmethod\n        def step(a, /, b, *rest, c=1, **named):\n"
        '            """Says so."""\n            return a  # a comment\n'
    )
    engine(source)
    known = {
        f"toy_engine:State.{one}": compat.fingerprint(f"toy_engine:State.{one}") for one in ("near", "step")
    }
    assert {target: engine_fingerprints.find(tmp_path, target) for target in known} == known
    assert engine_fingerprints.moved(tmp_path, known) == {}
    (tmp_path / "toy_engine.py").write_text(source.replace("c=1, ", "").replace("return 1", "return 2"))
    known["toy_engine:gone"] = known["toy_engine:State.near"]
    assert engine_fingerprints.moved(tmp_path, known) == {
        "toy_engine:State.near": "has another body",
        "toy_engine:State.step": "takes (a, b, rest, named)",
        "toy_engine:gone": "is missing",
    }


@pytest.mark.parametrize("service", [None, " "])
@pytest.mark.parametrize("package", ["vllm", "vllm_ascend", "sglang"])
def test_without_a_service_no_plugin_touches_anything(package, service, monkeypatch):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    if service is not None:
        monkeypatch.setenv("EPLB_AGENT_SERVICE", service)
    touched = []
    monkeypatch.setattr(plugins, "_install_into_vllm", lambda *engine: touched.append(engine))
    monkeypatch.setattr(sglang_hooks, "install", lambda: touched.append("sglang"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package == "vllm_ascend" or None)
    getattr(plugins, f"register_{package}")()
    assert touched == []


def test_a_misspelt_service_is_named_where_no_agent_starts(monkeypatch, caplog):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    monkeypatch.setenv("EPLB_AGENT_SERVCE", "eplb:50551")
    plugins._warn_of_misspelt_names.cache_clear()
    assert plugins._is_requested() is plugins._is_requested() is False
    (said,) = caplog.messages
    assert "does nothing" in said
    assert "did you mean EPLB_AGENT_SERVICE?" in said


@pytest.fixture
def own_log():
    """The logger above all of the agent's, as it was afterwards."""
    log = logging.getLogger("eplb")
    before = log.level, log.propagate, list(log.handlers)
    yield log
    log.setLevel(before[0])
    log.propagate, log.handlers[:] = before[1:]


def test_the_agent_s_records_come_by_the_engine_s_own_handlers(own_log):
    """vLLM configures its own loggers alone: what another one logs is nowhere, warnings are bare lines."""
    records, handler, engine = [], logging.Handler(), logging.getLogger("toy_engine")
    handler.emit = records.append
    engine.addHandler(handler)
    engine.setLevel(logging.INFO)
    plugins._log_to("toy_engine")
    plugins._log_to("toy_engine")
    log = logging.getLogger("eplb.agent")
    log.info("attached")
    log.debug("details")
    log.warning("stopped")
    assert [record.getMessage() for record in records] == ["attached", "stopped"]
    assert own_log.propagate is False
