"""Tests of engines in processes: the kit's host, plugin and orders, with a stand-in for vLLM."""

import json
import os
import sys
from pathlib import Path

import pytest

from eplb_lab.conformance.__main__ import main
from eplb_lab.conformance.engine import EngineError, Setup
from eplb_lab.conformance.inside.orders import STATE, Orders, order_file, write_json
from eplb_lab.conformance.placements import rotated
from eplb_lab.conformance.process import Options, cause_in, starter

STAND_INS = Path(__file__).parent / "stand_ins"
ROOT = Path(__file__).parents[2]
COMMON = ["--requests", "6", "--tokens", "12", "--moves", "8"]


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the stand-in."""
    engines = []

    def started(setup=Setup(), **arguments):  # noqa: B008 - immutable
        options = Options(
            "vllm",
            Path(sys.executable),
            "toy",
            ranks=1,
            redundant=2,
            interval=4,
            arguments=arguments,
            plugin_paths=[STAND_INS, ROOT],
            seconds=60,
        )
        engines.append(starter(options, tmp_path / str(len(engines)))(setup))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def toy_model(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64, "num_experts": 6}))
    return str(folder)


def command(model, *options):
    paths = [part for path in (STAND_INS, ROOT) for part in ("--plugin-path", str(path))]
    return ["vllm", "--model", model, "--ranks", "1", *COMMON, "--interval", "4", *paths, *options]


def test_the_engine_adopts_orders_in_sequence_and_reports_them(start):
    engine = start()
    first = rotated(engine.placement())
    engine.order(first)
    engine.order(rotated(first))
    assert engine.adopted() == 0
    engine.settle()
    assert engine.adopted() == 2
    assert (engine.placement() == rotated(first)).all()
    (answer,) = engine.generate([[5, 6]], 3)
    assert len(answer.ids) == len(answer.logprobs) == 3


def test_an_engine_that_exits_is_reported_with_its_cause(start):
    engine = start()
    os.kill(engine._process.pid, 9)
    with pytest.raises(EngineError, match="the engine exited"):
        engine.generate([[5]], 3)


def test_an_error_in_a_call_is_reported_and_leaves_the_engine_usable(start):
    engine = start()
    with pytest.raises(EngineError, match="AttributeError: 'LLM' object has no attribute 'sleep'"):
        engine.sleep_and_wake()
    assert engine.generate([[5]], 3)


def test_the_cause_replaces_an_error_that_only_points_to_the_log(start):
    with pytest.raises(EngineError, match=r"^ValueError: Sleep mode is not supported on this platform\.$"):
        start(Setup(sleeps=True))


def test_the_whole_kit_runs_on_a_stand_in_and_prints_its_report(tmp_path, capsys):
    report = tmp_path / "report.json"
    names = ["--scenarios", "rotate,under-load,sleep,quantised"]
    assert main(command(toy_model(tmp_path), *names, "--json", str(report))) == 0
    verdicts = {outcome["name"]: outcome["verdict"] for outcome in json.loads(report.read_text())["outcomes"]}
    assert verdicts == {
        "rotate": "equal",
        "under-load": "equal",
        "sleep": "not possible",
        "quantised": "not possible",
        "control: weight": "detected",
        "control: table": "detected",
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "vllm: passed (2 equal, 2 not possible, 2 detected)"
    assert "    NotImplementedError: no fp8 kernels" in lines


def test_a_faulty_engine_makes_the_command_fail(tmp_path, capsys):
    fault = ["--engine-options", '{"faults": ["reloads-initial-slots"]}', "--scenarios", "reload"]
    assert main(command(toy_model(tmp_path), *fault)) == 1
    assert "vllm: FAILED (1 differs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nemo"], "ENGINE nemo is unknown; use vllm, sglang or MODULE:FUNCTION"),
        (["tests.conformance.toy_engine:begin"], "has no attribute 'begin'"),
        (
            ["vllm", "--scenarios", "rotate,jump"],
            "--scenarios contains unknown names (jump); choose from no-moves",
        ),
        (["vllm", "--model", "/nowhere"], "--model /nowhere has no config.json"),
        (["vllm", "--model", "DENSE"], "does not specify both a number of experts and vocab_size"),
        (["vllm", "--model", "MODEL", "--ranks", "4", "--redundant", "1"], "--redundant 1: 6 experts"),
        (["vllm", "--model", "MODEL", "--folder", "MODEL"], "is not empty"),
        (["vllm", "--python", "/nowhere/python"], "--python /nowhere/python is not an executable"),
    ],
)
def test_invalid_options_are_reported_without_a_traceback(options, message, tmp_path, capsys):
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"vocab_size": 64}))
    names = {"MODEL": toy_model(tmp_path), "DENSE": str(dense)}
    assert main([names.get(option, option) for option in options]) == 2
    assert message in capsys.readouterr().err


def test_any_engine_can_be_named_on_the_command_line(monkeypatch, capsys, tmp_path):
    model = ["--model", toy_model(tmp_path)]
    engine = "tests.conformance.toy_engine:start"
    assert main([engine, *model, *COMMON, "--scenarios", "random"]) == 0
    monkeypatch.setenv("TOY_FAULTS", "fills-two-replicas")
    assert main([engine, *model, *COMMON, "--scenarios", "random"]) == 1
    assert "random                 differs" in capsys.readouterr().out


def test_all_ranks_adopt_the_order_that_the_first_rank_has_read(tmp_path):
    current = [[0, 1, 0]]
    ordered = [[1, 0, 0]]
    sent = []
    first = Orders(tmp_path)
    second = Orders(tmp_path)
    assert first.decide(current, 0, sent.append) == current
    # The order appears between the decisions of the two ranks.
    write_json(tmp_path / order_file(1), ordered)
    assert second.decide(current, 1, lambda box: box.__setitem__(0, sent[-1][0])) == current
    assert first.decide(current, 0, sent.append) == ordered
    assert second.decide(current, 1, lambda box: box.__setitem__(0, sent[-1][0])) == ordered


def test_an_order_that_the_engine_did_not_adopt_is_reported(tmp_path):
    orders = Orders(tmp_path)
    write_json(tmp_path / order_file(1), [[1, 0, 0]])
    orders.decide([[0, 1, 0]], 0, lambda _: None)
    orders.decide([[0, 1, 1]], 0, lambda _: None)
    state = json.loads((tmp_path / STATE).read_text())
    assert state == {"adopted": 0, "skipped": 1, "placement": [[0, 1, 1]]}


def test_a_model_of_a_different_shape_keeps_its_placement(tmp_path):
    orders = Orders(tmp_path)
    orders.decide([[0, 1, 0]], 0, lambda _: None)
    write_json(tmp_path / order_file(1), [[1, 0, 0]])
    assert orders.decide([[0, 1]], 0, lambda _: None) == [[0, 1]]
    assert orders.decide([[0, 1, 0]], 0, lambda _: None) == [[1, 0, 0]]


def test_the_last_error_in_a_log_that_wraps_no_other_is_the_cause():
    log = "x ValueError: 1\n(Worker) torch.OutOfMemoryError: second\nRuntimeError: Engine core initialization failed"
    assert cause_in(log) == "torch.OutOfMemoryError: second"
    assert cause_in("killed by a signal\n") == "killed by a signal"
    assert cause_in("") == "nothing was logged"
