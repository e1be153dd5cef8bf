"""Tests that the doctor accepts a healthy environment and reports the problem in a broken one."""

import json
import os
import subprocess
import sys
import types
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from worker_agent.adapters import compat
from worker_agent.doctor import FAILED, OK, SKIPPED, WARNING, Finding, round_trip
from worker_agent.doctor import __main__ as doctor
from worker_agent.swap import staging
from worker_agent.swap.transfer import TransferWorker


def corrupt_a_byte():
    copy_into = staging.copy_into

    def copy_wrongly(layer, staged, *rest):
        written = copy_into(layer, staged, *rest)
        layer.expert_weights()[1][0][0, -1] += 1
        return written

    staging.copy_into = copy_wrongly
    TransferWorker.check = lambda *_: None


def graph_with_stale_memory():
    round_trip._captured_table = lambda layer: lambda: [0] * len(layer.log2phy)


def examine_with(fault):
    fault()
    return round_trip.examine(dist.group.WORLD, torch.device("cpu"), 4096)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (dict, [("expert round trip", OK), ("captured graph", SKIPPED)]),
        (corrupt_a_byte, [("experts arrive", FAILED)]),
        (graph_with_stale_memory, [("captured graph", FAILED)]),
    ],
    ids=["healthy", "a corrupt byte", "a graph that reads stale memory"],
)
def test_experts_survive_the_round_trip_or_the_fault_is_reported(fault, expected):
    met = [("rendezvous", OK)]
    for findings in run_ranks(2, examine_with, fault):
        assert [(finding.name, finding.verdict) for finding in findings] == met + expected


@pytest.fixture
def installed(monkeypatch):
    """A healthy environment with the agent and version 1.2.3 of an engine, for a test to break."""
    for name in [name for name in os.environ if name.startswith(("EPLB_AGENT", "VLLM_PLUGINS"))]:
        monkeypatch.delenv(name)
    engine = types.ModuleType("toy_engine")
    engine.__version__ = "1.2.3"
    engine.__spec__ = types.SimpleNamespace(name="toy_engine")
    adapter = types.ModuleType("worker_agent.adapters.toy_engine.hooks")
    adapter.check_release = lambda allowed: compat.require(
        "Toy", engine.__version__, {"1.2": {}}, {}, allow_unverified=allowed
    )
    monkeypatch.setitem(sys.modules, "toy_engine", engine)
    monkeypatch.setitem(sys.modules, adapter.__name__, adapter)
    monkeypatch.setattr(doctor, "_ENGINES", (("Toy", "toy_engine", "VLLM_PLUGINS", "eplb_agent"),))
    monkeypatch.setattr(doctor, "_SERVICE_SECONDS", 0.2)
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    monkeypatch.setenv("EPLB_AGENT_DATA_HOST", "127.0.0.1")
    ready = types.SimpleNamespace(result=lambda _: None)
    monkeypatch.setattr(doctor.grpc, "channel_ready_future", lambda _: ready)
    return types.SimpleNamespace(engine=engine, adapter=adapter, patch=monkeypatch)


def test_a_healthy_installation_passes_every_check(installed):
    installed.patch.setenv("VLLM_PLUGINS", "other,eplb_agent")
    findings = list(doctor.environment())
    assert {finding.verdict for finding in findings} == {OK}
    assert [finding.name for finding in findings] == ["versions", "Toy functions", "service"]
    assert "numpy" in findings[0].text


def variables(**named):
    def set_variables(installed):
        for name, value in named.items():
            installed.patch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("host", ["node-3.example", "10.0.0.3", "fd00::3", "node-3"])
def test_a_host_name_without_a_domain_causes_a_warning(host, installed):
    installed.patch.setenv("EPLB_AGENT_DATA_HOST", host)
    findings = [finding for finding in doctor.environment() if finding.verdict != OK]
    if host == "node-3":
        (warning,) = findings
        assert (warning.name, warning.verdict) == ("data host", WARNING)
        assert "EPLB_AGENT_DATA_HOST is 'node-3', a name without a domain" in warning.text
    else:
        assert findings == []


def service_not_set(installed):
    installed.patch.delenv("EPLB_AGENT_SERVICE")


def service_is_down(installed):
    installed.patch.setattr(doctor.grpc, "channel_ready_future", REAL_FUTURE)


def unknown_release(installed):
    installed.engine.__version__ = "2.0"


def unknown_release_allowed(installed):
    unknown_release(installed)
    installed.patch.setenv("EPLB_AGENT_ALLOW_UNVERIFIED_ENGINE", "1")


def engine_import_fails(installed):
    def breaks(_):
        raise ImportError("libcudart.so.13: no such file")

    installed.adapter.check_release = breaks


def agent_not_installed(installed):
    installed.patch.setattr(doctor.metadata, "entry_points", lambda **_: ())


REAL_FUTURE = doctor.grpc.channel_ready_future


@pytest.mark.parametrize(
    ("broken", "name", "text"),
    [
        (variables(VLLM_PLUGINS="other"), "plugin", "VLLM_PLUGINS=other omits eplb_agent"),
        (variables(VLLM_PLUGINS=""), "plugin", "omits eplb_agent"),
        (agent_not_installed, "plugin", "no entry point eplb_agent is installed"),
        (variables(EPLB_AGENT_DEPLOYMNT="a"), "variables", "no effect; did you mean EPLB_AGENT_DEPLOYMENT?"),
        (service_not_set, "service", "an installed agent does nothing"),
        (
            variables(EPLB_AGENT_SERVICE="http://a:1"),
            "settings",
            "expected host:port, got the URL http://a:1",
        ),
        (variables(EPLB_AGENT_VOTE_INTERVAL="0"), "settings", "EPLB_AGENT_VOTE_INTERVAL: Input should be"),
        (
            variables(EPLB_AGENT_SERVICE="a:1", EPLB_AGENT_AUTH_TOKEN="b"),
            "settings",
            "a token for a:1 would be",
        ),
        (variables(EPLB_AGENT_TLS_CA="/no/ca.pem"), "service", "credentials cannot be read"),
        (variables(EPLB_AGENT_AUTH_TOKEN_FILE="/no/token"), "service", "credentials cannot be read"),
        (service_is_down, "service", "127.0.0.1:9 did not respond within 0.2 s (in plain text"),
        (unknown_release, "Toy functions", "Toy 2.0. The agent has not been tested with this release"),
        (unknown_release_allowed, "Toy functions", "Toy 2.0 is unverified"),
        (engine_import_fails, "Toy functions", "cannot be imported here: ImportError: libcudart.so.13"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_only_the_broken_part_of_an_installation_is_reported(broken, name, text, installed):
    broken(installed)
    (wrong,) = (finding for finding in doctor.environment() if finding.verdict != OK)
    verdict = WARNING if broken is unknown_release_allowed else FAILED
    assert (wrong.name, wrong.verdict) == (name, verdict)
    assert text in wrong.text


@pytest.mark.parametrize(
    ("listed", "left_out"), [("", False), ("other, eplb_agent", False), ("other", True), (None, False)]
)
def test_the_sglang_plugin_list_may_be_empty_and_contain_spaces(listed, left_out, monkeypatch):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if listed is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", listed)
    assert bool(list(doctor._plugin("SGLang", "SGLANG_PLUGINS", "eplb_agent"))) is left_out


def test_missing_torch_is_reported_and_the_other_checks_still_run():
    program = "import sys; sys.modules['torch'] = None\nfrom worker_agent.doctor.__main__ import main; main(['--json'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["versions"]["verdict"] == OK
    assert findings["torch"]["verdict"] == FAILED
    assert sys.executable in findings["torch"]["text"]


@pytest.mark.parametrize(
    ("found", "code"),
    [([Finding("a", OK, "x"), Finding("b", SKIPPED, "y")], 0), ([Finding("a", FAILED, "x")], 1)],
)
def test_the_exit_code_is_1_if_a_check_failed(found, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_findings", lambda _: iter(found))
    with pytest.raises(SystemExit) as end:
        doctor.main(["--json"])
    assert end.value.code == code
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == [
        finding.name for finding in found
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "1"], "--ranks must be 2 or more"),
        (["--expert-bytes", "-5"], "--expert-bytes must be 1 or more"),
        (["--device", "cpu:0"], "invalid choice: 'cpu:0'"),
    ],
)
def test_options_that_leave_nothing_to_transfer_are_rejected(arguments, text, capsys):
    with pytest.raises(SystemExit) as end:
        doctor.main(arguments)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_a_device_type_that_torch_does_not_find_is_reported(installed, capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--device", "npu", "--json"])
    assert json.loads(capsys.readouterr().out)[-1]["text"].startswith("torch finds no npu device here")


def test_a_rank_that_exits_without_findings_is_reported():
    (finding,) = doctor._of_rank(1, "", "Segmentation fault")
    assert finding.verdict == FAILED
    assert "rank 1 exited: Segmentation fault" in finding.text


class FakeProcess:
    """A rank that records how it was started. It exits with ``returncode``, or never exits if that is ``None``."""

    started: ClassVar[list] = []

    def __init__(self, command=(), env=None, stdout=None, returncode=0, **_):
        self.returncode = returncode
        if stdout is not None:
            self.started.append((command, env))
            stdout.write(b'[{"name": "rendezvous", "verdict": "ok", "text": ""}]')

    def poll(self):
        return self.returncode

    kill = wait = poll


@pytest.mark.parametrize(("codes", "longest"), [((0, None), 0.1), ((1, None), 60)])
def test_the_wait_for_ranks_shows_progress_and_ends_soon_after_a_failure(codes, longest, monkeypatch, capsys):
    for name, seconds in (("MAX", longest), ("FAILED", 0.1), ("PROGRESS", 0), ("POLL", 0.01)):
        monkeypatch.setattr(doctor, f"_{name}_SECONDS", seconds)
    assert doctor._wait([FakeProcess(returncode=code) for code in codes]) == [1]
    assert f"waiting for ranks [1]: 0 s of at most {longest:g}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "expected", "started"),
    [
        (2, ("rendezvous", OK, ""), [("cuda:0", None), ("cuda:1", None)]),
        (1, ("devices", OK, "fewer cuda devices (1)"), [("cuda:0", "gloo"), ("cuda:0", "gloo")]),
        (0, ("devices", FAILED, "torch finds no cuda device"), []),
    ],
    ids=["one device per rank", "one shared device", "no device"],
)
def test_ranks_use_the_available_devices(count, expected, started, monkeypatch):
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(doctor.subprocess, "Popen", FakeProcess)
    monkeypatch.delenv("EPLB_AGENT_TRANSFER_BACKEND", raising=False)
    first, *_ = doctor._round_trip(2, "cuda", count, 4096)
    assert (first.name, first.verdict) == expected[:2]
    assert first.text.startswith(expected[2])
    ranks = [(command[-2], env.get("EPLB_AGENT_TRANSFER_BACKEND")) for command, env in FakeProcess.started]
    assert ranks == started
