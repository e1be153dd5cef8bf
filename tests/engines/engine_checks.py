"""Checks of answers, switches and heat, shared by the tests of real engines."""

import subprocess

from tests.engines.environments import python_of

SMALLEST_DIFFERENCE_THAT_MATTERS = 1e-4
"""Difference of log-probabilities in float32. A moved expert changes the summation order of its outputs."""
WITHOUT_WEIGHTS = {"EPLB_AGENT_VERIFY_TRANSFERS": "false", "EPLB_TEST_COMMIT_WITHOUT_WEIGHTS": "1"}
"""Enables a bug that every comparison of answers must detect.

Checksums are off because they would stop the agent first.
"""
MAX_LOST = 2.0
"""Maximum number of lost steps of heat per received step.

The engine runs 250 passes per second. The main threads of tensor-parallel ranks spin while they wait, so on two cores
the service sometimes does not run for seconds, and the agents drop the oldest heat.
"""
LARGEST_DIFFERENCE_OF_A_TIE = 0.02


def check_same_answers(balanced, alone, most_ties=0.0):
    """Check that all tokens are equal and that their log-probabilities differ only by rounding, except for ties."""
    assert [ids for ids, _ in balanced] == [ids for ids, _ in alone]
    apart = sorted(
        abs(here - there)
        for (_, some), (_, others) in zip(balanced, alone, strict=True)
        for here, there in zip(some, others, strict=True)
    )
    ties = sum(difference >= SMALLEST_DIFFERENCE_THAT_MATTERS for difference in apart)
    assert ties <= most_ties * len(apart)
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


def check_heat(status, service):
    """Check that few steps of heat were lost. A busy machine may lose some, which the service counts."""
    print(f"{status.steps_received} steps arrived completely, {status.steps_lost} were lost")
    why = [line for line in service.log.read_text().splitlines() if "heat_lost" in line or "agent_" in line]
    assert status.steps_lost <= MAX_LOST * status.steps_received, "\n".join(why)


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
