"""Tests of ``eplb prove`` beside a real vLLM that serves requests: it agrees with the service and changes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest

from eplb_service.io.open_trace import open_trace
from tests.engines.conftest import with_own_eplb
from tests.engines.engine_checks import MAX_TIES, OBSERVE, figures
from tests.engines.environments import VLLM_032
from tests.engines.generate_vllm import DIFFERENT_ROUNDS, prompts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

DEPLOYMENT = "default"
LOAD = {"requests": 24, "max_tokens": 48, "rounds": DIFFERENT_ROUNDS}
WINDOW = 64
SCHEDULE = ("--window", WINDOW, "--interval", WINDOW)
STEPS = 576
SHORT = 2 * WINDOW
"""Steps of the shortest possible recording: a window, and the minimum number of scored steps."""
ARMS = ["off", "deepseek", "ours", "as served", "forced balance"]
NEAR = 0.05
"""Maximum difference between PARs that are averaged over different parts of about the same steps."""
MEASURED_NEAR = 0.03
"""Maximum difference from the PAR that the engine itself measures, token by token, over its whole run."""


def started(folder, *arguments):
    """Start ``eplb prove`` in ``folder``."""
    command = [
        sys.executable,
        "-m",
        "eplb_service.cli.main",
        "prove",
        *map(str, arguments),
        *map(str, SCHEDULE),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, "--json"], cwd=folder, text=True, **pipes)


def document(process):
    """Wait for the command to succeed, and return its JSON document with the arms keyed by name."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    result = json.loads(out)
    for line in result["conclusions"]:
        print(line)
    return result | {"arms": {arm["arm"]: arm for arm in result["arms"]}}


@contextmanager
def requests_to(server):
    """Send requests, one round after the other, until the end of the block. Yields the growing list of answers."""
    answers = []
    enough = threading.Event()

    def send():
        for turn in count():
            if enough.is_set():
                return
            wave = prompts(LOAD["requests"], seed=turn % DIFFERENT_ROUNDS + 1)
            answers.extend(server.answers(wave, LOAD["max_tokens"]))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        try:
            yield answers
        finally:
            enough.set()
        sending.result()


def options(ranks):
    """Return the command-line options of a server with the EPLB of ``with_own_eplb``."""
    config = with_own_eplb(ranks, redundant=2 * ranks, window=WINDOW)["eplb_config"]
    flags = ["--max-num-seqs", "24", "--enable-expert-parallel", "--enable-eplb"]
    return ["-tp", str(ranks), *flags, "--eplb-config", json.dumps(config)]


def mean_par(service, process):
    """Return the mean of the PAR that the service reports until ``process`` has ended.

    The service reports 0 while ranks announce a new placement.
    """
    pars = []
    while process.poll() is None:
        pars.append(service.status().status.par)
        time.sleep(0.5)
    measured = [par for par in pars if par > 0]
    return sum(measured) / len(measured)


def check_page(page):
    """Check that a page is complete and loads nothing from the network. It must not show times: none were measured."""
    html = page.read_text()
    assert html.rstrip().endswith("</html>")
    assert not re.search(r"href|url\(|@import|http|<script", html)
    assert "<td>as served</td>" in html
    assert "MoE ms" not in html


def test_a_balanced_server_is_compared_with_the_other_arms(
    serve_vllm, run_vllm, many_experts, service, tmp_path
):
    alone = [ids for ids, _ in run_vllm(VLLM_032, LOAD, name="alone", model=many_experts).answers()]
    server = serve_vllm(VLLM_032, options(2), model=many_experts, EPLB_AGENT_SERVICE=service.address)
    server.wait_until_healthy()
    live = (DEPLOYMENT, "--address", service.address)
    with requests_to(server) as answers:
        service.wait_until(lambda status: status.status.layers_switched > 0, 600)
        answered = len(answers)
        service.wait_until(lambda _: len(answers) > answered, 600)
        balanced = answers[: len(alone)]
        (tmp_path / "balanced.json").write_text(json.dumps(balanced))
        (tmp_path / "alone.json").write_text(json.dumps(alone[: len(balanced)]))
        moved_before = service.status().status.experts_moved
        kept = ("--steps", STEPS, "--recording", "heat.zarr", "--report", "proof.html")
        proving = started(tmp_path, *live, *kept, "--answers", "balanced.json", "alone.json")
        par = mean_par(service, proving)
        proof = document(proving)
        moved = service.status().status.experts_moved - moved_before
        service.pause(DEPLOYMENT)
        before = service.wait_until(lambda status: not status.status.plan_id).status
        document(started(tmp_path, *live, "--steps", SHORT))
        after = service.status().status
    arms = proof["arms"]
    print(f"PAR as served {arms['as served']['par']:.3f}, {par:.3f} in the service's status")
    assert list(arms) == ARMS
    assert (proof["ranks"], proof["steps"]) == (2, STEPS - WINDOW)
    assert abs(arms["as served"]["par"] - par) < NEAR
    assert arms["as served"]["moves"] <= moved
    assert all(arm["moe_ms"] is arm["saved_ms"] is None for arm in arms.values())
    assert proof["answers"]["requests"] == len(balanced) >= LOAD["requests"]
    assert proof["answers"]["equal"] >= (1 - MAX_TIES) * proof["answers"]["requests"]
    check_page(tmp_path / "proof.html")
    assert open_trace(tmp_path / "heat.zarr").facts.split == "even"
    assert document(started(tmp_path, "--heat", "heat.zarr"))["arms"] == arms
    assert (after.paused, after.digest, after.epoch) == (True, before.digest, before.epoch)


def test_an_observed_server_is_compared_with_its_own_balancer(serve_vllm, many_experts, service, tmp_path):
    measured = tmp_path / "measured.jsonl"
    agent = OBSERVE | {"EPLB_AGENT_SERVICE": service.address, "EPLB_TEST_MEASURE": str(measured)}
    server = serve_vllm(VLLM_032, options(4), model=many_experts, **agent)
    server.wait_until_healthy()
    with requests_to(server):
        service.wait_until(lambda status: status.status.observed and status.status.epoch > 0, 900)
        live = (DEPLOYMENT, "--address", service.address, "--steps", STEPS)
        proving = started(tmp_path, *live, "--report", "proof.html")
        par = mean_par(service, proving)
        arms = document(proving)["arms"]
        status = service.status().status
    in_engine, _ = figures(measured)
    print(
        f"PAR as served {arms['as served']['par']:.3f}, {par:.3f} in the status, {in_engine:.3f} in the engine"
    )
    assert list(arms) == ARMS
    assert arms["as served"]["moves"] > 0
    assert arms["as served"]["gain"]["low"] > 0
    assert arms["ours"]["gain"]["low"] > 0
    assert abs(arms["as served"]["par"] - in_engine) < MEASURED_NEAR
    assert abs(arms["as served"]["par"] - par) < NEAR
    assert abs(arms["as served"]["par"] - arms["deepseek"]["par"]) < NEAR
    assert (status.layers_switched, status.plan_id) == (0, 0)
    check_page(tmp_path / "proof.html")
