"""Ways to spoil a Hello or a report of heat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from eplb_service.wire.codec import pack
from eplb_service.wire.generated import agent_pb2

Spoil = Callable[[agent_pb2.Hello], None]


def shape(field: str, value: int) -> Spoil:
    return lambda hello: setattr(hello.shape, field, value)


def field(name: str, value: Any) -> Spoil:
    return lambda hello: setattr(hello, name, value)


def slots(array: Any) -> Spoil:
    return lambda hello: hello.placement.local_physical_to_logical.CopyFrom(pack(np.asarray(array)))


def epochs(*values: int) -> Spoil:
    def spoil(hello: agent_pb2.Hello) -> None:
        del hello.placement.layer_epochs[:]
        hello.placement.layer_epochs.extend(values)

    return spoil


def counts(name: str, array: Any) -> Callable[[agent_pb2.HeatReport], None]:
    return lambda report: getattr(report, name).CopyFrom(pack(np.asarray(array)))


def phases(value: bytes) -> Callable[[agent_pb2.HeatReport], None]:
    return lambda report: setattr(report, "step_phases", value)
