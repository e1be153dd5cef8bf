"""``eplb-agent-doctor``: run inside an engine's environment, before the engine; exit code 1 where something fails."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict

import torch

from worker_agent.doctor.environment import environment
from worker_agent.doctor.finding import Finding, Verdict

_LONGEST_SECONDS = 300
_DESCRIPTION = (
    "Checks an engine's environment: versions, the engine's functions, the service, and experts that change ranks "
    "and come back on this machine's devices, with votes, checksums and a captured graph. Run it before the engine."
)


def main(arguments: list[str] | None = None) -> None:
    """Print a line per finding."""
    options = _parser().parse_args(arguments)
    findings = []
    for finding in _findings(options):
        findings.append(finding)
        if not options.json:
            print(f"{finding.verdict.value:<8} {finding.name:<24} {finding.text}", flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    sys.exit(any(finding.verdict is Verdict.FAILED for finding in findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eplb-agent-doctor", description=_DESCRIPTION)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start here, a device each (2)")
    parser.add_argument(
        "--device",
        default=None,
        help="cpu, cuda or npu; by default the accelerator that torch sees, else cpu",
    )
    parser.add_argument(
        "--expert-bytes", type=int, default=64 << 20, help="size of the experts that are moved (64 MiB)"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    return parser


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from environment()
    yield from _round_trip(options.ranks, options.device or _accelerator(), options.expert_bytes)


def _accelerator() -> str:
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def _round_trip(ranks: int, device: str, expert_bytes: int) -> Iterator[Finding]:
    """Findings of all ranks, each once: what fails on any rank, else what the first one says."""
    devices = ranks if device == "cpu" else torch.get_device_module(device).device_count()
    variables = os.environ.copy()
    if devices == 0:
        yield Finding.failed("devices", f"torch sees no {device} here; --device names another kind")
        return
    if devices < ranks:
        variables.setdefault("EPLB_AGENT_TRANSFER_BACKEND", "gloo")
        yield Finding.ok(
            "devices",
            f"{ranks} ranks on {devices} {device}: experts go by way of the host, not by its own links",
        )
    with tempfile.TemporaryDirectory(prefix="eplb-doctor-") as folder:
        command = [sys.executable, "-m", "worker_agent.doctor.round_trip", f"file://{folder}/meet"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), _device(device, rank % devices), str(expert_bytes)],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            ended = [process.communicate(timeout=_LONGEST_SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            yield Finding.failed("ranks", f"not done within {_LONGEST_SECONDS} s")
            return
        finally:
            for process in processes:
                process.kill()
    found = [_of_rank(rank, *output) for rank, output in enumerate(ended)]
    failed = [one for findings in found for one in findings if one.verdict is Verdict.FAILED]
    yield from failed or found[0]


def _device(device: str, rank: int) -> str:
    return device if device == "cpu" else f"{device}:{rank}"


def _of_rank(rank: int, output: str, errors: str) -> list[Finding]:
    try:
        entries = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return [Finding.failed("ranks", f"rank {rank} ended: {errors.strip()[-500:] or 'without a word'}")]
    return [Finding(entry["name"], Verdict(entry["verdict"]), entry["text"]) for entry in entries]


if __name__ == "__main__":
    main()
