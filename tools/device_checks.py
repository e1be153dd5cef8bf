"""Run every check that needs a GPU or NPU, in at most eight minutes: ``make device-checks``.

Each check runs in its own process with its own time limit. The exit code is 0 if no check fails, 1 if a check fails or
no time is left for it, and 2 if torch finds no device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker_agent.doctor import FAILED, SKIPPED

MAX_SECONDS = 480.0
PASSED = "passed"
_LAYERS = 58
_EXPERTS = 256
_TOKENS = 64
_TOP_K = 8
_HIDDEN = 2048
_INTERMEDIATE = 768
_MOVED = 4
_ROUNDS = 20
_WIDTH = 120
_ENVIRONMENT = ("versions", "engine", "service")
_NO_TESTS = 5
"""Exit code of pytest if no test is selected."""


@dataclass(frozen=True)
class Check:
    """A check's command, and its time limit in seconds.

    The last line of the command's output is shown in the table.
    """

    name: str
    command: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Row in the results table."""

    name: str
    verdict: str
    seconds: float
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, or run one part in this process, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "npu"), help="device type (default: detected by torch)"
    )
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = options.device or _available_device()
    if device is None:
        print("torch finds no GPU or NPU on this machine, so no check was run.")
        return 2
    if options.part is not None:
        print(PARTS[options.part][2](torch.device(device)))
        return 0
    return report(run(checks(device), MAX_SECONDS))


def checks(device: str) -> list[Check]:
    """Return all checks for a device type, most important first."""
    module = [sys.executable, "-m", "tools.device_checks", "--device", device, "--part"]
    pytest = [sys.executable, "-m", "pytest"]
    return [
        *(Check(name, [*module, check], seconds) for check, (name, seconds, _) in PARTS.items()),
        Check("captured graphs", [*pytest, "-m", "device", "tests/moe", "tests/e2e"], 200),
        Check("lanes between devices", [*pytest, "-k", "cuda", "tests/swap/test_lanes.py"], 60),
    ]


def run(planned: Sequence[Check], seconds: float) -> list[Outcome]:
    """Run the checks one after the other within ``seconds`` of wall time."""
    end = time.monotonic() + seconds
    outcomes = []
    for check in planned:
        began = time.monotonic()
        allowed = min(check.seconds, end - began)
        verdict, text = _run_check(check, allowed) if allowed > 0 else (FAILED, "no time left")
        outcomes.append(Outcome(check.name, verdict, time.monotonic() - began, text))
        print(f"{check.name}: {verdict}", flush=True)
    return outcomes


def report(outcomes: Sequence[Outcome]) -> int:
    """Print the table. Return 1 if a check failed, else 0."""
    print()
    for row in outcomes:
        print(f"{row.verdict:<8} {row.name:<32} {row.seconds:>6.1f} s  {row.text[:_WIDTH]}")
    return int(any(row.verdict == FAILED for row in outcomes))


def _available_device() -> str | None:
    npu = getattr(torch, "npu", None)
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if npu is not None and npu.is_available() else None


def _run_check(check: Check, seconds: float) -> tuple[str, str]:
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(check.command, **pipes, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # The ranks that the check started are in its process group and would keep the device busy.
            os.killpg(process.pid, signal.SIGKILL)
            return FAILED, f"timed out after {seconds:.0f} s"
    text = _last(output)
    if process.returncode not in (0, _NO_TESTS):
        print(output[-4000:], errors[-4000:], sep="\n", flush=True)
        return FAILED, _last(errors) or text
    skipped = process.returncode == _NO_TESTS or (" skipped" in text and " passed" not in text)
    return SKIPPED if skipped else PASSED, text


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def transfers(device: torch.device) -> str:
    """Move experts to other ranks and back, with checksums. With several devices, the experts move over their links."""
    count = 1 if device.type == "cpu" else int(torch.get_device_module(device).device_count())
    command = [sys.executable, "-m", "worker_agent.doctor", "--json", "--device", device.type]
    ranks = max(2, min(count, 8))
    done = subprocess.run([*command, "--ranks", str(ranks)], capture_output=True, text=True, check=False)
    return of_round_trip(done.stdout or done.stderr)


def of_round_trip(output: str) -> str:
    """Return the doctor's findings about the devices. Findings about the environment and the service are ignored.

    Raises ``RuntimeError`` if the round trip did not succeed.
    """
    try:
        findings = [row for row in json.loads(output) if row["name"] not in _ENVIRONMENT]
    except ValueError:
        raise RuntimeError(_last(output)) from None
    failed = [row for row in findings if row["verdict"] == FAILED]
    text = "; ".join(f"{row['name']}: {row['text']}" for row in failed or findings)
    if failed or not findings:
        raise RuntimeError(text or "the doctor did not test the devices")
    return text


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def staging(device: torch.device) -> str:
    """Reserve staging, and check that transfers that fit in it allocate no memory."""
    from worker_agent.swap.staging import Staging

    weights = [torch.zeros((16, _HIDDEN, _INTERMEDIATE), dtype=torch.int8, device=device) for _ in range(2)]
    reserved_staging = Staging()
    reserved = [buffer.data_ptr() for buffer in reserved_staging.reserve([weights], [16])[0]]
    before = _allocated(device)
    for rows in (1, 7, 16):
        if [buffer.data_ptr() for buffer in reserved_staging.reserve([weights], [rows])[0]] != reserved:
            raise RuntimeError(f"staging for {rows} experts lies outside the memory that was reserved for 16")
    if _allocated(device) != before:
        raise RuntimeError("a transfer that fits in the reserved staging allocated device memory")
    return (
        f"{reserved_staging.nbytes / 2**20:.0f} MiB reserved once and used for transfers of 1 to 16 experts"
    )


def _allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).memory_allocated())


def counting(device: torch.device) -> str:
    """Measure the time to count a layer's choices, including the wait for the device."""
    from worker_agent.adapters.vllm_ascend.choices import ChoiceCounter

    counter = ChoiceCounter(_LAYERS, _EXPERTS, device)
    ids_TK = torch.randint(_EXPERTS, (_TOKENS, _TOP_K), device=device, dtype=torch.int32)
    seconds = []
    for _ in range(_ROUNDS):
        counter.clear()
        _finish(device)
        began = time.perf_counter()
        for layer in range(_LAYERS):
            counter.count(layer, ids_TK)
        _finish(device)
        seconds.append(time.perf_counter() - began)
    counted = int(counter.chosen_LE.sum())
    if counted != _LAYERS * _TOKENS * _TOP_K:
        raise RuntimeError(f"counted {counted} choices instead of {_LAYERS * _TOKENS * _TOP_K}")
    return f"{sorted(seconds)[_ROUNDS // 2] / _LAYERS * 1e6:.1f} us per layer, {_LAYERS} layers of {_EXPERTS} experts"


def commit(device: torch.device) -> str:
    """Measure the time to install experts, including the wait for the device, relative to a copy of equal size."""
    from benchmarks.switch.parts import commit as timed

    ratio = timed(_HIDDEN, _INTERMEDIATE, _MOVED, _ROUNDS, device)
    return f"{1e3 * ratio.one:.2f} ms including the wait for the device, {ratio.ratio:.2f} times a plain copy"


PARTS: dict[str, tuple[str, float, Callable[[torch.device], str]]] = {
    "transfers": ("transfers, verified", 100, transfers),
    "staging": ("staging reserved", 40, staging),
    "counting": ("counting operators", 40, counting),
    "commit": ("commit of 4 experts", 40, commit),
}
"""Checks that this module runs itself: name in the table, time limit in seconds, and function that returns the text."""


if __name__ == "__main__":
    sys.exit(main())
