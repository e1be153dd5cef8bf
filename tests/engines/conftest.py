"""Fixtures for tests on real engines: the engines, the installed agent, a checkpoint, and a service."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.service import Service
from tests.engines.environments import ROOT, SGLANG_0523, VLLM_032, python_of
from tests.engines.openai_server import TOKEN_IDS_ALONE, OpenAiServer
from tests.engines.processes import end_engine, start_engine

HERE = Path(__file__).parent
SHIM = """
[vllm.general_plugins]
eplb_cpu_host = vllm_on_cpu:register
"""
UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}
"""Environment for engines that serve few tokens. For them, compiling many small functions takes longer than serving."""
TRITON_IN_PYTHON = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment for an engine with the second model runner. It is slow on CPU, so its tests must run few steps."""
WHENEVER_IT_MAY = "--par-threshold 1.0 --min-gain 0.0 --cpu-share 100"
DECIDE_OFTEN = f"--window-steps 64 --decision-interval 64 --report-steps 32 {WHENEVER_IT_MAY}"
SWITCH_OFTEN = f"{DECIDE_OFTEN} --policy deepseek"
"""Options for engines whose PAR is at its noise floor under any placement, so the default policy would move nothing."""


def make_agent_site(folder):
    """Build a directory for ``PYTHONPATH`` with the core, agent and lab wheels and the shims for vLLM on CPU."""
    site = folder / "site"
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    sources = [str(ROOT / "packaging" / name) for name in ("eplb-core", "eplb-agent", "eplb-lab")]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), *sources], check=True)
    built = list(map(str, wheels.glob("*.whl")))
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(site), *built], check=True)
    for module in ("vllm_on_cpu.py", "commit_without_weights.py", "measure_eplb.py"):
        shutil.copy(HERE / module, site)
    shutil.copy(HERE / "interpreted_triton.py", site / "sitecustomize.py")
    add_shim(site, "eplb_cpu_host", SHIM)
    return site


def add_shim(site, name, entry_points):
    """Register a test shim as an installed engine plugin."""
    metadata = site / f"{name}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="session")
def agent_site(tmp_path_factory):
    """Return the directory that ``make_agent_site`` builds."""
    return make_agent_site(tmp_path_factory.mktemp("agent"))


def made_checkpoint(folder, *kind):
    """Write a tiny checkpoint in Hugging Face format, by default of a Qwen3-MoE model."""
    make = [python_of(VLLM_032), HERE / "make_checkpoint.py", folder, *kind]
    subprocess.run(make, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a tiny Qwen3-MoE checkpoint."""
    return made_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def service(tmp_path, request):
    """Start a service that decides every 32 steps, or one with the options in the test's parameter."""
    options = getattr(request, "param", DECIDE_OFTEN).split()
    with Service(tmp_path, "--store", str(tmp_path / "store.sqlite3"), *options) as running:
        yield running


def engine_environment(site, **overrides):
    """Return the environment variables of an engine process on CPU, with ``site`` on its path."""
    settings = {
        "PYTHONPATH": str(site),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "EPLB_AGENT_DATA_HOST": "127.0.0.1",
        "EPLB_AGENT_VERIFY_TRANSFERS": "true",
        # These tests need many switches in few steps, so plans should not wait long for their first vote.
        "EPLB_AGENT_VOTE_INTERVAL": "1",
    }
    return {**os.environ, **settings, **overrides}


class EngineRun:
    """One engine process that generates several rounds of answers. Its log and answers are in ``folder``."""

    def __init__(self, python, script, folder, checkpoint, options, environment):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "engine.log"
        self._answers = folder / "answers.json"
        command = [python, HERE / script, checkpoint, self._answers, json.dumps(options)]
        self._process = start_engine(command, environment, self.log)

    def wait_for(self, line, seconds=600):
        """Wait until the engine has printed ``line``."""
        deadline = time.monotonic() + seconds
        while line not in self.log.read_text():
            assert self._process.poll() is None, self.tail()
            assert time.monotonic() < deadline, (
                f"the engine has not printed {line!r} within {seconds} s: {self.tail()}"
            )
            time.sleep(0.2)

    def wait_for_another_round(self):
        """Wait until the engine has answered one more round of requests."""
        self.wait_for(f"ROUND {self.log.read_text().count('ROUND ')} ")

    def workers(self):
        """Return the process ids of the engine's workers: the deepest descendants whose names mark them as workers."""
        worker_pids = []
        parents = [self._process.pid]
        while parents:
            listed = subprocess.run(
                ["ps", "-o", "pid=,args=", "--ppid", ",".join(map(str, parents))],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            lines = [line.split(maxsplit=1) for line in listed.splitlines()]
            parents = [int(pid) for pid, _ in lines]
            worker_pids += [int(pid) for pid, name in lines if name.startswith("VLLM::Worker")]
        return worker_pids

    def answers(self, seconds=900):
        """Wait until the engine has exited successfully, and return ``[ids, logprobs]`` of every request."""
        status = self._process.wait(seconds)
        assert status == 0, self.tail()
        return json.loads(self._answers.read_text())

    def failure(self, seconds=600):
        """Return the output of an engine that should fail to start."""
        assert self._process.wait(seconds) != 0, self.tail()
        return self.log.read_text()

    def tail(self):
        """Return the end of the engine's log."""
        return self.log.read_text()[-6000:]

    def stop(self):
        """Stop the engine and its workers if they are still running."""
        end_engine(self._process)


@pytest.fixture
def stop_at_end():
    """Return a function that registers an engine run to be stopped at the end of the test."""
    with ExitStack() as stack:
        yield lambda run: stack.callback(run.stop) and run


@pytest.fixture
def run_vllm(agent_site, checkpoint, tmp_path, stop_at_end):
    """Return a function that starts engines."""

    def start(engine, options, name="balanced", model=checkpoint, **environment):
        settings = engine_environment(agent_site, **UNCOMPILED, **environment)
        python = python_of(engine)
        return stop_at_end(EngineRun(python, "generate_vllm.py", tmp_path / name, model, options, settings))

    return start


@pytest.fixture
def serve_vllm(agent_site, checkpoint, tmp_path, stop_at_end):
    """Return a function that starts servers."""

    def start(engine, options, model=checkpoint, **environment):
        settings = engine_environment(agent_site, **UNCOMPILED, **environment)
        log = tmp_path / "server" / "server.log"
        command = [*TOKEN_IDS_ALONE, *options]
        return stop_at_end(OpenAiServer(python_of(engine), log, model, command, settings))

    return start


ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_NCCL_SO_PATH": "/nonexistent.so"}
SGLANG_SHIM = """
[sglang.srt.plugins]
eplb_cpu_host = sglang_on_cpu:register
"""


@pytest.fixture(scope="session")
def sglang_site(tmp_path_factory):
    """Like ``agent_site``, but with the SGLang shim and stand-ins for accelerator-only packages."""
    site = make_agent_site(tmp_path_factory.mktemp("sglang"))
    for module in ("sglang_on_cpu.py", "stand_ins.py"):
        shutil.copy(HERE / module, site)
    shutil.copy(HERE / "absent_on_cpu.py", site / "sitecustomize.py")
    add_shim(site, "eplb_sglang_on_cpu", SGLANG_SHIM)
    return site


@pytest.fixture
def run_sglang(sglang_site, checkpoint, tmp_path, stop_at_end):
    """Return a function that starts engines."""

    def start(options, name="balanced", engine=SGLANG_0523, model=checkpoint, **environment):
        ranks = options.get("engine", {}).get("tp_size", 1)
        threads = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0", "1"][:ranks])}
        settings = engine_environment(sglang_site, **ON_CPU, **UNCOMPILED, **threads, **environment)
        python = python_of(engine)
        folder = tmp_path / name
        return stop_at_end(EngineRun(python, "generate_sglang.py", folder, model, options, settings))

    return start


@pytest.fixture(scope="session")
def many_experts(tmp_path_factory):
    """Return a checkpoint with 32 experts and skewed routers."""
    return made_checkpoint(tmp_path_factory.mktemp("many"), "many")


def warm(engine, site):
    """Compile the planner's kernels for the engine's Python, so that the engine's first decision is not late."""
    code = "from eplb_core.solver.warmup import warm_up; warm_up(1)"
    subprocess.run([python_of(engine), "-c", code], check=True, env={"PYTHONPATH": str(site)})


def with_own_eplb(ranks, redundant, window):
    """Return the options of a vLLM engine whose own synchronous EPLB rearranges experts every ``window`` steps."""
    eplb = {"num_redundant_experts": redundant, "use_async": False, "communicator": "torch_gloo"}
    return {
        "tensor_parallel_size": ranks,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "max_num_seqs": 24,
        "eplb_config": eplb | {"window_size": window, "step_interval": window},
    }
