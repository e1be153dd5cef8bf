"""``eplb trace record``: record a running service's heat in a native trace, from any host that can reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import typer
from rich.progress import TimeElapsedColumn

from eplb_core.atomic_write import OutputError
from eplb_core.figures import duration_text
from eplb_core.planner.dealing import fitted_to_host
from eplb_core.planner.settings import PlannerSettings
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import operator_pb2
from eplb_core.wire.heat import decode_heat_report
from eplb_core.wire.operator import ServedModel, decode_served, decode_switched
from eplb_service.cli.client import NAME, Connection, OperatorCalls
from eplb_service.cli.options import JSON, UserError, option, takes_options
from eplb_service.cli.output import hint, print_json, progress_bar
from eplb_service.io.copy_trace import check_trace_output
from eplb_service.io.native import SUFFIX as TRACE_SUFFIX
from eplb_service.io.recorder import Recorder
from eplb_service.io.trace import TraceFacts

_IDLE_SECONDS = 10.0
"""Age of a deployment's newest step, in seconds, above which a recording prints a hint that it has to wait."""


@takes_options()
def record(
    service: Connection,
    deployment: str = NAME,
    out: Path = option(help=f"Trace to write, a {TRACE_SUFFIX} folder."),
    steps: int | None = option(None, "Stop after this many steps.", min=1),
    seconds: float | None = option(None, "Stop after this many seconds.", min=0.1),
    append: bool = option(False, "Append to the trace at --out if its shape matches.", "--append"),
    json: bool = JSON,
) -> None:
    """Record the heat that a deployment serves from now on.

    Recording stops at the limit of --steps or --seconds, or on Ctrl-C. The trace contains tokens by slot and by source
    rank, with the placements that were current at the time. The service never waits for the recorder: if the link is
    too slow, it drops reports and counts them.
    """
    if out.suffix != TRACE_SUFFIX:
        raise OutputError(f"{out}: the name must end in {TRACE_SUFFIX}")
    if out.is_dir() and not append:
        raise OutputError(
            f"{out}: exists; choose another name, remove it first, or continue the trace with --append"
        )
    if not out.is_dir():
        check_trace_output(out)
    with service.open() as call:
        recording = record_heat(call, deployment, out, steps, seconds)
    if json:
        counts = {
            "steps": recording.steps,
            "lost_steps": recording.lost,
            "dropped_reports": recording.dropped,
        }
        print_json({"out": out, **counts})
    else:
        typer.echo(f"{out}: {recording.summary}")


def record_heat(
    call: OperatorCalls, deployment: str, out: Path, steps: int | None, seconds: float | None
) -> _Recording:
    """Record the heat that a deployment serves from now on, until a limit or Ctrl-C.

    Prints a hint if the deployment is idle.

    Parameters
    ----------
    call
        Connection to the service.
    deployment
        Name of the deployment.
    out
        Trace to write or to continue.
    steps
        Maximum number of steps.
    seconds
        Maximum number of seconds.

    Returns
    -------
    _Recording
        The completed recording.

    Raises
    ------
    UserError
        If no step was recorded.
    """
    _hint_if_idle(call("GetStatus", operator_pb2.GetStatusRequest(deployment=deployment)).status)
    recording = _Recording(out, deployment, steps)
    try:
        _follow(recording, call, seconds)
    finally:
        recording.close()
    if not recording.steps:
        raise UserError(
            f"no step of {deployment!r} was recorded; check with `eplb status` that its model is serving"
        )
    return recording


def _hint_if_idle(status: operator_pb2.DeploymentStatus) -> None:
    """Print a hint if a deployment has no ranks or is not serving, so that the recording has to wait."""
    if not status.agents_connected:
        why = "none of its ranks is connected"
    elif not status.HasField("idle_seconds"):
        why = "it has not served any requests yet"
    elif status.idle_seconds > _IDLE_SECONDS:
        why = f"its last step was {duration_text(status.idle_seconds)} ago"
    else:
        return
    hint(f"{status.deployment!r} is idle: {why}; the recording begins when it serves requests")


class _Recording:
    """Trace of one deployment, built from the service's messages.

    Attributes
    ----------
    recorder
        Writer of the trace; ``None`` until the service has sent the deployment's layout.
    served
        Most recently received layout of all ranks; ``None`` until the first one.
    dropped
        Number of reports that the service dropped.
    """

    def __init__(self, path: Path, deployment: str, max_steps: int | None) -> None:
        self.recorder: Recorder | None = None
        self.served: ServedModel | None = None
        self.dropped = 0
        self.path = path
        self.deployment = deployment
        self.max_steps = max_steps

    @property
    def steps(self) -> int:
        """Number of steps recorded so far."""
        return self.recorder.steps if self.recorder else 0

    @property
    def lost(self) -> int:
        """Number of steps lost so far."""
        return self.recorder.lost if self.recorder else 0

    @property
    def summary(self) -> str:
        """Numbers of steps recorded and lost, as text."""
        return (
            f"{self.steps} steps recorded; {self.lost} steps lost, {self.dropped} reports dropped because the link was "
            "too slow"
        )

    def begin(self, served: ServedModel) -> Recorder:
        """Begin or continue recording with a layout of all ranks. Raises ``UserError`` if it does not fit the trace."""
        shape = served.shape
        rows = list(zip(served.layer_epochs, served.placement.phy2log_LRS, strict=True))
        recorder = self.recorder
        if recorder is None:
            facts = TraceFacts(
                origin="recorded by eplb trace record",
                ranks=shape.ranks,
                slots=shape.slots,
                bytes_per_expert=shape.bytes_per_expert,
                nodes_R=served.nodes_R,
                split=fitted_to_host(
                    PlannerSettings(),
                    shape.width,
                    entry_by_row=shape.entry_by_row,
                    splits_by_step=shape.splits_by_step,
                ).split,
            )
            recorder = Recorder(
                self.path, facts, shape.layers, shape.experts, served.pending_steps, self.max_steps
            )
        elif self.served is not None and self.served.shape != shape:
            raise UserError(
                f"{self.path}: {self.deployment} was restarted with a shape that differs from this trace's; the "
                f"{self.steps} new steps are kept, so record the rest to another file"
            )
        else:
            recorder.begin_again()
        self.recorder = recorder
        self.served = served
        log2phy_RLE = served.log2phy_RLE
        for layer, (epoch, phy2log_RS) in enumerate(rows):
            recorder.place(layer, epoch, phy2log_RS, None if log2phy_RLE is None else log2phy_RLE[:, layer])
        return recorder

    def close(self) -> None:
        """Write the pending steps and complete the trace."""
        if self.recorder is not None:
            self.recorder.close()


def _follow(recording: _Recording, call: OperatorCalls, seconds: float | None) -> None:
    """Record the service's messages until the trace is full, the time is up, or the user presses Ctrl-C."""
    request = operator_pb2.WatchHeatRequest(deployment=recording.deployment)
    stream = call.stream("WatchHeat", request, seconds)
    total = recording.max_steps
    with progress_bar("waiting for heat; Ctrl-C stops the recording", total, TimeElapsedColumn()) as update:
        try:
            for message in stream:
                recorder = _record_message(recording, message)
                counts = f"{recording.steps:,} steps recorded, {recording.lost:,} lost"
                update(description=f"{counts}; Ctrl-C stops the recording", completed=recording.steps)
                if recorder.full:
                    break
        except KeyboardInterrupt:
            # The trace is valid at any time, so the steps recorded so far are kept.
            pass
        except WireError as error:
            raise UserError(f"the service sent an invalid message: {error}") from error
        except grpc.RpcError as error:
            call_error: Any = error
            if seconds is None or call_error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                recording.close()
                if recording.steps:
                    typer.echo(f"{recording.steps:,} steps recorded before the connection was lost", err=True)
                raise
        finally:
            stream.cancel()


def _record_message(recording: _Recording, message: operator_pb2.WatchHeatResponse) -> Recorder:
    """Record one message.

    Raises
    ------
    WireError
        If the message is invalid.
    UserError
        If the message does not fit the trace.
    """
    recording.dropped = message.dropped_reports
    kind = message.WhichOneof("message")
    served = recording.served
    recorder = recording.recorder
    if kind == "served":
        return recording.begin(decode_served(message.served))
    if served is None or recorder is None:
        raise WireError("heat arrived before the layout under which it was counted")
    if kind == "switched":
        switched = decode_switched(message.switched, served.shape)
        recorder.place(switched.layer, switched.epoch, switched.phy2log_RS, switched.log2phy_RE)
    elif kind == "heat":
        if message.heat.rank >= served.shape.ranks:
            raise WireError(
                f"rank {message.heat.rank} is out of range; the deployment has {served.shape.ranks} ranks"
            )
        report = decode_heat_report(message.heat.report, served.shape, served.pending_steps)
        recorder.add(message.heat.rank, report)
    return recorder
