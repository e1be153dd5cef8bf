"""An engine whose functions are not the known ones is refused with their names, before anything is patched."""

import linecache
import sys
import types

import pytest

from tools import engine_fingerprints
from worker_agent.adapters import compat, plugins
from worker_agent.adapters.compat import UnsupportedEngineError

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


def known_as(engine, release):
    """The fingerprints of an engine of ``BODY``."""
    engine(BODY)
    return {release: {TARGET: compat.fingerprint(TARGET)}}


def test_the_known_function_passes_whatever_its_comments(engine):
    known = known_as(engine, "1.2")
    engine(BODY.replace("        return", '        """A docstring."""\n        # a comment\n        return'))
    compat.require("Toy", "1.2.3+cpu", known)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (BODY.replace("def step", "def advance"), "is not there"),
        (BODY.replace("is_dummy=False", "is_dummy=False, log=None"), "takes (self, is_dummy, log)"),
        (BODY.replace("return is_dummy", "return not is_dummy"), "has another body"),
        ("", "is not there"),
    ],
)
def test_a_function_that_moved_is_named(engine, changed, said):
    known = known_as(engine, "1.2")
    engine(changed)
    with pytest.raises(UnsupportedEngineError, match=r"toy_engine:State\.step") as refusal:
        compat.require("Toy", "1.2.3", known)
    assert said in str(refusal.value)
    assert "unset EPLB_AGENT_SERVICE" in str(refusal.value)


def test_only_another_body_can_be_allowed(engine):
    known = known_as(engine, "1.2")
    engine(BODY.replace("return is_dummy", "return not is_dummy"))
    compat.require("Toy", "1.2.3", known, allow_unverified=True)
    engine(BODY.replace("is_dummy=False", "dummy=False"))
    with pytest.raises(UnsupportedEngineError):
        compat.require("Toy", "1.2.3", known, allow_unverified=True)


def test_an_unknown_release_is_refused_with_those_that_are_known():
    with pytest.raises(UnsupportedEngineError, match=r"Toy 2\.0\.1.*never tried.*Install Toy 1\.4, 1\.12"):
        compat.require("Toy", "2.0.1", {"1.12": {}, "1.4": {}})


def test_an_engine_may_be_known_by_its_patch_releases_alone(engine):
    known = known_as(engine, "0.5.23")
    compat.require("Toy", "0.5.23+cu13", known)
    with pytest.raises(
        UnsupportedEngineError, match=r"Toy 0\.5\.24.*never tried; nothing.*Install Toy 0\.5\.23"
    ):
        compat.require("Toy", "0.5.24", known)


def test_an_unknown_release_can_be_tried_where_nothing_has_moved_since_the_newest_known_one(engine):
    known = {"1.9": {}} | known_as(engine, "1.10")
    with pytest.raises(UnsupportedEngineError, match=r"nothing it relies on changed.*ALLOW_UNVERIFIED"):
        compat.require("Toy", "1.11", known)
    compat.require("Toy", "1.11", known, allow_unverified=True)
    engine(BODY.replace("def step", "def advance"))
    with pytest.raises(
        UnsupportedEngineError, match=r"changed since 1\.10: toy_engine:State\.step"
    ) as refusal:
        compat.require("Toy", "1.11", known, allow_unverified=True)
    assert "ALLOW_UNVERIFIED" not in str(refusal.value)


def test_a_source_that_is_not_installed_is_read_as_an_installed_one(engine, tmp_path):
    """Decorated, under ``if``, with every kind of parameter."""
    source = (
        "if True:\n    class State:\n        @property\n        def near(self):\n            return 1\n\n"
        "        @staticmethod\n        def step(a, /, b, *rest, c=1, **named):\n"
        '            """Says so."""\n            return a  # a comment\n'
    )
    engine(source)
    for target in ("toy_engine:State.near", "toy_engine:State.step"):
        assert engine_fingerprints.find(tmp_path, target) == compat.fingerprint(target)
    known = {
        target: compat.fingerprint(target) for target in ("toy_engine:State.near", "toy_engine:State.step")
    }
    assert engine_fingerprints.moved(tmp_path, known) == {}
    (tmp_path / "toy_engine.py").write_text(source.replace("c=1, ", "").replace("return 1", "return 2"))
    assert engine_fingerprints.moved(
        tmp_path, known | {"toy_engine:gone": known["toy_engine:State.near"]}
    ) == {
        "toy_engine:State.near": "has another body",
        "toy_engine:State.step": "takes (a, b, rest, named)",
        "toy_engine:gone": "is not there",
    }


@pytest.mark.parametrize(("service", "requested"), [(None, False), (" ", False), ("eplb:50551", True)])
def test_only_a_named_service_asks_for_the_agent(service, requested, monkeypatch):
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    if service is not None:
        monkeypatch.setenv("EPLB_AGENT_SERVICE", service)
    assert plugins._is_requested() is requested
