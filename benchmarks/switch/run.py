"""What the layer switch costs the model, as ratios measured in one run: ``make bench-switch``.

Two real ranks serve small layers with an agent and without, by turns. Then come the calls of a host with 58 layers, a
commit against a plain copy of as many bytes, and a transfer against one plain send of as many over the same link.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.switch.ratios import Ratio


def main() -> None:
    """Start the ranks, print the ratios, and with ``--json`` write them; exit code 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, default=2, help="rank processes; one core each, or times mean little (2)"
    )
    parser.add_argument("--pairs", type=int, default=600, help="steps with and without the agent (600)")
    parser.add_argument("--rounds", type=int, default=40, help="commits and transfers timed (40)")
    parser.add_argument("--hidden", type=int, default=2048, help="H of the experts that are moved (2048)")
    parser.add_argument("--intermediate", type=int, default=768, help="I of the experts that are moved (768)")
    parser.add_argument("--device", default="cpu", help="where the 58-layer host and moved experts are (cpu)")
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    arguments = parser.parse_args()
    options = {
        name: getattr(arguments, name) for name in ("pairs", "rounds", "hidden", "intermediate", "device")
    }
    with tempfile.TemporaryDirectory(prefix="eplb-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.switch.rank", f"{folder}/meet"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(arguments.ranks), json.dumps(options)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(arguments.ranks)
        ]
        reported = [process.communicate(timeout=900)[0] for process in ranks]
        if any(process.returncode for process in ranks):
            sys.exit("a rank failed")
    found = json.loads(reported[0])
    ratios = [Ratio(**ratio) for ratio in found["ratios"]]
    for ratio in ratios:
        print(ratio.line)
    for name, value in found["figures"].items():
        print(f"{name:<58}{value:>12.3f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(ratio.ratio > ratio.target for ratio in ratios))


if __name__ == "__main__":
    main()
