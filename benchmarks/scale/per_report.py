"""``python -m benchmarks.scale.per_report``: CPU of one report in the service, without gRPC, and bytes of a plan."""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.scale.heat import Scale, drawn_reports
from eplb_service.heat.assembler import HeatAssembler, memory_bytes
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.heat import decode_heat_report, encode_heat_report
from eplb_service.wire.hello import Shape
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest
from eplb_service.wire.shared_plan import SharedPlan

_WINDOW_STEPS, _PENDING_STEPS = 256, 128
_BLOCKS = 4


def main() -> None:
    """Print one column per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,320,1024")
    parser.add_argument("--steps", type=int, default=16, help="in a report (16)")
    options = parser.parse_args()
    scales = [Scale(int(word), 58, 256) for word in options.ranks.split(",")]
    table = Table("ranks", *(f"{scale.ranks:,}" for scale in scales))
    columns = [{**_report_cost(scale, options.steps), **_plan_cost(scale)} for scale in scales]
    for name in columns[0]:
        table.add_row(name, *(f"{column[name]:,.1f}" for column in columns))
    Console().print(table)


def _report_cost(scale: Scale, steps: int) -> dict[str, float]:
    """Microseconds per report, over all ranks' reports of a few blocks of steps."""
    shape = _shape(scale)
    placement = scale.placement()
    heat = HeatAssembler(scale.ranks, scale.layers, scale.experts, scale.slots, _WINDOW_STEPS, _PENDING_STEPS)
    tables_RLE = placement.default_log2phy()
    for layer in range(scale.layers):
        heat.placements.place(layer, 0, placement.phy2log_LRS[layer], tables_RLE[:, layer])
    messages = [
        agent_pb2.ConnectRequest(heat_report=encode_heat_report(report))
        for report in drawn_reports(scale, 0, steps, sums=True)
    ]
    parsing = decoding = adding = longest = 0.0
    for block in range(_BLOCKS):
        for rank in range(scale.ranks):
            message = messages[(block + rank) % len(messages)]
            message.heat_report.first_step = block * steps
            data = message.SerializeToString()
            began = time.process_time()
            parsed = agent_pb2.ConnectRequest.FromString(data)
            is_parsed = time.process_time()
            report = decode_heat_report(parsed.heat_report, shape, _PENDING_STEPS)
            is_decoded = time.process_time()
            heat.add(rank, report)
            is_added = time.process_time()
            if block:
                parsing += is_parsed - began
                decoding += is_decoded - is_parsed
                adding += is_added - is_decoded
                longest = max(longest, is_added - is_decoded)
    scaled = 1e6 / (_BLOCKS - 1) / scale.ranks
    return {
        "bytes of a report": float(messages[0].ByteSize()),
        "parse, us": scaled * parsing,
        "decode and check, us": scaled * decoding,
        "put together, us": scaled * adding,
        "longest of these, us": 1e6 * longest,
    }


def _plan_cost(scale: Scale) -> dict[str, float]:
    """Of one layer in which half of the ranks get an expert."""
    slots_RS = scale.placement().phy2log_LRS[0]
    tables_RE = scale.placement().default_log2phy()[:, 0]
    digests = tuple(table_digest(table_E) for table_E in tables_RE)
    moves_M5 = np.tile(np.array([[0, 0, 1, 0, 0]], dtype=np.int32), (scale.ranks // 2, 1))
    plan = RankPlan.of(1, 1, 0, 0, (RankLayer(0, slots_RS, tables_RE[0], digests, moves_M5),))
    began = time.process_time()
    shared = SharedPlan.of(plan, [tables_RE])
    is_encoded = time.process_time()
    sizes = [len(shared.response(rank)) for rank in range(scale.ranks)]
    return {
        "bytes of a plan's layer": float(sizes[0]),
        "encode it for all ranks, us": 1e6 * (is_encoded - began),
        "put a rank's together, us": 1e6 * (time.process_time() - is_encoded) / len(sizes),
        "memory for heat at most, MB": memory_bytes(_shape(scale), _WINDOW_STEPS, _PENDING_STEPS) / 1e6,
    }


def _shape(scale: Scale) -> Shape:
    return Shape(scale.ranks, scale.layers, scale.experts, scale.slots, 1)


if __name__ == "__main__":
    main()
