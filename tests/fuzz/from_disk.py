"""What is read from disk: good bytes of every kind of file, and what reads them."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.native.writer import TraceWriter
from eplb_service.io.open_trace import open_trace, read_heat
from eplb_service.io.placement_file import read_placement, write_placement
from eplb_service.io.trace import TraceFacts
from tests.swap.world import EXPERTS, LINEAR, RANKS
from worker_agent.history.check import read_histories, violations


@cache
def _folder() -> Path:
    """Where inputs are written for readers of files; forgotten with the process."""
    place = tempfile.TemporaryDirectory(prefix="eplb-fuzz-")
    _kept.append(place)
    return Path(place.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def trace_files() -> list[bytes]:
    import torch

    heat_TLE = np.arange(24).reshape(4, 2, 3)
    npy, npz, pt = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, heat_TLE)
    np.savez(npz, heat=heat_TLE)
    torch.save({"logical_count": torch.from_numpy(heat_TLE)}, pt)
    text = json.dumps({"heat": heat_TLE.tolist()}).encode()
    return [
        npy.getvalue(),
        npz.getvalue(),
        pt.getvalue(),
        text,
        b"step,layer,expert,tokens\n0,0,0,4\n0,0,1,2\n",
        *_record_files(),
    ]


def _record_files() -> list[bytes]:
    """What vLLM, Megatron and a client of SGLang append, line by line."""
    stats = {"record_type": "eplb_load_stats", "expert_load": [[1, 2, 3]], "p2l_map": [[0, 1, 0]]}
    routed = {"step": 0, "layer": 1, "rank": 0, "top_indices": [[0, 2], [1, 2]]}
    numbers = base64.b64encode(bytes(4) + b"\x01\x00\x00\x00" * 2).decode()
    response = {"meta_info": {"routed_experts": numbers, "prompt_tokens": 2, "completion_tokens": 2}}
    answers = [{"choices": [{"routed_experts": [[[0, 1]], [[1, 2]]]}]}] * 64
    lines = (
        [{"record_type": "eplb_load_meta", "num_ranks": 1}, stats, stats],
        [routed, routed],
        [response] * 64,
    )
    return [
        "".join(json.dumps(record) + "\n" for record in records).encode() for records in (*lines, answers)
    ]


def read_trace_file(data: bytes) -> object:
    return read_heat(_file("trace", data), ReadAs(top_k=1))


def placements() -> list[bytes]:
    found = []
    for name in ("map.npz", "map.json", "map.yaml", "map.lines.jsonl"):
        path = _folder() / name
        write_placement(path, LINEAR, LINEAR.default_log2phy())
        found.append(name.encode().ljust(8)[:8] + path.read_bytes())
    return found


def read_placement_bytes(data: bytes) -> object:
    """The first eight bytes name the file: its name says its format."""
    suffix = {b"j": ".json", b"y": ".yaml", b"p": ".pt", b"l": ".jsonl"}.get(data[4:5], ".npz")
    return read_placement(_file(f"placement{suffix}", data[8:]), EXPERTS, RANKS)


_NATIVE_FILES = ("zarr.json", "heat/zarr.json", "heat/c/0/0/0", "step/zarr.json", "step/c/0")


@cache
def _native() -> Path:
    """A native trace, of which one file is replaced at a time."""
    path = _folder() / "native.eplb-trace"
    with TraceWriter(path, TraceFacts(origin="fuzz"), 2, 3) as writer:
        writer.append(np.arange(24).reshape(4, 2, 3))
    return path


def native_files() -> list[bytes]:
    return [bytes([at]) + (_native() / name).read_bytes() for at, name in enumerate(_NATIVE_FILES)]


def read_native(data: bytes) -> None:
    """The first byte says which file is replaced by the rest."""
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
    start = {
        "kind": "start",
        "rank": 0,
        "ranks": 1,
        "group": "g",
        "epoch": 0,
        "digest": 1,
        "layer_epochs": [0],
    }
    version: dict[str, Any] = {"before": [0, 1], "after": [1, 2], "layer_epochs": [1]}
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
        {"kind": "transfer", "step": 1, "generation": 1, "lane": 0, "layer": 0},
        {**vote, "decision": "COMMIT"},
        {"kind": "commit", "step": 3, "generation": 1, "layer": 0, **version},
        {"kind": "heat", "first_step": 3, "steps": 2, "layer_epochs": [1]},
    ]
    return ["".join(json.dumps(line) + "\n" for line in lines).encode()]


def read_history(data: bytes) -> None:
    folder = _file("history/rank-0-g.jsonl", data).parent
    for ranks in read_histories(folder).values():
        list(violations(ranks))
