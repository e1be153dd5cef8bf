"""Measure what a layer switch costs the model, as ratios within one run: ``make bench-switch``.

Two real ranks serve small layers alternately with and without an agent. The benchmark then measures the calls of a host
with 58 layers, a commit against a plain copy of the same size, a transfer against a plain send of the same size over
the same link, and the model's exchanges during transfers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from benchmarks.switch.host import overhead
from benchmarks.switch.link import beside_transfers
from benchmarks.switch.parts import commit, transfer
from benchmarks.switch.ratios import Ratio
from benchmarks.switch.serving import serving


def main() -> None:
    """Start the ranks and print the ratios. Exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, default=2, help="rank processes; each needs its own core for reliable times (2)"
    )
    parser.add_argument("--pairs", type=int, default=600, help="timed steps with and without the agent (600)")
    parser.add_argument("--rounds", type=int, default=40, help="number of timed commits and transfers (40)")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size of the moved experts (2048)")
    parser.add_argument(
        "--intermediate", type=int, default=768, help="intermediate size of the moved experts (768)"
    )
    parser.add_argument(
        "--device", default="cpu", help="device of the 58-layer host and the moved experts (cpu)"
    )
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eplb-bench-") as folder:
        processes.spawn(_measure, (Path(folder), options), nprocs=options.ranks)
        results = json.loads((Path(folder) / "results.json").read_text())
    ratios = [Ratio(**ratio) for ratio in results["ratios"]]
    for ratio in ratios:
        print(ratio.line)
    for name, value in results["figures"].items():
        print(f"{name:<58}{value:>12.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(ratio.ratio > ratio.target for ratio in ratios))


def _measure(rank: int, folder: Path, options: Any) -> None:
    """Run all measurements on one rank. Rank 0 writes the results."""
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    torch.set_num_threads(1)
    rendezvous: dict[str, Any] = {
        "init_method": f"file://{folder}/rendezvous",
        "rank": rank,
        "world_size": options.ranks,
    }
    dist.init_process_group("gloo", **rendezvous, timeout=timedelta(minutes=5))
    device = torch.device(options.device)
    if device.type != "cpu" and torch.get_device_module(device).device_count() < options.ranks:
        os.environ["EPLB_AGENT_TRANSFER_BACKEND"] = (
            "gloo"  # device collectives allow only one rank per device
        )
    moved = {"hidden": options.hidden, "intermediate": options.intermediate, "experts": 4}
    ratios, figures = serving(64, 32, options.ranks, options.pairs)
    host_ratio, host_figures = overhead(options.pairs, device)
    ratios += [host_ratio, commit(**moved, rounds=options.rounds, device=device)]
    dist.barrier()
    transfers, megabytes = transfer(**moved, rounds=options.rounds, device=device)
    figures |= {**host_figures, "transfer_megabytes_per_second": megabytes, **beside_transfers(options.pairs)}
    if rank == 0:
        results = {
            "ratios": [dataclasses.asdict(ratio) for ratio in (*ratios, *transfers)],
            "figures": figures,
        }
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
