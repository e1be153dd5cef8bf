"""``eplb bench``: our policies beside those of vLLM, vLLM-Ascend and SGLang, on the user's own trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from eplb_core.extras import install_command
from eplb_core.placement import check_shape
from eplb_service.cli.file_options import HEAT, ReadingOptions, slots_of_redundant
from eplb_service.cli.options import JSON, SEVERAL, UserError, option, takes_options
from eplb_service.cli.output import output_console, print_json, table_of
from eplb_service.cli.planner_options import one_policy
from eplb_service.cli.replay import policies_of
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.open_trace import naming

if TYPE_CHECKING:
    from eplb_lab.bench.closed_loop import Scenario
    from eplb_service.io.trace import Trace

_WINDOW = 256
_MIN_WINDOWS = 4
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@takes_options()
def bench(
    reading: ReadingOptions,
    heat: Path = HEAT,
    ranks: int = option(help="Ranks of the expert-parallel group.", min=1),
    redundant: int | None = option(
        None, "Slots per layer beyond one per expert; by default one per rank.", min=0
    ),
    window: int | None = option(
        None,
        f"Steps that a decision sees; it serves as many that follow. By default {_WINDOW}, or a quarter of a short "
        "trace.",
        min=1,
    ),
    policy: str = option(
        "flashlb,deepseek",
        "Policies to compare with the peers, with commas, as for `eplb replay`; yours are module:function.",
        metavar=SEVERAL,
    ),
    peers: str = option(
        "vllm,vllm-ascend,sglang",
        "Packages whose balancers take part: vllm, vllm-ascend, sglang, with commas; or none.",
        metavar=SEVERAL,
    ),
    fetch: bool = option(True, "Fetch the balancers' sources where they are missing: once, about 100 MB."),
    index: str = option("https://pypi.org/simple", "Package index that they are fetched from."),
    limit_seconds: float = option(
        30.0, "Exclude a balancer whose decision takes more CPU time than this.", min=0.1
    ),
    json: bool = JSON,
) -> None:
    """Compare our policies with those of vLLM, vLLM-Ascend and SGLang on your own trace.

    All decide window after window on the same heat, each in a process and on one thread of its own, and are scored by
    the steps that follow, by code that belongs to none of them. The peers run from the published sources of their
    packages, which are fetched once and need torch. Ours send tokens by their own tables, the peers by the engines'
    rule.
    """
    names, policies = _balancers(peers), policies_of(policy)
    for one in policies:
        one_policy(one)
    trace = reading.open(heat)
    with naming(heat):
        scenario = _scenario(heat, trace, ranks, redundant, window)
    for variable in _ONE_THREAD:
        os.environ[variable] = "1"
    compile_solver()
    from eplb_lab.bench.closed_loop import compare, entrants_of
    from eplb_lab.bench.contest import Contest

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with console.status("fetching the peers, once, and comparing"):
        contest = Contest(names, index if fetch else "", limit_seconds, console.print)
        try:
            found = compare(contest, scenario, entrants_of(contest, policies))
        finally:
            contest.close()
    if json:
        print_json(found)
    else:
        _print(found)


def _balancers(packages: str) -> list[str]:
    """The balancers of the packages; raises ``UserError`` on a package that has none."""
    from eplb_lab.bench.peers.balancers import PEERS

    known = list(dict.fromkeys(package.name for package, _ in PEERS.values()))
    wanted = [name.strip() for name in packages.split(",") if name.strip()]
    if wanted == ["none"]:
        return []
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        found = ", ".join(map(repr, unknown)) or "nothing"
        raise UserError(f"--peers names {found}; choose among {', '.join(known)}, or none")
    if find_spec("torch") is None:
        raise UserError(
            f"the peers are programs of torch: {install_command('peers', 'eplb-lab')}, or give --peers none"
        )
    return [name for name, (package, _) in PEERS.items() if package.name in wanted]


def _scenario(path: Path, trace: Trace, ranks: int, redundant: int | None, window: int | None) -> Scenario:
    from eplb_lab.bench.closed_loop import Scenario

    if redundant is None:
        redundant = -trace.experts % ranks or ranks
    [slots] = slots_of_redundant(trace.experts, ranks, str(redundant))
    check_shape(trace.experts, ranks, slots)
    if window is None:
        window = max(min(_WINDOW, trace.steps // _MIN_WINDOWS), 1)
    if trace.steps < 2 * window:
        raise UserError(
            f"{path}: {trace.steps} steps are no two windows of {window}: one to decide on, one to serve; "
            "give a shorter --window"
        )
    heat_TLE = np.ascontiguousarray(trace.heat(0, trace.steps))
    if heat_TLE.dtype.kind == "f":
        raise UserError(f"{path}: holds fractions of tokens; the peers count whole ones")
    return Scenario(path.name, heat_TLE, ranks, slots, window)


def _print(found: Mapping[str, Any]) -> None:
    console = output_console()
    window = found["window_steps"]
    console.print(
        f"{found['layers']} layers x {found['experts']} experts on {found['ranks']} ranks x {found['slots']} slots; "
        f"{found['decisions']} decisions, each on {window} steps for the next {window}"
    )
    rows = [{"label": label, **policy} for label, policy in found["policies"].items()]
    failed = dict.fromkeys(failure["policy"] for failure in found["failures"])

    def cell(name: str, places: int) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: f"{row[name]:,.{places}f}" if name in row else "failed"

    table = table_of(
        [*sorted(rows, key=lambda row: row["par_realised"]), *({"label": name} for name in failed)],
        {
            "policy": lambda row: row["label"],
            "PAR": cell("par_realised", 3),
            "moves each": cell("moves_per_decision", 1),
            "time ms": cell("solve_ms_mean", 1),
            "CPU ms": cell("cpu_ms_mean", 1),
        },
    )
    console.print(table, soft_wrap=False)
    for failure in found["failures"]:
        console.print(f"{failure['policy']} has no result: {failure['why']}")
    console.print(
        "PAR: hottest rank over mean rank in each step of the windows served; token sampling alone leaves about "
        f"{found['noise_floor']:.3f}. Times are of one decision on one thread, here. Every policy decides once per "
        "window here, its placement takes effect at once, and the first window served is excluded. In `eplb replay`, "
        "flashlb decides when heat changes and every step counts, so its figures differ."
    )
