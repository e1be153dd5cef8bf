"""``eplb bench``: compares our policies with those of vLLM, vLLM-Ascend and SGLang on the user's own trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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


@dataclass(frozen=True)
class PeerOptions:
    """Options for other projects' balancers, and the time limit for all balancers."""

    SECTION: ClassVar[str] = "Peers"

    peers: str = option(
        "vllm,vllm-ascend,sglang,models",
        "Packages that provide the peers' balancers, separated by commas: vllm, vllm-ascend, sglang. `models` "
        "also includes models of newer classes of balancers. `none` compares only our policies.",
        metavar=SEVERAL,
    )
    fetch: bool = option(True, "Download the balancers' sources (about 100 MB) unless they are cached.")
    index: str = option("https://pypi.org/simple", "Package index for the downloads.")
    limit_seconds: float = option(
        30.0, "Exclude a balancer if a decision takes more CPU seconds than this.", min=0.1
    )

    def balancers(self) -> list[str]:
        """Return the names of the selected packages' balancers, without the models.

        Raises ``UserError`` if a package has no balancer.
        """
        from eplb_lab.bench.peers.balancers import PEERS

        available = [*dict.fromkeys(package.name for package, _ in PEERS.values()), "models"]
        names = self._names
        if names == ["none"]:
            return []
        unknown = [name for name in names if name not in available]
        if unknown or not names:
            invalid = ", ".join(map(repr, unknown)) or "nothing"
            raise UserError(f"--peers contains {invalid}; choose from {', '.join(available)}, or use none")
        if names != ["models"] and find_spec("torch") is None:
            raise UserError(
                f"the peers need torch; install it with: {install_command('peers', 'eplb-lab')}, or use --peers none"
            )
        return [name for name, (package, _) in PEERS.items() if package.name in names]

    @property
    def with_models(self) -> bool:
        """True if the models of newer classes of balancers are included."""
        return "models" in self._names

    @property
    def _names(self) -> list[str]:
        return [name.strip() for name in self.peers.split(",") if name.strip()]


@takes_options()
def bench(
    reading: ReadingOptions,
    peers: PeerOptions,
    heat: Path = HEAT,
    ranks: int = option(help="Ranks of the expert-parallel group.", min=1),
    redundant: int | None = option(
        None,
        "Redundant slots per layer. The default is one per rank, or fewer if the experts do not divide evenly.",
        min=0,
    ),
    window: int | None = option(
        None,
        "Number of steps that a decision uses, and number of steps that its placement then serves. The default is "
        f"{_WINDOW}, or a quarter of a short trace.",
        min=1,
    ),
    policy: str = option(
        "flashlb,deepseek",
        "Policies to compare with the peers, separated by commas, as for `eplb replay`. Use module:function for your "
        "own.",
        metavar=SEVERAL,
    ),
    json: bool = JSON,
) -> None:
    """Compare our policies with those of vLLM, vLLM-Ascend and SGLang on your own trace.

    Every policy decides on the same windows of heat, in its own process and on one thread. Independent code scores each
    decision on the steps that follow. The peers run from the published sources of their packages, which are downloaded
    once and need torch. Our policies dispatch tokens with their own tables, and the peers with the engines' rule.
    """
    balancers = peers.balancers()
    policies = policies_of(policy)
    for policy_name in policies:
        one_policy(policy_name)
    trace = reading.open(heat)
    with naming(heat):
        scenario = _scenario(heat, trace, ranks, redundant, window)
    for variable in _ONE_THREAD:
        os.environ[variable] = "1"
    compile_solver()
    from eplb_lab.bench.closed_loop import STALE, compare, entrants_of
    from eplb_lab.bench.contest import Contest
    from eplb_lab.bench.models import MODELS

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with console.status("fetching the peers (first run only), then comparing"):
        contest = Contest(balancers, peers.index if peers.fetch else "", peers.limit_seconds, console.print)
        try:
            taking_part = [*entrants_of(contest, policies), *([STALE] if peers.with_models else [])]
            document = compare(contest, scenario, taking_part, MODELS if peers.with_models else None)
        finally:
            contest.close()
    if json:
        print_json(document)
    else:
        _print(document)


def _scenario(path: Path, trace: Trace, ranks: int, redundant: int | None, window: int | None) -> Scenario:
    """Read the heat and fill in the default slots and window. Raises ``UserError`` if the trace does not fit them."""
    from eplb_lab.bench.closed_loop import Scenario

    if redundant is None:
        redundant = -trace.experts % ranks or ranks
    [slots] = slots_of_redundant(trace.experts, ranks, str(redundant))
    check_shape(trace.experts, ranks, slots)
    if window is None:
        window = max(min(_WINDOW, trace.steps // _MIN_WINDOWS), 1)
    if trace.steps < 2 * window:
        raise UserError(
            f"{path}: {trace.steps} steps are fewer than two windows of {window} (one to decide on, one to serve); "
            "use a shorter --window"
        )
    heat_TLE = np.ascontiguousarray(trace.heat(0, trace.steps))
    if heat_TLE.dtype.kind == "f":
        raise UserError(
            f"{path}: the heat has fractional tokens, but the peers need whole tokens; use a trace of token counts"
        )
    return Scenario(path.name, heat_TLE, ranks, slots, window)


def _print(document: Mapping[str, Any]) -> None:
    """Print the comparison as a table, the failures, and an explanation of the columns."""
    from eplb_lab.bench.models import MODELS

    console = output_console()
    window = document["window_steps"]
    console.print(
        f"{document['layers']} layers x {document['experts']} experts on {document['ranks']} ranks x "
        f"{document['slots']} slots; {document['decisions']} decisions, each on {window} steps for the next {window}"
    )
    rows = [{"label": label, **policy} for label, policy in document["policies"].items()]
    failed = dict.fromkeys(failure["policy"] for failure in document["failures"])

    def cell(name: str, decimals: int) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: f"{row[name]:,.{decimals}f}" if name in row else "failed"

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
    for failure in document["failures"]:
        console.print(f"{failure['policy']} has no result: {failure['why']}")
    console.print(
        "PAR is the hottest rank's load divided by the mean load, in each step of the windows served. Because of token "
        f"sampling, a perfectly balanced placement would have about {document['noise_floor']:.3f}. Times are for "
        "one decision on one thread of this machine. Every policy decides once per window, its placement takes effect "
        "immediately, and the first window served is excluded. In `eplb replay`, flashlb decides when heat changes and "
        "every step counts, so its figures differ."
    )
    if any(row["label"] in MODELS for row in rows):
        console.print(
            "Models are implemented from published descriptions, and their times include the scoring. exact refresh "
            "(like UltraEP) chooses replicas for each layer of each step from that step's exact counts, and fetches "
            "them all again. shares one step old (like LPLB) solves the linear program on the previous step's "
            "counts. shared pool lets the layers share the spare slots, as in vllm-ascend #16871."
        )
