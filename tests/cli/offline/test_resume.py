"""A replay that Ctrl-C stopped goes on to the very results of one that was left alone, and takes up no other state."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

from eplb_service.cli import main
from eplb_service.cli.offline import advise as advise_command
from eplb_service.cli.offline import replay as replay_command
from eplb_service.heat.synthetic import synthetic_heat
from tests.cli.arguments import changed

RANKS = 4
REPLAY = ["--ranks", str(RANKS), "--slots", "5", "--window", "25,30", "--interval", "20", "--step-ms", "10"]
ADVISE = ["--ranks", str(RANKS), "--window", "20"]


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.npz"
    np.savez(path, heat=synthetic_heat("drift", 120, 2, 16, tokens=256, top_k=2, seed=1))
    return path


def eplb(*arguments):
    return main.run([str(argument) for argument in arguments])


@contextmanager
def stopped_after(decisions, monkeypatch):
    """Ctrl-C when so many decisions have been made."""
    reported = []

    def advance(label, progress):
        reported.append(label)
        if len(reported) == decisions:
            raise KeyboardInterrupt

    @contextmanager
    def counted(*_):
        yield advance

    with monkeypatch.context() as patched:
        patched.setattr(replay_command, "replay_progress", counted)
        patched.setattr(advise_command, "replay_progress", counted)
        yield


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(kept) for key, kept in value.items() if not key.startswith("solve_ms")}
    return [without_times(kept) for kept in value] if isinstance(value, list) else value


def outcome(path):
    return without_times(json.loads(path.read_text()))


@pytest.mark.parametrize("decisions", [1, 7, 13, 25])
def test_a_replay_goes_on_to_the_same_results(tmp_path, trace, monkeypatch, capsys, decisions):
    whole, resumed, state = tmp_path / "whole.json", tmp_path / "resumed.json", tmp_path / "state.npz"
    alone = ["replay", "--heat", trace, *REPLAY, "--workers", 1]
    assert eplb(*alone, "--out", whole) == 0
    with stopped_after(decisions, monkeypatch):
        assert eplb(*alone, "--out", resumed, "--resume", state) == 130
    assert f"{decisions} decisions are kept in {state}" in capsys.readouterr().err
    # Stopped again, and by other hands.
    with stopped_after(3, monkeypatch):
        assert eplb(*alone, "--out", resumed, "--resume", state) == 130
    assert f"{decisions + 3} decisions are kept" in capsys.readouterr().err
    assert eplb(*changed(alone, "--out", resumed, "--resume", state, "--workers", 2)) == 0
    assert outcome(resumed) == outcome(whole)
    assert not state.exists()


@pytest.mark.parametrize("decisions", [2, 40])
def test_advice_goes_on_in_either_round(tmp_path, trace, monkeypatch, capsys, decisions):
    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    alone = ["advise", "--heat", trace, *ADVISE, "--workers", 1]
    assert eplb(*alone, "--out", whole) == 0
    with stopped_after(decisions, monkeypatch):
        assert eplb(*alone) == 130
    (state,) = tmp_path.glob("eplb-*.npz")
    assert f"kept in {state.name}. Go on with:\n  eplb " in capsys.readouterr().err
    assert eplb(*alone, "--out", resumed, "--resume", state) == 0
    assert outcome(resumed) == outcome(whole)
    assert not state.exists()


def test_a_state_of_other_work_or_none_at_all_is_refused(tmp_path, trace, monkeypatch, capsys):
    state = tmp_path / "state.npz"
    alone = ["replay", "--heat", trace, *REPLAY, "--workers", 1]
    with stopped_after(9, monkeypatch):
        assert eplb(*alone, "--resume", state) == 130
    left = state.read_bytes()
    capsys.readouterr()

    def refusal(*arguments):
        assert eplb(*changed([*alone, "--resume", state], *arguments)) == 2
        reported = capsys.readouterr().err
        assert reported.count("\n") == 1
        return reported

    for other in (["--seed", 3], ["--interval", 30], ["--min-gain", 0.2], ["--step-ms", 11]):
        assert "another trace or with other options" in refusal(*other)
    for damaged in (left[: len(left) // 2], b"", b"nonsense"):
        state.write_bytes(damaged)
        assert "is no state of an interrupted replay" in refusal()
    np.savez(state, heat=np.ones((1, 2, 3)))
    assert "is no state of an interrupted replay" in refusal()
    arrays = dict(np.load(__import__("io").BytesIO(left)))
    for name, value in list(arrays.items()):
        if name != "head":
            np.savez(state, **{**arrays, name: value.ravel()[:1]})
            assert "is damaged" in refusal(), name
    assert eplb(*alone, "--resume", tmp_path / "state.json") == 2
