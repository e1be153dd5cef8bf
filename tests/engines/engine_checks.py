"""Checks of answers, switches and heat, shared by the tests of real engines."""

import json
import subprocess

from eplb_service.cli.main import run
from eplb_service.io.open_trace import open_trace
from tests.engines.environments import python_of

OBSERVE = {"EPLB_AGENT_MODE": "observe"}

SMALLEST_DIFFERENCE_THAT_MATTERS = 1e-4
"""Difference of log-probabilities in float32. A moved expert changes the summation order of its outputs."""
WITHOUT_WEIGHTS = {"EPLB_AGENT_VERIFY_TRANSFERS": "false", "EPLB_TEST_COMMIT_WITHOUT_WEIGHTS": "1"}
"""Environment that enables a bug which every comparison of answers must detect.

Checksums are off because they would stop the agent first.
"""
MAX_LOST = 2.0
"""Maximum number of heat steps lost per step received.

The engine runs 250 passes per second. The main threads of tensor-parallel ranks spin while they wait, so on two cores
the service is sometimes not scheduled for several seconds, and the agents drop the oldest heat.
"""
LARGEST_DIFFERENCE_OF_A_TIE = 0.02
MAX_TIES = 0.01
"""Maximum share of answers with a different token.

With 32 experts, about two pairs of router scores per run are equal to within rounding, and a moved expert changes the
order of a sum. The checkpoint with 8 experts has no such ties.
"""


def check_same_answers(balanced, alone, most_ties=0.0):
    """Check that all tokens are equal and that their log-probabilities differ only by rounding, except for ties."""
    assert [ids for ids, _ in balanced] == [ids for ids, _ in alone]
    apart = sorted(
        abs(balanced_logprob - alone_logprob)
        for (_, balanced_logprobs), (_, alone_logprobs) in zip(balanced, alone, strict=True)
        for balanced_logprob, alone_logprob in zip(balanced_logprobs, alone_logprobs, strict=True)
    )
    ties = sum(difference >= SMALLEST_DIFFERENCE_THAT_MATTERS for difference in apart)
    assert ties <= most_ties * len(apart), (
        f"{ties} of {len(apart)} tokens differ; largest differences: {apart[-5:]}"
    )
    assert apart[-1] < LARGEST_DIFFERENCE_OF_A_TIE
    worst = apart[len(apart) - 1 - ties]
    print(
        f"{len(apart)} tokens equal those of the unmodified engine; log-probabilities differ by at most {worst:.2g}"
    )
    if ties:
        print(f"except for {ties} tokens, which differ by at most {apart[-1]:.2g}")


def check_switches(service, least, log):
    """Check that at least ``least`` layers have switched and return the status.

    Fail with the engine's log otherwise.
    """
    status = service.status().status
    print(f"{status.layers_switched} layer switches, {status.experts_moved} experts moved")
    assert status.layers_switched >= least, log
    return status


def has_damaged_experts(status):
    """Return True if a layer has switched and the agents report a damaged expert, or if five layers have switched."""
    switched = status.status.layers_switched
    reported = any("differs from its replica" in problem for problem in status.status.problems)
    return switched >= 5 or (switched > 0 and reported)


def check_heat(status, service):
    """Check that few heat steps were lost. The service counts the steps that a busy machine loses."""
    print(f"{status.steps_received} steps arrived complete, {status.steps_lost} were lost")
    why = [line for line in service.log.read_text().splitlines() if "heat_lost" in line or "agent_" in line]
    assert status.steps_lost <= MAX_LOST * status.steps_received, "\n".join(why)


def check_observed(service, folder, steps=64):
    """Check that a service measures an observed deployment without planning for it.

    Also run ``eplb advise`` on a recording of its heat.
    """
    service.wait_until(lambda status: status.status.observed and status.status.window_steps >= 64, 900)
    path = folder / "observed.zarr"
    record(service, path, steps)
    # While an engine's own EPLB moves experts, the service waits for the ranks' new layout and does not know the PAR.
    status = service.wait_until(lambda status: status.status.par > 1, 900).status
    print(
        f"PAR {status.par:.3f}; {status.steps_received} steps arrived complete, {status.steps_lost} were lost"
    )
    assert (status.layers_switched, status.plan_id, status.last_decision) == (0, 0, "")
    check_trace(path)


def record(service, path, steps):
    """Record the heat of the next steps."""
    recording = ["default", "--out", str(path), "--steps", str(steps), "--address", service.address]
    assert run(["trace", "record", *recording]) == 0


def check_trace(path):
    """Check that a recording has the same number of choices in every layer, and run ``eplb advise`` on it.

    Return the number of choices per step and layer.
    """
    trace = open_trace(path)
    heat_TLE = trace.heat(0, trace.steps)
    chosen_TL = heat_TLE.sum(axis=2)
    assert (chosen_TL > 0).all()
    assert (chosen_TL == chosen_TL[:, :1]).all()
    assert run(["advise", "--heat", str(path), "--ranks", "2", "--redundant", "0,2"]) == 0
    return chosen_TL


def check_without_a_service(log, path):
    """Check the log lines and the trace file of an engine that is observed without a service."""
    lines = [line for line in log.read_text().splitlines() if " (PAR) over " in line]
    assert lines, log.read_text()[-6000:]
    print(lines[-1])
    for part in ("imbalance ", "hottest rank ", "layer ", " tokens, ", " ms a step"):
        assert part in lines[-1]
    check_trace(path)


def in_engine(engine, site, code, **environment):
    """Run ``code`` with the engine's interpreter and the agent on its path."""
    settings = {"PYTHONPATH": str(site), "VLLM_PLUGINS": "", "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        [python_of(engine), "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=settings,
        timeout=600,
    )


def figures(path):
    """Return the mean imbalance after the first rearrangement, and the number of experts fetched in each rearrangement.

    The imbalance is ``None`` if it was not measured.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    fetched = [line["fetched"] for line in lines if "fetched" in line]
    first = next(index for index, line in enumerate(lines) if "fetched" in line)
    imbalance = [line["imbalance"] for line in lines[first:] if "imbalance" in line]
    return sum(imbalance) / len(imbalance) if imbalance else None, fetched
