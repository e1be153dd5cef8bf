"""Every decoder that reads what others wrote, by name."""

from __future__ import annotations

from eplb_service.heat.window import HeatError
from eplb_service.placement import PlacementError
from eplb_service.wire.codec import unpack
from eplb_service.wire.generated import agent_pb2, tensor_pb2
from eplb_service.wire.heat import decode_heat_report
from eplb_service.wire.hello import decode_hello
from tests.fuzz.decoder import Decoder
from tests.fuzz.from_disk import (
    histories,
    native_files,
    placements,
    read_history,
    read_native,
    read_placement_bytes,
    read_trace_file,
    trace_files,
)
from tests.fuzz.from_wire import (
    IDENTITY,
    INSTALLED,
    SHAPE,
    WIRE_ERRORS,
    array_seeds,
    ballot_seeds,
    hear,
    heat_seeds,
    hello_seeds,
    message_seeds,
    plan_seeds,
    read_ballot,
)
from worker_agent.checked_plan import check_plan
from worker_agent.history.check import HistoryError

DECODERS: dict[str, Decoder] = {
    "array": Decoder(
        array_seeds,
        lambda data: unpack(tensor_pb2.PackedArray.FromString(data), (None, 5), "field"),
        WIRE_ERRORS,
    ),
    "plan": Decoder(
        plan_seeds, lambda data: check_plan(agent_pb2.Plan.FromString(data), IDENTITY, INSTALLED), WIRE_ERRORS
    ),
    "hello": Decoder(hello_seeds, lambda data: decode_hello(agent_pb2.Hello.FromString(data)), WIRE_ERRORS),
    "heat report": Decoder(
        heat_seeds,
        lambda data: decode_heat_report(agent_pb2.HeatReport.FromString(data), SHAPE, 64),
        WIRE_ERRORS,
    ),
    "reports about plans": Decoder(message_seeds, hear, WIRE_ERRORS),
    "ballot": Decoder(ballot_seeds, read_ballot, (ValueError,)),
    "trace file": Decoder(trace_files, read_trace_file, (HeatError,)),
    "native trace": Decoder(native_files, read_native, (HeatError,)),
    "placement file": Decoder(placements, read_placement_bytes, (PlacementError,)),
    "history": Decoder(histories, read_history, (HistoryError,)),
}
