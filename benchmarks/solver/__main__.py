"""Runs the solver and its peers on the same heat and prints a table: ``python -m benchmarks.solver``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.solver.heat_kinds import KINDS, SHAPES, generate
from benchmarks.solver.peers import PEERS, Balancer, fetch
from eplb_service.heat.window import Window
from eplb_service.placement import Placement
from eplb_service.planner.decide import plan_afresh
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.solver.warmup import warm_up

WINDOW = 256


def ours(**options: object) -> Balancer:
    """Every layer placed anew by the planner, in default settings but for ``options`` and one thread."""
    settings = PlannerSettings(threads=1, **options)

    def balance(heat_TLE: np.ndarray, placement_LRS: np.ndarray) -> np.ndarray:
        deployed = Placement(placement_LRS, heat_TLE.shape[2])
        decided = plan_afresh(Window(heat_TLE), deployed, Topology.flat(deployed.ranks), settings)
        placed_LRS = placement_LRS.copy()
        for changed in decided.layers:
            placed_LRS[changed.layer] = changed.phy2log_RS
        return placed_LRS

    return balance


def even_par(heat_TLE: np.ndarray, placement_LRS: np.ndarray) -> float:
    """Peak-to-average ratio per step, experts split evenly over their copies, mean over layers."""
    ratios = []
    for layer, placed_RS in enumerate(placement_LRS):
        copies_E = np.bincount(placed_RS.ravel(), minlength=heat_TLE.shape[2])
        load_TR = (heat_TLE[:, layer][:, placed_RS] / copies_E[placed_RS]).sum(axis=2)
        ratios.append((load_TR.max(axis=1) / load_TR.mean(axis=1)).mean())
    return float(np.mean(ratios))


def cells(shapes: list[tuple[int, int, int, int]], repeats: int) -> Iterator[dict[str, object]]:
    """One row for each shape, kind of heat and balancer."""
    balancers: dict[str, Balancer] = {
        "ours": ours(),
        "ours, no tree search": ours(tree_search=False),
        "ours, no local search": ours(local_search=False),
        "ours, one episode": ours(episodes=1),
    }
    balancers |= {name: make() for name, make in PEERS.items()}
    for layers, experts, ranks, slots in shapes:
        for kind in KINDS:
            heat_TLE = generate(kind, layers, experts, 2 * WINDOW)
            seen, following = heat_TLE[:WINDOW], heat_TLE[WINDOW:]
            first_LRS = Placement.linear(layers, experts, ranks, slots).phy2log_LRS
            for name, balance in balancers.items():
                seconds = []
                for _ in range(repeats):
                    began = time.process_time()
                    found_LRS = balance(seen, first_LRS)
                    seconds.append(time.process_time() - began)
                yield {
                    "shape": f"{layers}x{experts}x{ranks}x{slots}",
                    "kind": kind,
                    "balancer": name,
                    "in_sample": even_par(seen, found_LRS),
                    "next_window": even_par(following, found_LRS),
                    "slots_moved": float((found_LRS != first_LRS).mean()),
                    "cpu_seconds": min(seconds),
                }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=__doc__)
    parser.add_argument(
        "--index", default="https://pypi.org/simple", help="package index to fetch peers from"
    )
    parser.add_argument("--shapes", type=int, nargs="*", default=[1, 2], help=f"which of {SHAPES}, from 0")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each cell; the fastest counts")
    parser.add_argument("--json", type=Path, help="write all rows here")
    options = parser.parse_args()
    fetch(options.index)
    warm_up(threads=1)
    rows = []
    print(
        f"{'shape':>14} {'kind':>7} {'balancer':>28} {'in sample':>9} {'next':>7} {'moved':>6} {'CPU s':>7}"
    )
    for row in cells([SHAPES[at] for at in options.shapes], options.repeats):
        rows.append(row)
        print(
            f"{row['shape']:>14} {row['kind']:>7} {row['balancer']:>28} {row['in_sample']:9.4f} "
            f"{row['next_window']:7.4f} {row['slots_moved']:6.0%} {row['cpu_seconds']:7.3f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
