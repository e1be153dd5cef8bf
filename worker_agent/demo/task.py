"""The task of a demo rank, in a JSON file that whoever starts the ranks has written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_AnyTask = TypeVar("_AnyTask", bound="Task")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every demo run has.

    Parameters
    ----------
    service
        host:port of the service.
    deployment
        Name that the ranks give.
    rendezvous
        File by which the ranks' process groups find each other.
    ranks, slots
        R and S.
    dispatcher
        ``"all2allv"``, ``"allgather"`` or ``"mc2"``; of the model ``"moge"`` as well.
    split
        ``"tables"`` or ``"step"``: how the balanced layers split tokens over replicas.
    dealing_width
        Entries of the layers' dealing tables.
    seed
        Draws whatever is drawn.
    report_every
        Steps between two progress lines.
    """

    service: str
    deployment: str
    rendezvous: str
    ranks: int
    slots: int
    dispatcher: str
    split: str
    dealing_width: int
    seed: int
    report_every: int

    @classmethod
    def read(cls: type[_AnyTask], path: Path) -> _AnyTask:
        """Load it from a JSON file with these keys."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, kw_only=True)
class DemoTask(Task):
    """Serve tokens whose choices a trace has counted.

    Parameters
    ----------
    counts
        ``.npy`` file of the heat to serve, int ``[steps, layers, experts]``.
    hidden, intermediate
        H and I of each expert.
    """

    counts: str
    hidden: int
    intermediate: int


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """Serve the embedded model.

    Parameters
    ----------
    steps
        Decoding steps.
    layers
        How many of the model's MoE layers, from the first, are balanced.
    rows
        Requests at a time on each rank.
    length
        Bytes of a request, its prompt among them.
    quantized
        Whether the experts are W8A8.
    dual_batch
        Whether each step's tokens go through the MoE layers in two micro-batches.
    """

    steps: int
    layers: int
    rows: int
    length: int
    quantized: bool = False
    dual_batch: bool = False
