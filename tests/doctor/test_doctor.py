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
from worker_agent.doctor import environment, round_trip
from worker_agent.doctor.finding import Finding, Verdict
from worker_agent.swap import layer_commit

CPU = torch.device("cpu")


def examined():
    return round_trip.examine(dist.group.WORLD, CPU, 4096)


def test_experts_go_there_and_come_back():
    for findings in run_ranks(2, examined):
        assert [(finding.name, finding.verdict) for finding in findings] == [
            ("memory for staging", Verdict.SKIPPED),
            ("ranks meet", Verdict.OK),
            ("experts there and back", Verdict.OK),
            ("captured graph", Verdict.SKIPPED),
        ]


def examined_with_wrong_bytes():
    install = layer_commit.install

    def install_wrongly(layer, staged, *rest):
        written = install(layer, staged, *rest)
        layer.expert_weights()[1][0, -1] += 1
        return written

    layer_commit.install, layer_commit.check_installed = install_wrongly, lambda *_: None
    return examined()


def test_a_byte_that_is_wrong_is_found():
    for findings in run_ranks(2, examined_with_wrong_bytes):
        assert findings[-1].verdict is Verdict.FAILED
        assert findings[-1].name == "experts arrive"


def examined_with_a_graph_that_reads_old_memory():
    round_trip.captured_table = lambda layer: lambda: [0] * len(layer.log2phy)
    return examined()


def test_a_graph_that_does_not_see_the_table_is_found():
    for findings in run_ranks(2, examined_with_a_graph_that_reads_old_memory):
        assert (findings[-1].name, findings[-1].verdict) == ("captured graph", Verdict.FAILED)


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
        monkeypatch.setattr(environment, "_ENGINES", (("Toy", "toy_engine", "toy_engine"),))
        monkeypatch.setattr(environment.compat, "read_known", lambda _: {"1.2": {}})
        monkeypatch.setattr(environment, "_SERVICE_SECONDS", 0.2)

    return install


def test_an_engine_that_the_adapter_knows_is_fine(engine, monkeypatch):
    engine("1.2.3")
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    findings = list(environment.environment())
    assert of("functions of Toy", findings).verdict is Verdict.OK
    assert "numpy" in of("versions", findings).text
    assert "127.0.0.1:9 does not answer" in of("service", findings).text


def test_an_engine_of_another_release_is_named(engine):
    engine("2.0")
    finding = of("functions of Toy", environment.environment())
    assert finding.verdict is Verdict.FAILED
    assert "Toy 2.0" in finding.text


def test_settings_that_do_not_fit_are_named(engine, monkeypatch):
    engine("1.2")
    monkeypatch.setenv("EPLB_AGENT_VOTE_LAG", "9")
    finding = of("settings", environment.environment())
    assert finding.verdict is Verdict.FAILED
    assert "vote_lag 9" in finding.text


@pytest.mark.parametrize(
    ("found", "code"),
    [([Finding.ok("a", "x"), Finding.skipped("b", "y")], 0), ([Finding.failed("a", "x")], 1)],
)
def test_the_exit_code_says_whether_something_failed(found, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_findings", lambda _: iter(found))
    with pytest.raises(SystemExit) as end:
        doctor.main(["--json"])
    assert end.value.code == code
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == [one.name for one in found]


def test_a_rank_that_ends_without_findings_is_named():
    (finding,) = doctor._of_rank(1, "", "Segmentation fault")
    assert finding.verdict is Verdict.FAILED
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


def devices(count, monkeypatch):
    """The round trip of two ranks on so many devices: its findings, each rank's device and its backend."""
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(doctor.subprocess, "Popen", FakeProcess)
    monkeypatch.delenv("EPLB_AGENT_TRANSFER_BACKEND", raising=False)
    module = types.SimpleNamespace(device_count=lambda: count)
    monkeypatch.setattr(doctor.torch, "get_device_module", lambda _: module)
    findings = list(doctor._round_trip(2, "cuda", 4096))
    return (
        findings,
        [(command[-2], env.get("EPLB_AGENT_TRANSFER_BACKEND")) for command, env in FakeProcess.started],
    )


def test_each_rank_has_a_device_of_its_own(monkeypatch):
    findings, ranks = devices(2, monkeypatch)
    assert [finding.name for finding in findings] == ["ranks meet"]
    assert ranks == [("cuda:0", None), ("cuda:1", None)]


def test_ranks_that_share_a_device_go_by_way_of_the_host(monkeypatch):
    findings, ranks = devices(1, monkeypatch)
    assert "2 ranks on 1 cuda" in of("devices", findings).text
    assert ranks == [("cuda:0", "gloo"), ("cuda:0", "gloo")]


def test_a_kind_of_device_that_is_not_there_is_named(monkeypatch):
    findings, ranks = devices(0, monkeypatch)
    assert of("devices", findings).verdict is Verdict.FAILED
    assert ranks == []
