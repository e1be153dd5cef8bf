"""``eplb trace record``: the heat of a running service as a native trace, from wherever the service is reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eplb_service.atomic_write import OutputError
from eplb_service.cli.errors import UserError
from eplb_service.cli.operator.client import Connection, Name, OperatorCalls
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.output.json_out import print_json
from eplb_service.cli.trace.watched import WatchedTrace
from eplb_service.io.copy_trace import check_trace_output
from eplb_service.io.native import layout as native_layout
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.heat import decode_heat_report
from eplb_service.wire.watch import decode_served, decode_switched


@option_groups
def record(
    deployment: Name,
    out: Annotated[Path, typer.Option(help=f"Trace to write, a {native_layout.SUFFIX} folder.")],
    service: Connection,
    steps: Annotated[int | None, typer.Option(min=1, help="End after so many steps.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="End after so many seconds.")] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Append to the trace at --out, where it fits.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Record the heat of a deployment that is being served, from now on, until Ctrl-C or as long as asked for.

    What is written is what `eplb serve --record` writes: tokens by slot and by source rank, with the placements that
    they were counted under. The service never waits for it: a slow link loses reports, which are counted.
    """
    _check_output(out, append)
    with service.open() as call:
        trace = WatchedTrace(out, deployment, steps)
        try:
            with _bar(trace, steps, seconds) as advance:
                _follow(call, deployment, trace, seconds, advance)
        finally:
            trace.close()
    if trace.error is not None:
        raise UserError(f"{out}: recording failed after {trace.steps} steps: {trace.error}")
    if not trace.steps:
        raise UserError(f"no step of {deployment!r} was recorded; is its model serving? see `eplb status`")
    if json:
        print_json(
            {
                "out": str(out),
                "steps": trace.steps,
                "lost_steps": trace.lost,
                "dropped_reports": trace.dropped,
            }
        )
        return
    lost = f"; {trace.lost} steps lost" if trace.lost else ""
    dropped = f"; the service dropped {trace.dropped} reports, the link was too slow" if trace.dropped else ""
    typer.echo(f"{out}: {trace.steps} steps recorded{lost}{dropped}")


def _check_output(out: Path, append: bool) -> None:
    if out.suffix != native_layout.SUFFIX:
        raise OutputError(f"{out}: the name must end in {native_layout.SUFFIX}")
    if not (append and out.is_dir()):
        try:
            check_trace_output(out)
        except OutputError as error:
            hint = "; --append goes on with a trace" if out.is_dir() else ""
            raise OutputError(f"{error}{hint}") from error


def _follow(
    call: OperatorCalls,
    deployment: str,
    trace: WatchedTrace,
    seconds: float | None,
    advance: Callable[[], None],
) -> None:
    """Put what the service sends into the trace until it is full, time is up, or the user has enough."""
    stream = call.stream("WatchHeat", operator_pb2.WatchHeatRequest(deployment=deployment), seconds)
    try:
        for message in stream:
            _take(trace, message)
            advance()
            if trace.over:
                break
    except KeyboardInterrupt:
        # Enough: what has been heard is a whole trace.
        pass
    except WireError as error:
        raise UserError(f"the service sent what cannot be: {error}") from error
    except grpc.RpcError as error:
        if not _time_is_up(error, seconds):
            trace.close()
            if trace.steps:
                typer.echo(
                    f"{trace.path}: {trace.steps} steps recorded before the service went away", err=True
                )
            raise
    finally:
        stream.cancel()


def _take(trace: WatchedTrace, message: operator_pb2.WatchHeatResponse) -> None:
    trace.dropped = message.dropped_reports
    kind = message.WhichOneof("message")
    if kind == "served":
        trace.begin(decode_served(message.served))
    elif trace.served is None:
        raise WireError("heat comes before what is served")
    elif kind == "switched":
        switched = decode_switched(message.switched, trace.served.shape)
        trace.place(switched)
    elif kind == "heat":
        served = trace.served
        if message.heat.rank >= served.shape.ranks:
            raise WireError(f"rank {message.heat.rank} is none of {served.shape.ranks}")
        report = decode_heat_report(message.heat.report, served.shape, served.pending_steps)
        trace.add(message.heat.rank, report)


def _time_is_up(error: grpc.RpcError, seconds: float | None) -> bool:
    call: Any = error
    return seconds is not None and call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@contextmanager
def _bar(trace: WatchedTrace, steps: int | None, seconds: float | None) -> Iterator[Callable[[], None]]:
    """Steps recorded, or seconds gone where those end it; without a terminal nothing is shown."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    left = () if steps is None and seconds is None else (TimeRemainingColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("waiting for heat (Ctrl-C ends)", total=steps or seconds)

        def advance() -> None:
            done = trace.steps if steps or not seconds else time.monotonic() - began
            lost = f", {trace.lost} lost" if trace.lost else ""
            status = f"{trace.steps} steps{lost} (Ctrl-C ends and keeps them)"
            progress.update(task, completed=done, description=status)

        yield advance
