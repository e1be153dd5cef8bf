"""One rank of the benchmark: serves with and without an agent by turns, and times the parts of a switch."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.switch.host import overhead
from benchmarks.switch.parts import commit, transfer
from benchmarks.switch.serving import serving


def main() -> None:
    """``python -m benchmarks.switch.rank RENDEZVOUS RANK RANKS OPTIONS``; rank 0 prints JSON."""
    rendezvous, rank, ranks, options = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        json.loads(sys.argv[4]),
    )
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    size = (options["hidden"], options["intermediate"])
    os.environ.setdefault("EPLB_AGENT_SERVICE", "127.0.0.1:9")
    ratios, figures = serving(64, 32, ranks, options["pairs"])
    device = torch.device(options["device"])
    if device.type != "cpu" and torch.get_device_module(device).device_count() < ranks:
        os.environ["EPLB_AGENT_TRANSFER_BACKEND"] = "gloo"  # collectives of devices take one rank on each
    # As beside a service that keeps up: memory of reports that are gone serves the next ones.
    os.environ["EPLB_AGENT_QUEUE_REPORTS"] = "1"
    beside, more = overhead(options["pairs"], device)
    ratios.append(beside)
    figures |= more
    ratios.append(commit(*size, experts=4, rounds=options["rounds"], device=device))
    dist.barrier()
    moved, megabytes = transfer(*size, experts=4, rounds=options["rounds"], device=device)
    ratios.append(moved)
    figures["transfer_megabytes_per_second"] = megabytes
    if rank == 0:
        print(json.dumps({"ratios": [dataclasses.asdict(ratio) for ratio in ratios], "figures": figures}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
