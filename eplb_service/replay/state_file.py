"""The file that an interrupted replay leaves, and goes on from to the very results of one that was not interrupted.

It holds numbers and names alone, in numpy's format: reading one runs nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.atomic_write import write_atomically
from eplb_service.heat.window import HeatError
from eplb_service.io.containers.numpy_file import Array, read_npz
from eplb_service.io.trace import Trace
from eplb_service.placement import Placement, PlacementError
from eplb_service.planner.outlook import Serving
from eplb_service.replay.baseline import BaselineRow
from eplb_service.replay.jobs import Job, JobProgress, Ledger, Scene
from eplb_service.replay.policy_replay import ReplayedDecision
from eplb_service.replay.policy_run import RunState
from eplb_service.replay.schedule import ReplayError

SUFFIX = ".npz"

_FORMAT = "eplb-replay-state-3"
_SAMPLED_STEPS = 8
_NUMBERS = [field.name for field in fields(ReplayedDecision) if not field.name.endswith("_L")]
_WHOLE = {field.name for field in fields(ReplayedDecision) if field.type == "int"}


def fingerprint(jobs: Sequence[Job], trace: Trace, scene: Scene) -> str:
    """Identifies a replay by what its results depend on: trace, jobs and scene, not the machine.

    Of the trace its shape, what it says of itself, and the heat of its first and last steps.
    """
    digest = hashlib.sha256()
    for first in (0, max(0, trace.steps - _SAMPLED_STEPS)):
        digest.update(trace.heat(first, min(trace.steps, first + _SAMPLED_STEPS)).tobytes())
    topology = scene.topology
    for array in (topology.nodes_R, topology.token_groups_R, scene.phy2log_LRS):
        digest.update(b"-" if array is None else np.ascontiguousarray(array, dtype="<i4").tobytes())
    identity = [
        trace.shape,
        trace.facts,
        scene.costs,
        topology.bytes_per_expert,
        [_identity(job) for job in jobs],
    ]
    digest.update(repr(identity).encode())
    return digest.hexdigest()


def save_state(path: Path, rounds: Sequence[tuple[str, Ledger]]) -> None:
    """Write what each round, named by its fingerprint, has found so far; raises ``OutputError``."""
    arrays: dict[str, Array] = {}
    heads = []
    for number, (name, ledger) in enumerate(rounds):
        kept = [
            [] if _begins_again(job) else found
            for job, found in zip(ledger.jobs, ledger.reported, strict=True)
        ]
        heads.append({"fingerprint": name, "jobs": [len(reported) for reported in kept]})
        for job, reported in enumerate(kept):
            arrays |= {f"{number}/{job}/{key}": value for key, value in _arrays_of(reported).items()}
    head = json.dumps({"format": _FORMAT, "rounds": heads}).encode()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, head=np.frombuffer(head, dtype=np.uint8), **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())


class SavedState:
    """What a state file holds; raises ``ReplayError`` where it is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._arrays = read_npz(path)
            head = json.loads(self._arrays["head"].tobytes())
            known = head["format"] == _FORMAT
            self._rounds = [
                (str(entry["fingerprint"]), list(map(int, entry["jobs"]))) for entry in head["rounds"]
            ]
        except OSError as error:
            raise ReplayError(f"{path}: cannot be read ({error.strerror or error})") from error
        except (HeatError, KeyError, ValueError, TypeError, RecursionError) as error:
            raise ReplayError(f"{path}: is no state of an interrupted replay") from error
        if not known:
            raise ReplayError(f"{path}: was left by another release of eplb; begin again without it")

    def ledger(self, number: int, name: str, jobs: Sequence[Job], trace: Trace, scene: Scene) -> Ledger:
        """What was found in round ``number``, whose fingerprint must be ``name``; empty where it was not begun.

        Parameters
        ----------
        number, name
            The round, and its fingerprint.
        jobs
            Of that round, in their order.
        trace, scene
            What they replay, and on which ranks and slots.

        Raises
        ------
        ReplayError
            Where the file was left by a replay of another trace or with other options.
        """
        if number >= len(self._rounds):
            return Ledger(jobs)
        found, counts = self._rounds[number]
        if found != name or len(counts) != len(jobs):
            raise ReplayError(
                f"{self._path}: was left by a replay of another trace or with other options; "
                "repeat that command, or begin again without it"
            )
        reported = []
        for position, (job, count) in enumerate(zip(jobs, counts, strict=True)):
            prefix = f"{number}/{position}/"
            arrays = {
                key.removeprefix(prefix): value
                for key, value in self._arrays.items()
                if key.startswith(prefix)
            }
            try:
                reported.append(_progress_of(arrays, count, job, trace, scene))
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise ReplayError(f"{self._path}: is damaged ({' '.join(str(error).split())})") from error
        return Ledger(jobs, reported)


def _begins_again(job: Job) -> bool:
    """Whether a job is run from its beginning: a policy that decides on change knows more than what serves."""
    return job.policy is not None and job.policy.on_change


def _identity(job: Job) -> str:
    """A job as text, without what does not change its results."""
    policy = job.policy
    if policy is not None:
        policy = replace(policy, settings=replace(policy.settings, threads=None))
    hindsight = None if job.hindsight is None else replace(job.hindsight, threads=None)
    return repr(
        (
            job.label,
            job.split,
            job.deal_width,
            job.setup,
            policy and (policy.name, policy.target, policy.on_change, asdict(policy.settings)),
            hindsight,
        )
    )


def _arrays_of(reported: Sequence[JobProgress]) -> dict[str, Array]:
    if not reported:
        return {}
    last = reported[-1]
    arrays: dict[str, Array] = {"loads": last.loads_LR}
    decisions = [progress.made for progress in reported if isinstance(progress.made, ReplayedDecision)]
    rows = [progress.made for progress in reported if isinstance(progress.made, BaselineRow)]
    if rows:
        columns: dict[str, list[Any]] = {
            name: [getattr(row, name) for row in rows] for name in BaselineRow._fields
        }
        return arrays | {name: np.stack(values) for name, values in columns.items() if values[0] is not None}
    arrays["decisions"] = np.array(
        [[getattr(made, name) for name in _NUMBERS] for made in decisions], dtype=float
    )
    arrays["realised"] = np.stack([made.par_realised_L for made in decisions])
    arrays["busy"] = np.stack([made.busy_L for made in decisions if made.busy_L is not None])
    us = [made.us_realised_L for made in decisions if made.us_realised_L is not None]
    if us:
        arrays["realised_us"] = np.stack(us)
    assert last.state is not None
    arrays |= _serving_arrays("serving", last.state.serving)
    if last.state.coming is not None:
        step, coming = last.state.coming
        arrays |= {"coming_step": np.array([step]), **_serving_arrays("coming", coming)}
    return arrays


def _serving_arrays(name: str, serving: Serving) -> dict[str, Array]:
    return {f"{name}_phy2log": serving.placement.phy2log_LRS, f"{name}_log2phy": serving.log2phy_RLE}


def _progress_of(
    arrays: Mapping[str, Array], count: int, job: Job, trace: Trace, scene: Scene
) -> list[JobProgress]:
    steps = job.setup.schedule.decisions(trace.steps)
    if count == 0:
        return []
    if count > len(steps):
        raise ValueError(f"{count} decisions where {len(steps)} fall")
    loads_LR = _checked(arrays["loads"], (trace.layers, scene.topology.ranks))
    rows = (count, trace.layers)
    if job.policy is None:
        left_alone, floor = _checked(arrays["left_alone_L"], rows), _checked(arrays["floor_L"], rows)
        hindsight = [None] * count if job.hindsight is None else _checked(arrays["hindsight_L"], rows)
        us = _times(arrays, "left_alone_us_L", rows)
        return [
            JobProgress(BaselineRow(*row), loads_LR)
            for row in zip(left_alone, floor, hindsight, us, strict=True)
        ]
    numbers = _checked(arrays["decisions"], (count, len(_NUMBERS)))
    realised = _checked(arrays["realised"], rows)
    us = _times(arrays, "realised_us", rows)
    busy = _checked(arrays["busy"], rows)
    reported = [
        JobProgress(_decision(*row), loads_LR) for row in zip(numbers, realised, us, busy, strict=True)
    ]
    coming = None
    if "coming_step" in arrays:
        coming = int(arrays["coming_step"][0]), _serving(arrays, "coming", job, trace, scene)
    state = RunState(_serving(arrays, "serving", job, trace, scene), coming)
    reported[-1] = replace(reported[-1], state=state)
    return reported


def _times(arrays: Mapping[str, Array], name: str, rows: tuple[int, int]) -> Sequence[Array | None]:
    """Microseconds of each decision's layers; ``None`` for each where there was no cost curve."""
    return list(_checked(arrays[name], rows)) if name in arrays else [None] * rows[0]


def _decision(numbers: Array, realised_L: Array, us_L: Array | None, busy_L: Array) -> ReplayedDecision:
    named = dict(zip(_NUMBERS, numbers.tolist(), strict=True))
    whole = {name: int(value) if name in _WHOLE else value for name, value in named.items()}
    return ReplayedDecision(**whole, par_realised_L=realised_L, us_realised_L=us_L, busy_L=busy_L)


def _serving(arrays: Mapping[str, Array], name: str, job: Job, trace: Trace, scene: Scene) -> Serving:
    start = scene.placement(trace, job.setup)
    phy2log, tables = arrays[f"{name}_phy2log"], arrays[f"{name}_log2phy"]
    if phy2log.shape != start.phy2log_LRS.shape:
        raise PlacementError(f"{name} has the shape {list(phy2log.shape)}")
    placement = Placement(phy2log, trace.experts)
    if tables.dtype != np.int32:
        raise PlacementError(f"tables of {name} hold {tables.dtype}, not int32")
    placement.check_log2phy(tables)
    return Serving(placement, tables)


def _checked(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape or array.dtype != np.float64 or np.isinf(array).any():
        raise ValueError(f"{array.dtype} {list(array.shape)} where numbers {list(shape)} were expected")
    return array
