"""``eplb bench``: our policies beside those of vLLM, vLLM-Ascend and SGLang, on the user's own trace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import typer
from rich.console import Console

from eplb_service.cli.errors import UserError
from eplb_service.cli.offline.warmup import compile_solver
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.options.layout import slots_of_redundant
from eplb_service.cli.options.trace import HeatOption, ReadingOptions, check_tokens
from eplb_service.cli.output.console import output_console
from eplb_service.cli.output.json_out import print_json
from eplb_service.cli.output.tables import compact_table
from eplb_service.cli.repeated import SEVERAL
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.placement import check_shape

if TYPE_CHECKING:
    from pathlib import Path

    from eplb_service.bench.closed_loop import Course
    from eplb_service.bench.comparison import Comparison, PolicyResult
    from eplb_service.io.trace import Trace

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_INDEX = "https://pypi.org/simple"


@dataclass(frozen=True)
class PeerOptions:
    """Whose balancers take part."""

    SECTION: ClassVar = "Peers"

    peers: Annotated[
        str,
        typer.Option(
            metavar=SEVERAL,
            help="Packages whose balancers take part: vllm, vllm-ascend, sglang, with commas; or none.",
        ),
    ] = "vllm,vllm-ascend,sglang"
    fetch: Annotated[
        bool, typer.Option(help="Fetch the balancers' sources where they are missing: once, about 100 MB.")
    ] = True
    index: Annotated[str, typer.Option(help="Package index that they are fetched from.")] = _INDEX
    limit_seconds: Annotated[
        float, typer.Option(min=0.1, help="Give a balancer up whose decision takes longer.")
    ] = 60.0

    def names(self) -> list[str]:
        """The balancers of the packages; raises ``UserError`` on a package that has none."""
        from eplb_service.bench.comparison import PACKAGES
        from eplb_service.bench.peers.balancers import PEERS

        wanted = [name.strip() for name in self.peers.split(",") if name.strip()]
        if wanted == ["none"]:
            return []
        unknown = [name for name in wanted if name not in PACKAGES]
        if unknown or not wanted:
            found = ", ".join(map(repr, unknown)) or "nothing"
            raise UserError(f"--peers names {found}; choose among {', '.join(PACKAGES)}, or none")
        if find_spec("torch") is None:
            raise UserError(
                "the peers are programs of torch: pip install 'eplb-service[peers]', or give --peers none"
            )
        return [name for name, (package, _) in PEERS.items() if package.name in wanted]


@option_groups
def bench(
    heat: HeatOption,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the expert-parallel group.")],
    reading: ReadingOptions,
    peers: PeerOptions,
    redundant: Annotated[
        int | None,
        typer.Option(min=0, help="Slots per layer beyond one per expert; by default one per rank."),
    ] = None,
    window: Annotated[
        int, typer.Option(min=1, help="Steps that a decision sees; it serves as many that follow.")
    ] = 256,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare our policies with those of vLLM, vLLM-Ascend and SGLang on your own trace.

    All decide window after window on the same heat, each in a process and on one thread of its own, and are scored by
    the steps that follow, by code that belongs to none of them. The peers run from the published sources of their
    packages, which are fetched once and need torch. Ours send tokens by their own tables, the peers by the engines'
    rule.
    """
    names = peers.names()
    trace = open_trace(heat, reading.reading())
    with naming(heat):
        check_tokens(heat, trace)
        course = _course(heat, trace, ranks, redundant, window)
    for variable in _ONE_THREAD:
        os.environ[variable] = "1"
    compile_solver()
    from eplb_service.bench.comparison import compare, entrants_of
    from eplb_service.bench.contest import Contest

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with console.status("fetching the peers, once, and comparing"):
        contest = Contest(names, peers.index if peers.fetch else "", peers.limit_seconds, console.print)
        try:
            found = compare(contest, course, entrants_of(contest))
        finally:
            contest.close()
    if json:
        print_json(_document(found, course, contest.failures))
    else:
        _print(found, course)


def _course(path: Path, trace: Trace, ranks: int, redundant: int | None, window: int) -> Course:
    from eplb_service.bench.closed_loop import Course

    if redundant is None:
        redundant = -trace.experts % ranks or ranks
    [slots] = slots_of_redundant(trace.experts, ranks, str(redundant))
    check_shape(trace.experts, ranks, slots)
    if trace.steps < 2 * window:
        raise UserError(
            f"{path}: {trace.steps} steps are no two windows of {window}: one to decide on, one to serve; "
            "give a shorter --window"
        )
    heat_TLE = np.ascontiguousarray(trace.heat(0, trace.steps))
    if heat_TLE.dtype.kind == "f":
        raise UserError(f"{path}: holds fractions of tokens; the peers count whole ones")
    return Course(path.name, heat_TLE, ranks, slots, window)


def _print(found: Comparison, course: Course) -> None:
    _, layers, experts = course.heat_TLE.shape
    console = output_console()
    console.print(
        f"{layers} layers x {experts} experts on {course.ranks} ranks x {course.slots} slots; "
        f"{course.windows - 1} decisions, each on {course.window} steps for the next {course.window}"
    )
    table = compact_table("policy", "PAR", "moves each", "time ms", "CPU ms")
    for policy in sorted(found.policies, key=lambda policy: policy.par):
        decides = any(policy.wall_seconds)
        table.add_row(
            policy.label,
            f"{policy.par:.3f}",
            f"{policy.moves_each:,.1f} ({policy.moves_each / policy.slots:.0%})",
            f"{policy.wall_ms:,.1f}" if decides else "-",
            f"{policy.cpu_ms:,.1f}" if decides else "-",
        )
    console.print(table, soft_wrap=False)
    console.print(
        "PAR: hottest rank over mean rank in each step of the windows served, the first left out where there are "
        f"more; token sampling alone leaves about {found.floor:.3f}. Times are of one decision on one thread, here."
    )


def _document(found: Comparison, course: Course, failures: list[dict[str, str]]) -> dict[str, Any]:
    _, layers, experts = course.heat_TLE.shape
    return {
        "layers": layers,
        "experts": experts,
        "ranks": course.ranks,
        "slots": course.slots,
        "window_steps": course.window,
        "decisions": course.windows - 1,
        "noise_floor": found.floor,
        "policies": {policy.label: _policy_document(policy) for policy in found.policies},
        "failures": failures,
    }


def _policy_document(policy: PolicyResult) -> dict[str, Any]:
    return {
        "source": policy.source,
        "par_realised": policy.par,
        "par_realised_per_window": list(policy.par_realised),
        "moves_per_decision": policy.moves_each,
        "moves": list(policy.moves),
        "layers_changed": list(policy.changed_layers),
        "solve_ms_mean": policy.wall_ms,
        "cpu_ms_mean": policy.cpu_ms,
    }
