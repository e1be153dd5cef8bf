"""Lanes that experts travel over: host to host by gloo, device to device by NCCL or HCCL.

Nothing enters a device's lane before both ends are there. What waits on a device for a peer that never comes can hardly
be taken back: it holds part of the device, and the libraries end it by ending the process. So before every exchange
both ends announce over the host what they send, once for all pieces of an expert. If a rank has failed, its broken
link is noticed there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist

from worker_agent.device import Mark, bytes_of, device_name, format_of, in_blocks
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import TransferBackend
from worker_agent.swap.group import AgentGroup

_POLL_SECONDS = 0.0001
_NEVER = timedelta(days=365)
"""Deadlines are the transfer's own: the libraries' watchdogs end the process where one passes."""
_MAX_NCCL_BLOCKS = 4
"""Thread blocks that a transfer may hold: it runs beside the model's kernels, some of which need all of the rest."""
_HCCL_BUFFER_MIB = 100
"""HCCL takes twice this of device memory for a communicator; its default of 200 is meant for the model's own."""


@dataclass(frozen=True)
class Parcel:
    """Memory of an expert to send to or receive from ``peer``; on a lane uint8 ``[n]``, or a whole tensor in blocks."""

    peer: int
    data: torch.Tensor
    expert: int = -1


class Deadline:
    """Moment by which something must be done, ``seconds`` from now."""

    def __init__(self, seconds: float, runtime: Runtime = REAL) -> None:
        self._seconds = seconds
        self._runtime = runtime
        self._end = runtime.now() + seconds

    def left(self) -> float:
        """Return the seconds that are left; raises ``TimeoutError`` where none are."""
        left = self._end - self._runtime.now()
        if left <= 0:
            raise TimeoutError(f"not done within {self._seconds:g} s")
        return left

    def rest(self, seconds: float) -> None:
        """Wait for so long."""
        self._runtime.sleep(seconds)


class Lane(Protocol):
    """A process group that carries transfers and nothing else."""

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> float:
        """Send the pieces of one expert to a peer while receiving another expert from the same or another peer.

        When it returns the bytes have left and arrived, on the device as well, in the order of the current stream.
        Returns the duration in seconds, from the moment that both ends were ready. Raises ``TimeoutError`` past the
        deadline, ``RuntimeError`` on a broken link.
        """

    def retire(self) -> None:
        """Carry nothing more. The other ranks' exchanges with this one fail as soon as they see it."""


class _HostLane:
    """Lane over a gloo group of its own, from host memory to host memory; what is on a device is copied through it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> float:
        """See ``Lane``. Copies to and from a device run on the current stream, and are done when this returns."""
        self.meet(outgoing, incoming, deadline)
        left = deadline.left()
        for leaving, arriving in zip_longest(outgoing, incoming):
            self._exchange_piece(leaving, arriving, deadline)
        return left - deadline.left()

    def meet(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> None:
        """Announce to each peer what this rank sends to it, and compare the peer's announcement with what is expected.

        If the sizes differed, gloo would end the process, and a device would wait for bytes that never arrive.
        """
        works = []
        heard = dict[int, torch.Tensor]()
        sent = []  # gloo reads these tensors until the sends complete
        for peer in sorted({parcel.peer for parcel in (*outgoing, *incoming)}):
            heard[peer] = torch.zeros(2, dtype=torch.int64)
            sent.append(_announcement([parcel for parcel in outgoing if parcel.peer == peer]))
            works.append(self._open.recv([heard[peer]], peer, 0))
            works.append(self._open.send([sent[-1]], peer, 0))
        for work in works:
            work.wait(timedelta(seconds=deadline.left()))
        for peer in {parcel.peer for parcel in incoming}:
            check_announced(peer, heard[peer], [parcel for parcel in incoming if parcel.peer == peer])

    def retire(self) -> None:
        """See ``Lane``: the links close with the group."""
        self._group = None

    def _exchange_piece(self, outgoing: Parcel | None, incoming: Parcel | None, deadline: Deadline) -> None:
        works = []
        arriving = None
        if incoming is not None:
            in_place = incoming.data.device.type == "cpu" and incoming.data.dtype == torch.uint8
            arriving = incoming.data if in_place else torch.empty(incoming.data.nbytes, dtype=torch.uint8)
            works.append(self._open.recv([arriving], incoming.peer, 0))
        if outgoing is not None:
            works.append(self._open.send([bytes_of(outgoing.data.cpu())], outgoing.peer, 0))
        for work in works:
            work.wait(timedelta(seconds=deadline.left()))
        if incoming is not None and arriving is not None and arriving is not incoming.data:
            incoming.data.copy_(arriving.view(incoming.data.dtype).reshape(incoming.data.shape))

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has retired the lane")
        return self._group


def _announcement(parcels: Sequence[Parcel]) -> torch.Tensor:
    """Return the number of bytes that a rank sends and a fingerprint of its piece sizes, int64 ``[2]``."""
    sizes = [parcel.data.nbytes for parcel in parcels]
    return torch.tensor([sum(sizes), zlib.crc32(repr(sizes).encode())])


def check_announced(peer: int, heard_2: torch.Tensor, expected: Sequence[Parcel]) -> None:
    """Raise ``ValueError`` if a peer's announcement, int64 ``[2]``, does not match the pieces this rank expects."""
    own = _announcement(expected).tolist()
    if heard_2.tolist() != own:
        raise ValueError(
            f"rank {peer} sends {int(heard_2[0])} bytes, this rank expects {own[0]}: their experts differ in dtype or "
            "shape, or the ranks run different releases of the agent"
        )


class _DeviceGroup(Protocol):
    """Communicator of one device's library."""

    sends_views: bool
    """True if a tensor may begin in the middle of its storage."""

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """Queue both, after what the current stream holds and before what comes on it; never waits."""

    def release(self) -> None:
        """Give the links up; nothing is under way on them."""

    def abort(self) -> bool:
        """End what is under way; return whether no memory is read or written by it any more."""


class _DeviceLane:
    """Lane over a device group, and a host lane of the same ranks to meet on.

    ``mark`` marks a point in the current stream of the device.
    """

    def __init__(self, group: _DeviceGroup, handshake: _HostLane, mark: Callable[[], Mark]) -> None:
        self._group = group
        self._handshake = handshake
        self._mark = mark
        self._under_way = False
        self._touched: list[torch.Tensor] = []
        self._bounces: dict[str, torch.Tensor] = {}

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> float:
        """See ``Lane``; peers must be about to do the same, or it fails at the deadline with nothing begun."""
        self._handshake.meet(outgoing, incoming, deadline)
        left = deadline.left()
        self._under_way = True
        for leaving, arriving in zip_longest(outgoing, incoming):
            self._queue(leaving, arriving)
        done = self._mark()
        while not done.passed():
            deadline.left()
            deadline.rest(_POLL_SECONDS)
        self._under_way = False
        self._touched = []
        return left - deadline.left()

    def _queue(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """Queue the exchange of two pieces. Stream order keeps later pieces out of bounce buffers in use."""
        leaving = outgoing and self._bounced("out", outgoing)
        arriving = incoming and self._bounced("in", incoming)
        if leaving is not None and outgoing is not None and leaving is not outgoing:
            leaving.data.copy_(outgoing.data)
        self._touched += [parcel.data for parcel in (leaving, arriving) if parcel is not None]
        self._group.exchange(leaving, arriving)
        if arriving is not None and incoming is not None and arriving is not incoming:
            incoming.data.copy_(arriving.data)

    def retire(self) -> None:
        """See ``Lane``. Memory that a device may still write to is kept for ever rather than given to another."""
        self._handshake.retire()
        if not self._under_way:
            self._group.release()
        elif not self._group.abort():
            _STILL_WRITTEN.append(self)

    def _bounced(self, way: str, parcel: Parcel) -> Parcel:
        """Return the parcel itself, or one that begins where its storage does."""
        if self._group.sends_views or parcel.data.storage_offset() == 0:
            return parcel
        if in_blocks(parcel.data):
            raise ValueError(
                f"expert {parcel.expert} in the NPU's format {format_of(parcel.data)} begins in the middle of its "
                "storage; torch_npu can only send the whole storage of such a tensor"
            )
        bounce, size = self._bounces.get(way), parcel.data.numel()
        if bounce is None or bounce.numel() < size:
            bounce = self._bounces[way] = torch.empty_like(parcel.data)
        return Parcel(parcel.peer, bounce[:size])


_STILL_WRITTEN: list[_DeviceLane] = []
MAX_LOST_LANES = 2
"""Lost lanes after which balancing stops. Each keeps its communicator and staging memory until the engine ends."""


def lost_lanes() -> str | None:
    """Return why this process opens no more lanes, or ``None`` if it still may."""
    if len(_STILL_WRITTEN) < MAX_LOST_LANES:
        return None
    return (
        f"balancing has stopped: {len(_STILL_WRITTEN)} transfers timed out on the device, and their memory "
        "cannot be freed; check the links between the devices, then restart the engine"
    )


class _NcclGroup:
    """NCCL communicator of the ranks of ``store``; making it is a collective, takes long, and uses the current stream.

    Single sends would make a communicator for every pair of ranks; grouped ones use the group's, which exists once all
    ranks have gone through a first collective.
    """

    sends_views = True

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        if not dist.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL; ask for the transfer backend gloo")
        # torch's stubs know these classes only where torch was built with NCCL.
        library: Any = dist.ProcessGroupNCCL
        options = library.Options()
        options._timeout = _NEVER
        options.config.max_ctas = _MAX_NCCL_BLOCKS
        with _errors_left_to_us():
            self._group: Any = library(store, rank, size, options)
        self._group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        self._group._start_coalescing()
        if outgoing is not None:
            self._group.send([outgoing.data], outgoing.peer, 0)
        if incoming is not None:
            self._group.recv([incoming.data], incoming.peer, 0)
        # Makes the current stream wait, not this thread.
        self._group._end_coalescing().wait()

    def release(self) -> None:
        self.abort()

    def abort(self) -> bool:
        """See ``_DeviceGroup``: NCCL's kernels look whether they were aborted."""
        end = getattr(self._group, "abort", None) or self._group._shutdown  # the latter before torch 2.6
        end()
        return True


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """While a group is made: it reads here whether an error of a peer ends the process, as is the default."""
    ours = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _HcclGroup:
    """HCCL communicator of the ranks of ``store``; making it is a collective, takes long, and uses the current stream.

    HCCL reads a tensor that begins in the middle of its storage wrongly in some formats, so it is given none.
    """

    sends_views = False

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options: Any = ProcessGroupHCCL.Options()
        options._timeout = _NEVER
        options.hccl_config = {
            "hccl_buffer_size": _HCCL_BUFFER_MIB,
            "hccl_op_expansion_mode": hccl_expansion_mode(device_name(device)),
        }
        self._group: Any = ProcessGroupHCCL(store, rank, size, options)
        self._group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.get_device_module(device).current_stream(device).synchronize()

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        asked = [("isend", outgoing), ("irecv", incoming)]
        parts = [(way, parcel.data, parcel.peer) for way, parcel in asked if parcel is not None]
        self._group.batch_isend_irecv(*map(list, zip(*parts, strict=True))).wait()

    def release(self) -> None:
        self._group.abort_hccl_comm("the lane is retired")

    def abort(self) -> bool:
        """See ``_DeviceGroup``: HCCL cannot end what a device is at without ending all that the device is at."""
        return False


def hccl_expansion_mode(device: str) -> int:
    """Return torch_npu's number of the place where HCCL expands a lane's operators, regardless of the environment.

    The vector cores (3), which ``HCCL_OP_EXPANSION_MODE=AIV`` assigns to the model's groups, serve one group per device
    at a time, so the lane leaves them to the model. HCCL expands the lane's operators on the host (1) instead. The 910C
    does not support that mode and expands them on the device's AI CPU (2).

    References
    ----------
    CANN 8.5, *HCCL_OP_EXPANSION_MODE*; Ascend Extension for PyTorch 7.0, *HCCL parameters by pg_options*.
    """
    return 2 if device.startswith("Ascend910_93") else 1


_LIBRARIES = {"cuda": "nccl", "npu": "hccl"}
"""Library of collectives from device to device, by the kind of device."""


def choose_backend(asked: TransferBackend, device_type: str) -> str:
    """Library that carries experts on such a device; raises ``ValueError`` where the one asked for cannot reach it."""
    library = _LIBRARIES.get(device_type, "gloo")
    if asked == "auto":
        return library
    if asked not in ("gloo", library):
        reached = next(device for device, own in _LIBRARIES.items() if own == asked)
        raise ValueError(
            f"transfer_backend {asked} moves experts between {reached} devices, these are on {device_type}; "
            "ask for auto, or for gloo, which goes through the host"
        )
    return asked


class Lanes:
    """Opens lanes by number; every rank asks for the same numbers, each in its own time.

    Opening one waits for all ranks, on a device for seconds, and so does the current stream: never done on the model's
    thread, nor on its stream, while it serves.
    """

    def __init__(self, group: AgentGroup, backend: str, device: torch.device, timeout: timedelta) -> None:
        self.rank = group.rank
        self.device = device
        self._group = group
        self._backend = backend
        self._timeout = timeout
        self._open: tuple[int, Lane] | None = None

    def another(self) -> Lanes:
        """Lanes of the same ranks for another thread, in place of one that is gone."""
        return Lanes(self._group, self._backend, self.device, self._timeout)

    def lane(self, number: int) -> Lane:
        """Return the lane of this number; raises ``RuntimeError`` where it cannot be opened."""
        if self._open is None or self._open[0] != number:
            self.retire()
            if self._backend != "gloo" and (lost := lost_lanes()) is not None:
                raise RuntimeError(lost)
            self._open = (number, self._opened(number))
        return self._open[1]

    def open_first(self) -> None:
        """Open lane 0 before anything is served: memory or links that are lacking show here, not at the first plan.

        Raises ``RuntimeError`` where it cannot be opened, also where that takes longer than the timeout.
        """
        opened: Future[Lane] = Future()

        def open_it() -> None:
            try:
                opened.set_result(self.lane(0))
            except Exception as error:
                opened.set_exception(error)

        # The libraries wait for a missing rank without end, no pool of threads may wait for them as well.
        threading.Thread(target=open_it, name="eplb-first-lane", daemon=True).start()
        seconds = self._timeout.total_seconds()
        try:
            opened.result(seconds)
        except Exception as error:
            said = f": {error}" if opened.done() else f" within {seconds:g} s"
            raise RuntimeError(f"no {self._backend} lane could be opened{said}") from error

    def retire(self) -> None:
        """Give up the lane that is open, if one is: it is never used again."""
        present, self._open = self._open, None
        if present is not None:
            present[1].retire()

    def _opened(self, number: int) -> Lane:
        host = _HostLane(self._group.process_group(f"lane/{number}", self._timeout))
        if self._backend == "gloo":
            return host
        store = dist.PrefixStore(f"eplb/lane/{number}/{self._backend}", self._group.store)
        library = _NcclGroup if self._backend == "nccl" else _HcclGroup
        group: _DeviceGroup = library(store, self._group.rank, self._group.size, self.device)
        return _DeviceLane(group, host, lambda: Mark(self.device))
