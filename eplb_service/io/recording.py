"""Records all deployments of a service, a trace for each time that a deployment's ranks come together again."""

from __future__ import annotations

from pathlib import Path

import structlog

from eplb_service.atomic_write import OutputError
from eplb_service.heat.window import HeatError
from eplb_service.io.native.layout import SUFFIX
from eplb_service.io.recorder import Recorder
from eplb_service.io.trace import TraceFacts
from eplb_service.placement import Int32, Placement
from eplb_service.wire.heat import HeatReport

_log = structlog.get_logger(__name__)


class Recording:
    """Receives what deployments serve and count; what it cannot record is logged and never stops the service.

    Parameters
    ----------
    folder
        Where traces go, as ``NAME-1.zarr``, ``NAME-2.zarr`` …; must exist.
    pending_steps
        Steps that a deployment's fastest rank may be ahead of its slowest.

    Raises
    ------
    OutputError
        Where ``folder`` is none.
    """

    def __init__(self, folder: Path, pending_steps: int) -> None:
        if not folder.is_dir():
            raise OutputError(f"{folder}: is no folder that traces can be written into; create it first")
        self._folder = folder
        self._pending_steps = pending_steps
        self._recorders: dict[str, Recorder] = {}

    def placed(
        self,
        name: str,
        facts: TraceFacts,
        placement: Placement,
        log2phy_RLE: Int32,
        layer_epochs: tuple[int, ...],
    ) -> None:
        """All ranks of deployment ``name`` agree on what they serve; begins a trace where the last one does not fit.

        Parameters
        ----------
        name
            The deployment's.
        facts
            What a trace says of the deployment that it is of.
        placement, log2phy_RLE
            What the ranks serve: slots, and int32 ``[R, L, E]``, or ``[R, L, E, D]`` where they deal.
        layer_epochs
            Epoch at which each layer last changed.
        """
        rows = list(zip(range(placement.layers), layer_epochs, placement.phy2log_LRS, strict=True))
        recorder = self._recorders.get(name)
        if recorder is not None and any(recorder.contradicts(*row) for row in rows):
            self._end(name)
            recorder = None
        if recorder is None:
            recorder = self._begin(name, facts, placement)
        else:
            recorder.begin_again()
        if recorder is not None:
            for layer, epoch, phy2log_RS in rows:
                recorder.place(layer, epoch, phy2log_RS, log2phy_RLE[:, layer])

    def switched(self, name: str, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32) -> None:
        """A layer of deployment ``name`` has switched.

        Parameters
        ----------
        name, layer
            The deployment's name, and the layer.
        epoch
            The layer's from here on.
        phy2log_RS, log2phy_RE
            What it serves: int32 ``[R, S]`` and ``[R, E]``, or ``[R, E, D]`` where ranks deal.
        """
        if name in self._recorders:
            self._recorders[name].place(layer, epoch, phy2log_RS, log2phy_RE)

    def heat(self, name: str, rank: int, batch: HeatReport) -> None:
        """One rank of deployment ``name`` has reported."""
        recorder = self._recorders.get(name)
        if recorder is None:
            return
        recorder.add(rank, batch)
        if recorder.error is not None:
            self._end(name)

    def close(self) -> None:
        """Write what waits and end all traces."""
        for name in list(self._recorders):
            self._end(name)

    def _begin(self, name: str, facts: TraceFacts, placement: Placement) -> Recorder | None:
        numbers = (
            number for number in range(1, 1 << 20) if not (self._folder / f"{name}-{number}{SUFFIX}").exists()
        )
        path = self._folder / f"{name}-{next(numbers)}{SUFFIX}"
        try:
            recorder = Recorder(path, facts, placement.layers, placement.experts, self._pending_steps)
        except (OutputError, HeatError) as error:
            _log.warning("recording_failed", deployment=name, reason=str(error))
            return None
        _log.info("recording", deployment=name, path=str(path))
        self._recorders[name] = recorder
        return recorder

    def _end(self, name: str) -> None:
        recorder = self._recorders.pop(name)
        recorder.close()
        if recorder.error is not None:
            _log.warning(
                "recording_failed", deployment=name, reason=str(recorder.error), lost_steps=recorder.lost
            )
        else:
            _log.info("recorded", deployment=name, lost_steps=recorder.lost)
