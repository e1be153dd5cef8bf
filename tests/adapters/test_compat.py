"""An engine with changed functions is rejected before anything is patched, and the error names the functions."""

import importlib.util
import linecache
import logging
import sys
import types

import pytest

from tools import engine_fingerprints
from worker_agent.adapters import compat, plugins
from worker_agent.adapters.compat import UnsupportedEngineError

BODY = "class State:\n    def step(self, is_dummy=False):\n        return is_dummy\n"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Return a function that writes the source of an importable module ``toy_engine``."""
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
EXACT = {TARGET: None}
"""A patch that depends on the function's exact parameters."""
FORWARDING = {TARGET: 1}
"""A patch that passes on all arguments after ``self``."""


def releases(*names):
    """Return releases without functions."""
    return {name: {} for name in names}


def fingerprints_of(engine, release):
    """Write ``BODY`` as the engine's source and return its fingerprints, listed under this release."""
    engine(BODY)
    return {release: {TARGET: compat.fingerprint(TARGET)}}


def test_comments_and_docstrings_do_not_change_a_fingerprint(engine):
    fingerprints = fingerprints_of(engine, "1.2")
    engine(BODY.replace("        return", '        """A docstring."""\n        # a comment\n        return'))
    assert compat.require("Toy", "1.2.3+cpu", fingerprints, EXACT) is None


@pytest.mark.parametrize(
    ("source", "difference"),
    [
        (BODY.replace("def step", "def advance"), "is missing"),
        (BODY.replace("is_dummy=False", "is_dummy=False, log=None"), "takes (self, is_dummy, log)"),
        (BODY.replace("return is_dummy", "return not is_dummy"), "has a different body"),
        ("", "is missing"),
    ],
)
def test_a_changed_function_is_named_in_the_error(engine, source, difference):
    fingerprints = fingerprints_of(engine, "1.2")
    engine(source)
    with pytest.raises(UnsupportedEngineError, match=r"toy_engine:State\.step") as refusal:
        compat.require("Toy", "1.2.3", fingerprints, EXACT)
    assert difference in str(refusal.value)
    assert "unset EPLB_AGENT_SERVICE" in str(refusal.value)


RENAMED = BODY.replace("is_dummy=False", "dummy=False")
GONE = ""


@pytest.mark.parametrize(
    ("source", "patches", "fits"),
    [
        (BODY.replace("return is_dummy", "return not is_dummy"), EXACT, True),
        (RENAMED, EXACT, False),
        (RENAMED, FORWARDING, True),
        (BODY.replace("self, ", "cls, "), FORWARDING, False),
        (RENAMED, {}, True),
        (GONE, FORWARDING, False),
        (GONE, {}, True),
    ],
)
def test_a_changed_function_can_be_allowed_if_its_patch_still_fits(engine, source, patches, fits):
    fingerprints = fingerprints_of(engine, "1.2")
    engine(source)
    with pytest.raises(UnsupportedEngineError) as refusal:
        compat.require("Toy", "1.2.3", fingerprints, patches)
    assert ("ALLOW_UNVERIFIED" in str(refusal.value)) is fits
    assert ("no longer fit toy_engine:State.step" in str(refusal.value)) is not fits
    if fits:
        differs = compat.require("Toy", "1.2.3", fingerprints, patches, allow_unverified=True)
        assert differs.startswith("Toy 1.2.3 is unverified: functions that")
        assert "State.step" in differs
    else:
        with pytest.raises(UnsupportedEngineError):
            compat.require("Toy", "1.2.3", fingerprints, patches, allow_unverified=True)


def test_an_unknown_release_is_rejected_with_a_list_of_known_ones():
    with pytest.raises(
        UnsupportedEngineError, match=r"Toy 2\.0\.1.*not been tested.*Install Toy 1\.4, 1\.12"
    ):
        compat.require("Toy", "2.0.1", {"1.12": {}, "1.4": {}}, {})


@pytest.mark.parametrize(
    ("version", "release"),
    [
        # The known release has two components, so its patch releases belong to it.
        ("0.25", "0.25"),
        ("0.25.0", "0.25"),
        ("0.25.1", "0.25"),
        ("0.25.1rc1", "0.25"),
        ("0.25.0.post1", "0.25"),
        ("0.25.1.post2.dev3+g12ab", "0.25"),
        ("v0.25.1", "0.25"),
        ("0.250.1", "0.250.1"),
        ("0.2.5", "0.2.5"),
        # The known release has three components, so only versions that begin with them belong to it.
        ("0.5.23", "0.5.23"),
        ("0.5.23.post1", "0.5.23"),
        ("0.5.23.post12+cu13", "0.5.23"),
        ("0.5.23-1", "0.5.23"),
        ("0.5.23rc1", "0.5.23"),
        ("0.5.23a2", "0.5.23"),
        ("0.5.23.dev20261101", "0.5.23"),
        ("0.5.23.1", "0.5.23"),
        ("0.5.24", "0.5.24"),
        ("0.5.230", "0.5.230"),
        ("0.5.2.post23", "0.5.2"),
        ("0.5", "0.5"),
        ("0.5.dev23", "0.5"),
        # If a version begins with two known releases, it belongs to the longer one.
        ("0.27.1", "0.27.1"),
        ("0.27.1.post1", "0.27.1"),
        ("0.27.10", "0.27"),
        ("0.27.0", "0.27"),
        # The known release has four components.
        ("1.4.0.2", "1.4.0.2"),
        ("1.4.0.2.post1", "1.4.0.2"),
        ("1.4.0.3", "1.4.0.3"),
        # Trailing zeros make no difference.
        ("2", "2.0"),
        ("2.0.0.0", "2.0"),
        ("dev", ""),
    ],
)
def test_a_version_belongs_to_the_release_whose_components_it_begins_with(version, release):
    known = releases("0.25", "0.5.23", "0.27", "0.27.1", "1.4.0.2", "2.0")
    assert compat.release_of(version, known) == release


@pytest.mark.parametrize("version", ["0.5.23.post1", "0.5.23rc2", "0.5.23.dev1+cu13", "0.5.23.4"])
def test_suffixes_of_a_known_release_are_accepted_if_its_functions_are_the_same(version, engine):
    fingerprints = {"0.5.22": {}} | fingerprints_of(engine, "0.5.23")
    assert compat.require("Toy", version, fingerprints, EXACT) is None
    engine(BODY.replace("return is_dummy", "return not is_dummy"))
    with pytest.raises(
        UnsupportedEngineError, match=r"changed since 0\.5\.23: toy_engine:State\.step"
    ) as refusal:
        compat.require("Toy", version, fingerprints, EXACT)
    assert "not been tested" not in str(refusal.value)


def test_a_known_release_may_have_a_patch_number(engine):
    fingerprints = fingerprints_of(engine, "0.5.23")
    compat.require("Toy", "0.5.23+cu13", fingerprints, {})
    with pytest.raises(UnsupportedEngineError, match=r"Toy 0\.5\.24.*not been tested.*Install Toy 0\.5\.23"):
        compat.require("Toy", "0.5.24", fingerprints, {})


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.31.1", "0.32"),
        ("0.24.0rc1", "0.23"),
        ("0.40", "0.33"),
        ("0.9.2", "0.23"),
        ("0.27.3", "0.23"),
        ("0.28.0", "0.33"),  # equally far from 0.23, so the newer one
        ("dev", "0.23"),
        ("1.0.0", "0.33"),
    ],
)
def test_an_unknown_release_is_compared_with_the_nearest_one(version, release):
    names = ("0.23", "0.33") if version.startswith("0.2") else ("0.23", "0.32", "0.33")
    fingerprints = {name: {} for name in names}
    assert compat.nearest(version, fingerprints) == release


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.5.24", "0.5.23"),
        ("0.5.22.post1", "0.5.22"),
        ("0.5.20.post99", "0.5.21"),
        ("0.5.24.dev20261101", "0.5.23"),
        ("0.6.0", "0.5.23"),
        ("0.5.9", "0.5.21"),
    ],
)
def test_suffixes_are_ignored_when_finding_the_nearest_release_with_three_components(version, release):
    known = releases("0.5.21", "0.5.22", "0.5.23")
    assert compat.nearest(version, known) == release


def test_the_nearest_release_with_four_components_is_found():
    assert compat.nearest("1.4.0.7", releases("1.4.0.2", "1.4.0.9")) == "1.4.0.9"
    assert compat.nearest("1.4.0.5", releases("1.4.0.2", "1.4.0.9")) == "1.4.0.2"


def test_an_error_lists_the_known_releases_in_version_order():
    known = releases("0.5.23", "0.5.9", "0.5.23.1", "0.12")
    with pytest.raises(UnsupportedEngineError, match=r"Install Toy 0\.5\.9, 0\.5\.23, 0\.5\.23\.1, 0\.12 or"):
        compat.require("Toy", "3.0", known, {})


def test_an_unknown_release_can_be_tried_if_patches_still_fit(engine):
    fingerprints = {"1.9": {}} | fingerprints_of(engine, "1.12")
    with pytest.raises(UnsupportedEngineError, match=r"not changed since 1\.12\..*ALLOW_UNVERIFIED"):
        compat.require("Toy", "1.11", fingerprints, EXACT)
    assert "not been tested" in compat.require("Toy", "1.11", fingerprints, EXACT, allow_unverified=True)
    engine(BODY.replace("def step", "def advance"))
    with pytest.raises(UnsupportedEngineError, match=r"changed since 1\.12: toy_engine:State") as refusal:
        compat.require("Toy", "1.11", fingerprints, EXACT, allow_unverified=True)
    assert "ALLOW_UNVERIFIED" not in str(refusal.value)


@pytest.mark.parametrize("package", ["vllm", "vllm_ascend", "sglang"])
def test_every_patched_function_is_compared(package):
    adapter = importlib.import_module(f"worker_agent.adapters.{package}.hooks")
    assert set(adapter.PATCHES) <= {target for functions in adapter.KNOWN.values() for target in functions}


def test_a_source_tree_has_the_same_fingerprints_as_an_installed_engine(engine, tmp_path):
    """The functions are decorated, nested under ``if``, and have every kind of parameter."""
    source = (
        "if True:\n    class State:\n        @property\n        def near(self):\n            return 1\n\n"
        "        @staticmethod\n        def step(a, /, b, *rest, c=1, **named):\n"
        '            """Says so."""\n            return a  # a comment\n'
    )
    engine(source)
    fingerprints = {
        f"toy_engine:State.{name}": compat.fingerprint(f"toy_engine:State.{name}")
        for name in ("near", "step")
    }
    assert {target: engine_fingerprints.find(tmp_path, target) for target in fingerprints} == fingerprints
    assert engine_fingerprints.moved(tmp_path, fingerprints) == {}
    (tmp_path / "toy_engine.py").write_text(source.replace("c=1, ", "").replace("return 1", "return 2"))
    fingerprints["toy_engine:gone"] = fingerprints["toy_engine:State.near"]
    assert engine_fingerprints.moved(tmp_path, fingerprints) == {
        "toy_engine:State.near": "has a different body",
        "toy_engine:State.step": "takes (a, b, rest, named)",
        "toy_engine:gone": "is missing",
    }


@pytest.mark.parametrize("service", [None, " "])
@pytest.mark.parametrize("package", ["vllm", "vllm_ascend", "sglang"])
def test_plugins_change_nothing_without_a_service(package, service, monkeypatch):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    if service is not None:
        monkeypatch.setenv("EPLB_AGENT_SERVICE", service)
    touched = []
    monkeypatch.setattr(plugins, "_install", lambda *mode: touched.append(mode))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package == "vllm_ascend" or None)
    getattr(plugins, f"register_{package}")()
    assert touched == []


def test_a_misspelt_service_variable_is_logged(monkeypatch, caplog):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    monkeypatch.setenv("EPLB_AGENT_SERVCE", "eplb:50551")
    plugins._warn_of_misspelt_names.cache_clear()
    assert plugins._requested_mode() is plugins._requested_mode() is None
    (message,) = caplog.messages
    assert "does nothing" in message
    assert "did you mean EPLB_AGENT_SERVICE?" in message


@pytest.fixture
def eplb_log():
    """Yield the parent logger of the agent's loggers, and restore it afterwards."""
    log = logging.getLogger("eplb")
    before = log.level, log.propagate, list(log.handlers)
    yield log
    log.setLevel(before[0])
    log.propagate, log.handlers[:] = before[1:]


def test_the_agents_log_records_use_the_engines_handlers(eplb_log):
    """vLLM configures only its own loggers, so it would drop other records or log them without its prefix."""
    records = []
    handler = logging.Handler()
    engine = logging.getLogger("toy_engine")
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
    assert eplb_log.propagate is False
