"""The doctor finds a healthy environment healthy, and says what is wrong with one that is not."""

import json
import sys
import types
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from worker_agent.doctor import __main__ as doctor
from worker_agent.doctor import round_trip
from worker_agent.doctor.round_trip import FAILED, OK, SKIPPED, Finding
from worker_agent.swap import staging


def wrong_bytes():
    copy_into = staging.copy_into

    def copy_wrongly(layer, staged, *rest):
        written = copy_into(layer, staged, *rest)
        layer.expert_weights()[1][0, -1] += 1
        return written

    staging.copy_into, staging._check_installed = copy_wrongly, lambda *_: None


def graph_that_reads_old_memory():
    round_trip._captured_table = lambda layer: lambda: [0] * len(layer.log2phy)


def examined(fault):
    fault()
    return round_trip.examine(dist.group.WORLD, torch.device("cpu"), 4096)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (dict, [("experts there and back", OK), ("captured graph", SKIPPED)]),
        (wrong_bytes, [("experts arrive", FAILED)]),
        (graph_that_reads_old_memory, [("captured graph", FAILED)]),
    ],
    ids=["healthy", "a wrong byte", "a graph that does not see the table"],
)
def test_experts_go_there_and_come_back_or_the_fault_is_found(fault, found):
    met = [("ranks meet", OK)]
    for findings in run_ranks(2, examined, fault):
        assert [(finding.name, finding.verdict) for finding in findings] == met + found


def of(name, findings):
    return next(finding for finding in findings if finding.name == name)


@pytest.fixture
def engine(monkeypatch):
    """An engine of that version in place of those that the doctor knows."""

    def install(version):
        module = types.ModuleType("toy_engine")
        module.__version__ = version
        module.__spec__ = types.SimpleNamespace(name="toy_engine")
        monkeypatch.setitem(sys.modules, "toy_engine", module)
        monkeypatch.setattr(doctor, "_ENGINES", (("Toy", "toy_engine", "toy_engine"),))
        monkeypatch.setattr(doctor.compat, "read_known", lambda _: {"1.2": {}})
        monkeypatch.setattr(doctor, "_SERVICE_SECONDS", 0.2)

    return install


def test_an_engine_that_the_adapter_knows_is_fine(engine, monkeypatch):
    engine("1.2.3")
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    findings = list(doctor.environment())
    assert of("functions of Toy", findings).verdict == OK
    assert "numpy" in of("versions", findings).text
    assert "127.0.0.1:9 does not answer" in of("service", findings).text


@pytest.mark.parametrize(("name", "text"), [("functions of Toy", "Toy 2.0"), ("settings", "vote_interval")])
def test_another_release_and_settings_that_do_not_fit_are_named(engine, monkeypatch, name, text):
    engine("2.0")
    monkeypatch.setenv("EPLB_AGENT_VOTE_INTERVAL", "0")
    finding = of(name, doctor.environment())
    assert finding.verdict == FAILED
    assert text in finding.text


@pytest.mark.parametrize(
    ("found", "code"),
    [([Finding("a", OK, "x"), Finding("b", SKIPPED, "y")], 0), ([Finding("a", FAILED, "x")], 1)],
)
def test_the_exit_code_says_whether_something_failed(found, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_findings", lambda _: iter(found))
    with pytest.raises(SystemExit) as end:
        doctor.main(["--json"])
    assert end.value.code == code
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == [one.name for one in found]


def test_a_rank_that_ends_without_findings_is_named():
    (finding,) = doctor._of_rank(1, "", "Segmentation fault")
    assert finding.verdict == FAILED
    assert "rank 1 ended: Segmentation fault" in finding.text


class FakeProcess:
    """A rank that answers that all is well, and keeps how it was started."""

    started: ClassVar[list] = []

    def __init__(self, command, env, **_):
        self.started.append((command, env))

    def communicate(self, timeout):
        return json.dumps([{"name": "ranks meet", "verdict": "ok", "text": ""}]), ""

    def kill(self):
        pass


@pytest.mark.parametrize(
    ("count", "found", "started"),
    [
        (2, ("ranks meet", OK, ""), [("cuda:0", None), ("cuda:1", None)]),
        (1, ("devices", OK, "2 ranks on 1 cuda"), [("cuda:0", "gloo"), ("cuda:0", "gloo")]),
        (0, ("devices", FAILED, "torch sees no cuda"), []),
    ],
    ids=["one each", "shared, by way of the host", "none"],
)
def test_ranks_take_the_devices_that_there_are(count, found, started, monkeypatch):
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(doctor.subprocess, "Popen", FakeProcess)
    monkeypatch.delenv("EPLB_AGENT_TRANSFER_BACKEND", raising=False)
    module = types.SimpleNamespace(device_count=lambda: count)
    monkeypatch.setattr(doctor.torch, "get_device_module", lambda _: module)
    first, *_ = doctor._round_trip(2, "cuda", 4096)
    assert (first.name, first.verdict) == found[:2]
    assert first.text.startswith(found[2])
    ranks = [(command[-2], env.get("EPLB_AGENT_TRANSFER_BACKEND")) for command, env in FakeProcess.started]
    assert ranks == started
