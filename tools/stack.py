"""Run the service, Prometheus with its rules, and balanced ranks on this machine, without containers: ``make stack``.

Press Ctrl-C to stop it, or set ``--seconds``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eplb_core.wire.channel import DEFAULT_ADDRESS
from tools.prometheus_binaries import find

METRICS = "127.0.0.1:9464"
PROMETHEUS = "127.0.0.1:9090"
_RULES = Path(__file__).parents[1] / "deploy/prometheus/rules.yml"
_STEPS = 20_000


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process while the context is active, with its output in ``log``."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def prometheus_command(program: str, folder: Path) -> list[str]:
    """Write the configuration and return the command for a Prometheus with the rules from ``deploy/``."""
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "5s"},
        "rule_files": [str(_RULES)],
        "scrape_configs": [{"job_name": "eplb", "static_configs": [{"targets": [METRICS]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    return [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={PROMETHEUS}",
    ]


def main() -> None:
    """Start all processes and wait until one exits or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    seconds = parser.parse_args().seconds
    eplb = [sys.executable, "-m", "eplb_service.cli.main"]
    serve = [*eplb, "serve", "--listen", DEFAULT_ADDRESS, "--metrics", METRICS, "--store", ":memory:"]
    serve += ["--window-steps", "64", "--decision-interval", "32", "--report-steps", "8"]
    demo = [*eplb, "demo", "--address", DEFAULT_ADDRESS, "--steps", str(_STEPS)]
    with tempfile.TemporaryDirectory(prefix="eplb-stack-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        started = [stack.enter_context(running(serve, folder / "serve.log"))]
        print(f"service      {DEFAULT_ADDRESS}, its web page at http://{METRICS}/")
        program = find("prometheus")
        if program is None:
            print("prometheus   is not installed and cannot be downloaded, so the stack runs without it")
        else:
            started.append(
                stack.enter_context(running(prometheus_command(program, folder), folder / "prometheus.log"))
            )
            print(f"prometheus   http://{PROMETHEUS}/alerts")
        started.append(stack.enter_context(running(demo, folder / "demo.log")))
        print(
            "ranks        deployment demo; `eplb top` shows it in a terminal. Ctrl-C stops everything.",
            flush=True,
        )
        until = time.monotonic() + seconds
        while time.monotonic() < until and all(process.poll() is None for process in started):
            time.sleep(0.5)
        for process in started:
            if process.poll():
                logs = {log.name: log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log")}
                sys.exit(f"{process.args[:6]} exited with code {process.returncode}: {logs}")  # type: ignore[index]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
