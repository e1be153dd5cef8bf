"""The trace that is made of what a service sends those who watch a deployment's heat."""

from __future__ import annotations

from pathlib import Path

from eplb_service.cli.errors import UserError
from eplb_service.io.recorder import Recorder
from eplb_service.io.trace import TraceFacts
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.watch import ServedModel, SwitchedLayer


class WatchedTrace:
    """One deployment's trace.

    Parameters
    ----------
    path
        Folder to make, or to go on with.
    deployment
        Its name, for messages.
    most_steps
        Steps after which it is ``over``; ``None`` for no bound.

    ``served`` is what the deployment serves, ``None`` until that is known; ``dropped`` the reports that the
    service says it dropped.
    """

    def __init__(self, path: Path, deployment: str, most_steps: int | None) -> None:
        self.path = path
        self.served: ServedModel | None = None
        self.dropped = 0
        self._deployment = deployment
        self._most_steps = most_steps
        self._recorder: Recorder | None = None

    @property
    def steps(self) -> int:
        """Steps recorded now."""
        return self._recorder.steps if self._recorder else 0

    @property
    def lost(self) -> int:
        """Steps that were not recorded."""
        return self._recorder.lost if self._recorder else 0

    @property
    def error(self) -> Exception | None:
        """What ended the recording, if anything did."""
        return self._recorder.error if self._recorder else None

    @property
    def over(self) -> bool:
        """Whether nothing more can or need be recorded."""
        return self._recorder is not None and (self._recorder.full or self._recorder.error is not None)

    def begin(self, served: ServedModel) -> None:
        """All ranks agree on what they serve; raises ``UserError`` where that does not fit the trace."""
        recorder = self._recorder
        shape, rows = (
            served.shape,
            list(enumerate(zip(served.layer_epochs, served.placement.phy2log_LRS, strict=True))),
        )
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
            raise UserError(self._cannot_go_on("with other sizes"))
        else:
            recorder.begin_again()
        self._recorder = recorder
        if any(recorder.contradicts(layer, epoch, phy2log_RS) for layer, (epoch, phy2log_RS) in rows):
            raise UserError(self._cannot_go_on("with another placement under the same epochs"))
        self.served = served
        for layer, (epoch, phy2log_RS) in rows:
            log2phy_RLE = served.log2phy_RLE
            recorder.place(layer, epoch, phy2log_RS, None if log2phy_RLE is None else log2phy_RLE[:, layer])

    def place(self, switched: SwitchedLayer) -> None:
        """A layer has switched; only after ``begin``."""
        assert self._recorder is not None
        self._recorder.place(switched.layer, switched.epoch, switched.phy2log_RS, switched.log2phy_RE)

    def add(self, rank: int, batch: HeatReport) -> None:
        """A rank has reported; only after ``begin``."""
        assert self._recorder is not None
        self._recorder.add(rank, batch)

    def close(self) -> None:
        """Write what waits; the trace is whole then."""
        if self._recorder is not None:
            self._recorder.close()

    def _cannot_go_on(self, how: str) -> str:
        return (
            f"{self.path}: {self._deployment} has been restarted {how} than this trace has; "
            f"its {self.steps} new steps are kept, record on into another file"
        )
