"""``eplb trace record``: the heat of a running service as a native trace, from wherever the service is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import typer
from rich.progress import TimeElapsedColumn

from eplb_core.atomic_write import OutputError
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import operator_pb2
from eplb_core.wire.heat import decode_heat_report
from eplb_core.wire.operator import ServedModel, decode_served, decode_switched
from eplb_service.cli.client import NAME, Connection, OperatorCalls
from eplb_service.cli.options import JSON, UserError, option, takes_options
from eplb_service.cli.output import print_json, progress_bar
from eplb_service.io.copy_trace import check_trace_output
from eplb_service.io.native import SUFFIX as TRACE_SUFFIX
from eplb_service.io.recorder import Recorder
from eplb_service.io.trace import TraceFacts


@takes_options()
def record(
    service: Connection,
    deployment: str = NAME,
    out: Path = option(help=f"Trace to write, a {TRACE_SUFFIX} folder."),
    steps: int | None = option(None, "End after so many steps.", min=1),
    seconds: float | None = option(None, "End after so many seconds.", min=0.1),
    append: bool = option(False, "Append to the trace at --out, where it fits.", "--append"),
    json: bool = JSON,
) -> None:
    """Record the heat that a deployment serves from now on.

    It ends with Ctrl-C, or as asked for. What is written is tokens by slot and by source rank, with the placements that
    they were counted under. The service never waits for it: a slow link loses reports, which are counted.
    """
    if out.suffix != TRACE_SUFFIX:
        raise OutputError(f"{out}: the name must end in {TRACE_SUFFIX}")
    if out.is_dir() and not append:
        raise OutputError(
            f"{out}: exists; choose another name, or remove it first; --append goes on with a trace"
        )
    if not out.is_dir():
        check_trace_output(out)
    trace = _Recording(out, deployment, steps)
    with service.open() as call:
        try:
            _follow(trace, call, seconds)
        finally:
            trace.close()
    if trace.recorder is None or not trace.steps:
        raise UserError(f"no step of {deployment!r} was recorded; is its model serving? see `eplb status`")
    if json:
        counts = {"steps": trace.steps, "lost_steps": trace.recorder.lost, "dropped_reports": trace.dropped}
        print_json({"out": out, **counts})
    else:
        lost = (
            f"{trace.recorder.lost} steps lost, {trace.dropped} reports dropped on a link that was too slow"
        )
        typer.echo(f"{out}: {trace.steps} steps recorded; {lost}")


class _Recording:
    """One deployment's trace, made of what the service sends.

    ``recorder`` and ``served`` are ``None`` until it is known what the deployment serves; ``dropped`` are the reports
    that the service dropped.
    """

    def __init__(self, path: Path, deployment: str, most_steps: int | None) -> None:
        self.recorder: Recorder | None = None
        self.served: ServedModel | None = None
        self.dropped = 0
        self.path = path
        self.deployment = deployment
        self._most_steps = most_steps

    @property
    def steps(self) -> int:
        """Steps recorded now."""
        return self.recorder.steps if self.recorder else 0

    def begin(self, served: ServedModel) -> Recorder:
        """Begin, or go on, with what all ranks serve; raises ``UserError`` where that does not fit the trace."""
        shape, recorder = served.shape, self.recorder
        rows = list(enumerate(zip(served.layer_epochs, served.placement.phy2log_LRS, strict=True)))
        if recorder is None:
            facts = TraceFacts(
                origin="recorded by eplb trace record",
                ranks=shape.ranks,
                slots=shape.slots,
                bytes_per_expert=shape.bytes_per_expert,
                nodes_R=served.nodes_R,
            )
            recorder = Recorder(
                self.path, facts, shape.layers, shape.experts, served.pending_steps, self._most_steps
            )
        elif self.served is not None and self.served.shape != shape:
            raise UserError(
                f"{self.path}: {self.deployment} has been restarted with other sizes than this trace has; "
                f"its {self.steps} new steps are kept, record on into another file"
            )
        else:
            recorder.begin_again()
        self.recorder, self.served = recorder, served
        for layer, (epoch, phy2log_RS) in rows:
            log2phy_RLE = served.log2phy_RLE
            recorder.place(layer, epoch, phy2log_RS, None if log2phy_RLE is None else log2phy_RLE[:, layer])
        return recorder

    def close(self) -> None:
        """Write what waits; the trace is whole then."""
        if self.recorder is not None:
            self.recorder.close()


def _follow(trace: _Recording, call: OperatorCalls, seconds: float | None) -> None:
    """Record what the service sends until the trace is full, time is up, or the user has enough."""
    request = operator_pb2.WatchHeatRequest(deployment=trace.deployment)
    stream = call.stream("WatchHeat", request, seconds)
    with progress_bar("waiting for heat (Ctrl-C ends)", None, TimeElapsedColumn()) as update:
        try:
            for message in stream:
                recorder = _take(trace, message)
                update(description=f"{trace.steps} steps, {recorder.lost} lost (Ctrl-C ends and keeps them)")
                if recorder.full:
                    break
        except KeyboardInterrupt:
            # Enough: what has been recorded is a whole trace.
            pass
        except WireError as error:
            raise UserError(f"the service sent what cannot be: {error}") from error
        except grpc.RpcError as error:
            failed: Any = error
            if seconds is None or failed.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                trace.close()
                if trace.steps:
                    kept = f"{trace.path}: {trace.steps} steps recorded before the service went away"
                    typer.echo(kept, err=True)
                raise
        finally:
            stream.cancel()


def _take(trace: _Recording, message: operator_pb2.WatchHeatResponse) -> Recorder:
    """Record one message; raises ``WireError`` where it cannot be, ``UserError`` where it fits no such trace."""
    trace.dropped = message.dropped_reports
    kind, served, recorder = message.WhichOneof("message"), trace.served, trace.recorder
    if kind == "served":
        return trace.begin(decode_served(message.served))
    if served is None or recorder is None:
        raise WireError("heat comes before what is served")
    if kind == "switched":
        switched = decode_switched(message.switched, served.shape)
        recorder.place(switched.layer, switched.epoch, switched.phy2log_RS, switched.log2phy_RE)
    elif kind == "heat":
        if message.heat.rank >= served.shape.ranks:
            raise WireError(f"rank {message.heat.rank} is none of {served.shape.ranks}")
        report = decode_heat_report(message.heat.report, served.shape, served.pending_steps)
        recorder.add(message.heat.rank, report)
    return recorder
