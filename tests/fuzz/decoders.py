"""All decoders of untrusted input, by name, each with its function, valid inputs, and the errors that it may raise."""

from __future__ import annotations

import base64
import io
import json
import struct
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from eplb_core.heat.window import HeatError
from eplb_core.placement import PlacementError
from eplb_core.wire.agent import Heartbeat, PlanStatus, Shape, decode_hello
from eplb_core.wire.codec import decode, encode, pack, unpack
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2, tensor_pb2
from eplb_core.wire.heat import decode_heat_report
from eplb_lab.history.check import HistoryError, read_histories, violations
from eplb_service.control.core.errors import RejectedError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.native import TraceWriter
from eplb_service.io.open_trace import open_trace, read_heat
from eplb_service.io.placement_file import read_placement, write_placement
from eplb_service.io.trace import TraceFacts
from tests.control.core.story import Story
from tests.swap.placed import EXPERTS, INSTALLED, LAYERS, LINEAR, RANKS, SLOTS, plan_of
from worker_agent.swap.machine import BALLOT_WIDTH, Ballot, Progress, VoteOutcome
from worker_agent.swap.rank_layout import Identity, check_plan

SHAPE = Shape(RANKS, LAYERS, EXPERTS, SLOTS, 64)
IDENTITY = Identity("default", "group", 1, "here", (0, 1, 2), SHAPE)
_NATIVE_FILES = ("zarr.json", "heat/zarr.json", "heat/c/0/0/0", "step/zarr.json", "step/c/0")
_WIRE_ERRORS = (WireError, RejectedError, DecodeError)
_kept: list[tempfile.TemporaryDirectory[str]] = []


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat"]), st.integers(0, 1 << 16), st.binary(max_size=8)
    ),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    """Return the valid bytes with damage of the kind that a faulty link or program could cause."""
    changed = bytearray(data)
    for kind, where, piece in edits:
        at = where % (len(changed) + 1)
        if kind == "flip" and at < len(changed):
            changed[at] ^= (piece or b"\x01")[0] or 1
        elif kind == "cut":
            del changed[at : at + max(1, len(piece))]
        elif kind == "insert":
            changed[at:at] = piece
        else:
            changed[at:at] = changed[at : at + 16]
    return bytes(changed)


class Decoder(NamedTuple):
    """A decoder under test.

    It accepts ``seeds`` without an error, and may only raise ``clear`` errors that have a message.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], object]
    clear: tuple[type[Exception], ...]


def outcome_of(decoder: Decoder, data: bytes) -> str:
    """Return the error message, or "" if there was no error.

    Any other error, and an error without a message, is a bug. A warning is a bug as well, except for two numpy warnings
    that a damaged header can cause: a deprecated type name, which Python hides from users, and Python 2 number syntax.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings(
            "ignore", message="Reading `.npy` or `.npz` file required additional header parsing"
        )
        try:
            decoder.read(data)
        except decoder.clear as error:
            if not str(error):
                raise
            return str(error)
    return ""


def heat_seeds() -> list[bytes]:
    counts = pack(np.arange(4 * LAYERS * SLOTS, dtype=np.int32).reshape(4, LAYERS, SLOTS))
    message = agent_pb2.HeatReport(
        first_step=3, layer_epochs=[0] * LAYERS, slot_counts=counts, step_phases=b"\x01\x02\x03\x04"
    )
    return [message.SerializeToString()]


def array_seeds() -> list[bytes]:
    small = np.arange(10).reshape(2, 5)
    large = np.zeros((400, 5), dtype=np.int64)
    return [pack(small).SerializeToString(), pack(large).SerializeToString()]


def report_seeds() -> list[bytes]:
    statuses = [
        agent_pb2.PlanStatus(plan_id=1, layer=0, state=agent_pb2.PLAN_STATE_ACCEPTED),
        agent_pb2.PlanStatus(plan_id=1, layer=0, state=agent_pb2.PLAN_STATE_ABORTED, reason="link"),
    ]
    messages = [agent_pb2.ConnectRequest(plan_status=status) for status in statuses]
    messages.append(agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(step=4, epoch=1, error="none")))
    return [message.SerializeToString() for message in messages]


def hear(data: bytes) -> None:
    """Deliver plan reports and heartbeats to a deployment that has offered a plan."""
    message = agent_pb2.ConnectRequest.FromString(data)
    story = Story()
    story.joins()
    story.offers(0, 1)
    for rank in (2, 0):
        if message.HasField("plan_status"):
            story.deployment.plan_status(rank, decode(PlanStatus, message.plan_status), 1.0)
        if message.HasField("heartbeat"):
            story.deployment.heartbeat(rank, decode(Heartbeat, message.heartbeat))
    story.waits(1.0)


def read_ballot(data: bytes) -> object:
    fields = [struct.unpack_from("<q", data, at)[0] for at in range(0, len(data) - 7, 8)]
    return VoteOutcome.decode(fields).result


@cache
def _folder() -> Path:
    """Return a directory for inputs to file readers, which is removed when the process exits."""
    place = tempfile.TemporaryDirectory(prefix="eplb-fuzz-")
    _kept.append(place)
    return Path(place.name)


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def trace_files() -> list[bytes]:
    """Return trace files: arrays, a table, and the lines that vLLM, Megatron and an SGLang client append to a log."""
    import torch

    heat_TLE = np.arange(24).reshape(4, 2, 3)
    npy = io.BytesIO()
    npz = io.BytesIO()
    pt = io.BytesIO()
    np.save(npy, heat_TLE)
    np.savez(npz, heat=heat_TLE)
    torch.save({"logical_count": torch.from_numpy(heat_TLE)}, pt)
    stats = {"record_type": "eplb_load_stats", "expert_load": [[1, 2, 3]], "p2l_map": [[0, 1, 0]]}
    routed = {"step": 0, "layer": 1, "rank": 0, "top_indices": [[0, 2], [1, 2]]}
    numbers = base64.b64encode(bytes(4) + b"\x01\x00\x00\x00" * 2).decode()
    response = {"meta_info": {"routed_experts": numbers, "prompt_tokens": 2, "completion_tokens": 2}}
    files: list[list[dict[str, Any]]] = [
        [{"record_type": "eplb_load_meta", "num_ranks": 1}, stats, stats],
        [routed, routed],
        [response] * 64,
        [{"choices": [{"routed_experts": [[[0, 1]], [[1, 2]]]}]}] * 64,
    ]
    return [
        *(npy.getvalue(), npz.getvalue(), pt.getvalue()),
        json.dumps({"heat": heat_TLE.tolist()}).encode(),
        b"step,layer,expert,tokens\n0,0,0,4\n0,0,1,2\n",
        *("".join(json.dumps(record) + "\n" for record in records).encode() for records in files),
    ]


def placements() -> list[bytes]:
    found = []
    for name in ("map.npz", "map.json", "map.yaml", "map.lines.jsonl"):
        path = _folder() / name
        write_placement(path, LINEAR, LINEAR.default_log2phy())
        found.append(name.encode().ljust(8)[:8] + path.read_bytes())
    return found


def read_placement_bytes(data: bytes) -> object:
    """Read a placement file. The first eight bytes are the file's name, whose suffix determines the format."""
    suffix = {b"j": ".json", b"y": ".yaml", b"p": ".pt", b"l": ".jsonl"}.get(data[4:5], ".npz")
    return read_placement(_file(f"placement{suffix}", data[8:]), EXPERTS, RANKS)


@cache
def _native() -> Path:
    """Return a native trace, whose files ``read_native`` replaces one at a time."""
    path = _folder() / "native.eplb-trace"
    with TraceWriter(path, TraceFacts(origin="fuzz"), 2, 3) as writer:
        writer.append(np.arange(24).reshape(4, 2, 3))
    return path


def native_files() -> list[bytes]:
    return [bytes([at]) + (_native() / name).read_bytes() for at, name in enumerate(_NATIVE_FILES)]


def read_native(data: bytes) -> None:
    """Replace one file of the native trace. The first byte selects the file, and the rest is its content."""
    path = _native() / _NATIVE_FILES[data[0] % len(_NATIVE_FILES) if data else 0]
    before = path.read_bytes()
    try:
        path.write_bytes(data[1:])
        trace = open_trace(_native())
        for start in range(0, min(trace.steps, 8), 4):
            trace.heat(start, min(start + 4, trace.steps))
    finally:
        path.write_bytes(before)


def histories() -> list[bytes]:
    version: dict[str, Any] = {"before": [0, 1], "after": [1, 2], "layer_epochs": [1]}
    start = {
        "kind": "start",
        "rank": 0,
        "ranks": 1,
        "group": "g",
        "epoch": 0,
        "digest": 1,
        "layer_epochs": [0],
    }
    vote = {
        "kind": "vote",
        "step": 3,
        "number": 1,
        "heard": True,
        "progress": "READY",
        "plan": 7,
        "abort": False,
    }
    lines = [
        start,
        {"kind": "transfer", "step": 1, "generation": 1, "lane": 0, "layers": [0]},
        {**vote, "decision": "COMMIT"},
        {"kind": "commit", "step": 3, "generation": 1, "layer": 0, **version},
        {"kind": "heat", "first_step": 3, "steps": 2, "layer_epochs": [1]},
    ]
    return ["".join(json.dumps(line) + "\n" for line in lines).encode()]


def read_history(data: bytes) -> None:
    folder = _file("history/rank-0-g.jsonl", data).parent
    for ranks in read_histories(folder).values():
        list(violations(ranks))


DECODERS: dict[str, Decoder] = {
    "array": Decoder(
        array_seeds,
        lambda data: unpack(tensor_pb2.PackedArray.FromString(data), (None, 5), "field"),
        _WIRE_ERRORS,
    ),
    "plan": Decoder(
        lambda: [encode(plan_of(0, 0)).SerializeToString()],
        lambda data: check_plan(agent_pb2.Plan.FromString(data), IDENTITY, INSTALLED),
        _WIRE_ERRORS,
    ),
    "hello": Decoder(
        lambda: [encode(IDENTITY.hello(INSTALLED)).SerializeToString()],
        lambda data: decode_hello(agent_pb2.Hello.FromString(data)),
        _WIRE_ERRORS,
    ),
    "heat report": Decoder(
        heat_seeds,
        lambda data: decode_heat_report(agent_pb2.HeatReport.FromString(data), SHAPE, 64),
        _WIRE_ERRORS,
    ),
    "reports about plans": Decoder(report_seeds, hear, _WIRE_ERRORS),
    "ballot": Decoder(
        lambda: [
            struct.pack(
                f"<{BALLOT_WIDTH}q", *Ballot(Progress.READY, plan=7, installed=1, abort=False).encode()
            )
        ],
        read_ballot,
        (ValueError,),
    ),
    "trace file": Decoder(
        trace_files,
        # Only lines from an SGLang client need ``top_k``. The other formats reject it.
        lambda data: read_heat(_file("trace", data), ReadAs(top_k=1 if b"meta_info" in data else None)),
        (HeatError,),
    ),
    "native trace": Decoder(native_files, read_native, (HeatError,)),
    "placement file": Decoder(placements, read_placement_bytes, (PlacementError,)),
    "history": Decoder(histories, read_history, (HistoryError,)),
}
