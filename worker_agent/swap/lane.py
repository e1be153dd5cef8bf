"""Lanes for expert transfers: from host to host over gloo, or from device to device over NCCL or HCCL.

Before each exchange, both ends announce over a host link which bytes they will send, with one announcement for all
pieces of an expert. Nothing is queued on a device until the announcements have arrived, so a failed rank shows up as a
broken host link. This matters because a queued device operation whose peer is missing is hard to cancel: it occupies
part of the device, and the libraries cancel it by ending the process.
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
"""Timeout passed to the device libraries, whose watchdogs terminate the process when a timeout expires. Transfers
enforce their own deadlines instead."""
_MAX_NCCL_BLOCKS = 4
"""Maximum number of thread blocks per transfer. The model's kernels run at the same time, and some of them need all the
remaining blocks."""
_HCCL_BUFFER_MIB = 100
"""HCCL's buffer size. Each communicator uses twice this much device memory. HCCL's default of 200 is meant for the
model's communicators."""


@dataclass(frozen=True)
class Parcel:
    """Piece of an expert's memory to send to, or receive from, a peer.

    Parameters
    ----------
    peer
        Rank at the other end.
    data
        The memory. Lanes accept uint8 ``[n]``, or a whole tensor if its format is blocked (NZ).
    expert
        Logical expert, for error messages; -1 if irrelevant.
    """

    peer: int
    data: torch.Tensor
    expert: int = -1


class Deadline:
    """Deadline for a transfer, ``seconds`` from now."""

    def __init__(self, seconds: float, runtime: Runtime = REAL) -> None:
        self._seconds = seconds
        self._runtime = runtime
        self._end = runtime.now() + seconds

    def remaining(self) -> float:
        """Return the seconds until the deadline. Raises ``TimeoutError`` if it has passed."""
        seconds = self._end - self._runtime.now()
        if seconds <= 0:
            raise TimeoutError(f"did not finish within {self._seconds:g} s")
        return seconds

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, even if the deadline passes in the meantime."""
        self._runtime.sleep(seconds)


class Lane(Protocol):
    """A process group used only for transfers."""

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> float:
        """Send one expert to a peer while receiving another from the same or a different peer.

        On return, all bytes have been sent and received, even on a device. Later work on the current stream sees the
        received bytes.

        Parameters
        ----------
        outgoing
            Pieces of the expert to send. May be empty.
        incoming
            Memory for the pieces to receive. May be empty.
        deadline
            Deadline for the transfer.

        Returns
        -------
        float
            Duration in seconds, measured from when both ends were ready.

        Raises
        ------
        TimeoutError
            If the deadline passes.
        RuntimeError
            If a link is broken.
        ValueError
            If a peer announces pieces that do not match ``incoming``.
        """

    def retire(self) -> None:
        """Close the lane permanently. A peer's exchange with this rank fails as soon as the peer notices."""


class _HostLane:
    """Lane over a dedicated gloo group, from host memory to host memory. Device memory is copied through the host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> float:
        """See ``Lane``. Copies to and from a device run on the current stream and have completed on return."""
        self.meet(outgoing, incoming, deadline)
        seconds_at_start = deadline.remaining()
        for leaving, arriving in zip_longest(outgoing, incoming):
            self._exchange_piece(leaving, arriving, deadline)
        return seconds_at_start - deadline.remaining()

    def meet(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> None:
        """Exchange announcements with all peers that take part, and check those of the sending peers.

        Without this check, gloo would terminate the process if sizes differed, and a device would wait forever for
        bytes that its peer never sends. Raises ``ValueError`` if a peer announces pieces that do not match
        ``incoming``.
        """
        works = []
        received = dict[int, torch.Tensor]()
        sent = []  # Keeps the tensors alive: gloo reads them until the sends complete.
        for peer in sorted({parcel.peer for parcel in (*outgoing, *incoming)}):
            received[peer] = torch.zeros(2, dtype=torch.int64)
            sent.append(_announcement([parcel for parcel in outgoing if parcel.peer == peer]))
            works.append(self._open_group.recv([received[peer]], peer, 0))
            works.append(self._open_group.send([sent[-1]], peer, 0))
        for work in works:
            work.wait(timedelta(seconds=deadline.remaining()))
        for peer in {parcel.peer for parcel in incoming}:
            check_announced(peer, received[peer], [parcel for parcel in incoming if parcel.peer == peer])

    def retire(self) -> None:
        """See ``Lane``. The links close when the last reference to the group is dropped."""
        self._group = None

    def _exchange_piece(self, outgoing: Parcel | None, incoming: Parcel | None, deadline: Deadline) -> None:
        works = []
        arriving = None
        if incoming is not None:
            in_place = incoming.data.device.type == "cpu" and incoming.data.dtype == torch.uint8
            arriving = incoming.data if in_place else torch.empty(incoming.data.nbytes, dtype=torch.uint8)
            works.append(self._open_group.recv([arriving], incoming.peer, 0))
        if outgoing is not None:
            works.append(self._open_group.send([bytes_of(outgoing.data.cpu())], outgoing.peer, 0))
        for work in works:
            work.wait(timedelta(seconds=deadline.remaining()))
        if incoming is not None and arriving is not None and arriving is not incoming.data:
            incoming.data.copy_(arriving.view(incoming.data.dtype).reshape(incoming.data.shape))

    @property
    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has retired the lane")
        return self._group


def _announcement(parcels: Sequence[Parcel]) -> torch.Tensor:
    """Return an announcement of pieces, int64 ``[2]``: their total size in bytes and a CRC-32 of their sizes."""
    sizes = [parcel.data.nbytes for parcel in parcels]
    return torch.tensor([sum(sizes), zlib.crc32(repr(sizes).encode())])


def check_announced(peer: int, announcement_2: torch.Tensor, expected: Sequence[Parcel]) -> None:
    """Raise ``ValueError`` if a peer's announcement does not match the pieces that this rank expects.

    Parameters
    ----------
    peer
        Rank that sent the announcement.
    announcement_2
        Its announcement, int64 ``[2]``.
    expected
        Pieces that this rank expects from the peer.
    """
    expected_2 = _announcement(expected).tolist()
    if announcement_2.tolist() != expected_2:
        raise ValueError(
            f"expected {expected_2[0]} bytes from rank {peer}, but it announced {int(announcement_2[0])}: the "
            "experts of the two ranks differ in dtype or shape, or the ranks run different releases of the agent"
        )


class _DeviceGroup(Protocol):
    """Communicator of a device library (NCCL or HCCL)."""

    sends_views: bool
    """True if the library can send and receive a tensor that begins in the middle of its storage."""

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """Queue a send and a receive on the current stream, and return without waiting for them to complete."""

    def release(self) -> None:
        """Close the links. No operation may be in progress."""

    def abort(self) -> bool:
        """Cancel the operations in progress. Return True if they no longer access any memory."""


class _DeviceLane:
    """Lane over a device group.

    Parameters
    ----------
    group
        Communicator that transfers the bytes.
    handshake
        Host lane between the same ranks, for announcements.
    mark
        Callable that returns a mark at the current point of the device's current stream.
    """

    def __init__(self, group: _DeviceGroup, handshake: _HostLane, mark: Callable[[], Mark]) -> None:
        self._group = group
        self._handshake = handshake
        self._mark = mark
        self._in_progress = False
        self._accessed: list[torch.Tensor] = []
        """Memory that the operations in progress read or write."""
        self._bounce_buffers: dict[str, torch.Tensor] = {}

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], deadline: Deadline) -> float:
        """See ``Lane``. If a peer does not begin the same exchange in time, this fails before anything is queued."""
        self._handshake.meet(outgoing, incoming, deadline)
        seconds_at_start = deadline.remaining()
        self._in_progress = True
        for leaving, arriving in zip_longest(outgoing, incoming):
            self._queue(leaving, arriving)
        done = self._mark()
        while not done.passed():
            deadline.remaining()
            deadline.sleep(_POLL_SECONDS)
        self._in_progress = False
        self._accessed = []
        return seconds_at_start - deadline.remaining()

    def _queue(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """Queue an exchange of two pieces.

        Pieces may share a bounce buffer, because the stream runs their copies and transfers in order.
        """
        leaving = None if outgoing is None else self._at_storage_start("out", outgoing)
        arriving = None if incoming is None else self._at_storage_start("in", incoming)
        if leaving is not None and outgoing is not None and leaving is not outgoing:
            leaving.data.copy_(outgoing.data)
        self._accessed += [parcel.data for parcel in (leaving, arriving) if parcel is not None]
        self._group.exchange(leaving, arriving)
        if arriving is not None and incoming is not None and arriving is not incoming:
            incoming.data.copy_(arriving.data)

    def retire(self) -> None:
        """See ``Lane``. Memory that the device may still access is never reused, but kept until the process ends."""
        self._handshake.retire()
        if not self._in_progress:
            self._group.release()
        elif not self._group.abort():
            _LOST_LANES.append(self)

    def _at_storage_start(self, direction: str, parcel: Parcel) -> Parcel:
        """Return a parcel that the library can transfer: ``parcel`` itself, or a bounce buffer of its size.

        Raises ``ValueError`` if the memory format is blocked and the memory begins in the middle of its storage.
        """
        if self._group.sends_views or parcel.data.storage_offset() == 0:
            return parcel
        if in_blocks(parcel.data):
            raise ValueError(
                f"expert {parcel.expert} in the NPU's format {format_of(parcel.data)} begins in the middle of its "
                "storage; torch_npu can only send the whole storage of such a tensor"
            )
        size = parcel.data.numel()
        buffer = self._bounce_buffers.get(direction)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty_like(parcel.data)
            self._bounce_buffers[direction] = buffer
        return Parcel(parcel.peer, buffer[:size])


_LOST_LANES: list[_DeviceLane] = []
"""Retired lanes whose operations could not be cancelled. They are kept because the device may still access their
memory."""
MAX_LOST_LANES = 2
"""Number of lost lanes at which balancing stops. Each lost lane keeps its communicator and staging memory until the
engine ends."""


def lost_lanes() -> str | None:
    """Return the reason why this process must not open any more lanes, or ``None`` if it may."""
    if len(_LOST_LANES) < MAX_LOST_LANES:
        return None
    return (
        f"balancing has stopped: {len(_LOST_LANES)} transfers timed out on the device, and their memory "
        "cannot be freed; check the links between the devices, then restart the engine"
    )


class _NcclGroup:
    """NCCL communicator of the ranks that share ``store``.

    The constructor is a slow collective that uses the current stream.

    NCCL would create a separate communicator for each pair of ranks that exchanges ungrouped messages. Grouped messages
    use the group's communicator, which exists once all ranks have completed a first collective.
    """

    sends_views = True

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        if not dist.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL; set EPLB_AGENT_TRANSFER_BACKEND=gloo")
        # torch's stubs include these classes only if torch was built with NCCL.
        library: Any = dist.ProcessGroupNCCL
        options = library.Options()
        options._timeout = _NEVER
        options.config.max_ctas = _MAX_NCCL_BLOCKS
        with _nccl_errors_do_not_end_the_process():
            self._group: Any = library(store, rank, size, options)
        self._group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        self._group._start_coalescing()
        if outgoing is not None:
            self._group.send([outgoing.data], outgoing.peer, 0)
        if incoming is not None:
            self._group.recv([incoming.data], incoming.peer, 0)
        # This blocks the current stream, not this thread.
        self._group._end_coalescing().wait()

    def release(self) -> None:
        self.abort()

    def abort(self) -> bool:
        """See ``_DeviceGroup``. NCCL's kernels poll an abort flag, so they stop."""
        abort = getattr(self._group, "abort", None) or self._group._shutdown  # ``abort`` is new in torch 2.6.
        abort()
        return True


@contextlib.contextmanager
def _nccl_errors_do_not_end_the_process() -> Iterator[None]:
    """Return a context manager for creating an NCCL group that survives a peer's errors.

    torch reads the relevant environment variables only during construction. They are restored on exit.
    """
    settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _HcclGroup:
    """HCCL communicator of the ranks that share ``store``.

    The constructor is a slow collective that uses the current stream.

    In some memory formats, HCCL misreads a tensor that begins in the middle of its storage. Lanes therefore never pass
    such a tensor to it.
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
        operations = [("isend", outgoing), ("irecv", incoming)]
        batch = [(name, parcel.data, parcel.peer) for name, parcel in operations if parcel is not None]
        self._group.batch_isend_irecv(*map(list, zip(*batch, strict=True))).wait()

    def release(self) -> None:
        self._group.abort_hccl_comm("the lane is retired")

    def abort(self) -> bool:
        """Return False: HCCL cannot cancel one operation without cancelling everything else on the device."""
        return False


def hccl_expansion_mode(device: str) -> int:
    """Return the ``hccl_op_expansion_mode`` for a lane's communicator, which overrides the environment.

    The mode selects where HCCL expands the lane's operators. The vector cores (3), which
    ``HCCL_OP_EXPANSION_MODE=AIV`` assigns to the model's groups, serve only one group per device at a time, so the lane
    leaves them to the model. Operators are expanded on the host (1) instead, or on the device's AI CPU (2) on a 910C,
    which does not support expansion on the host.

    Parameters
    ----------
    device
        Device model name, such as ``Ascend910B3``.

    References
    ----------
    CANN 8.5, *HCCL_OP_EXPANSION_MODE*; Ascend Extension for PyTorch 7.0, *HCCL parameters by pg_options*.
    """
    return 2 if device.startswith("Ascend910_93") else 1


_LIBRARIES = {"cuda": "nccl", "npu": "hccl"}
"""Device-to-device transfer library for each device type."""


def choose_backend(requested: TransferBackend, device_type: str) -> str:
    """Return the library to use for transferring experts between devices of a given type.

    Raises ``ValueError`` if the requested library does not support these devices.

    Parameters
    ----------
    requested
        The ``transfer_backend`` setting.
    device_type
        Type of the device that holds the experts, such as ``cuda``.

    Examples
    --------
    >>> choose_backend("auto", "npu")
    'hccl'
    >>> choose_backend("auto", "cpu")
    'gloo'
    >>> choose_backend("gloo", "cuda")
    'gloo'
    """
    library = _LIBRARIES.get(device_type, "gloo")
    if requested == "auto":
        return library
    if requested not in ("gloo", library):
        supported = next(device for device, backend in _LIBRARIES.items() if backend == requested)
        raise ValueError(
            f"transfer_backend {requested} moves experts between {supported} devices, but the experts are on "
            f"{device_type} here; set transfer_backend to auto, or to gloo, which transfers through the host"
        )
    return requested


class Lanes:
    """Lanes of one rank, opened by number. Every rank opens the same numbers, but not necessarily at the same time.

    Opening a lane waits for all ranks. On a device, it takes seconds and blocks the current stream. Never open a lane
    on the model's thread or the model's stream while the model serves.

    Parameters
    ----------
    group
        The agents' group.
    backend
        Library that transfers the experts, from ``choose_backend``.
    device
        Device that holds the experts.
    timeout
        Time limit for opening a lane over the host.
    """

    def __init__(self, group: AgentGroup, backend: str, device: torch.device, timeout: timedelta) -> None:
        self.rank = group.rank
        self.device = device
        self._group = group
        self._backend = backend
        self._timeout = timeout
        self._open: tuple[int, Lane] | None = None

    def another(self) -> Lanes:
        """Return new lanes between the same ranks, for the thread that replaces a failed transfer thread."""
        return Lanes(self._group, self._backend, self.device, self._timeout)

    def lane(self, number: int) -> Lane:
        """Return a lane. If a lane with a different number is open, retire it first.

        Raises ``RuntimeError`` if the lane cannot be opened.
        """
        if self._open is None or self._open[0] != number:
            self.retire()
            if self._backend != "gloo" and (reason := lost_lanes()) is not None:
                raise RuntimeError(reason)
            self._open = (number, self._open_lane(number))
        return self._open[1]

    def open_first(self) -> None:
        """Open lane 0 before the model serves, so that missing memory or links are noticed now, not in the first plan.

        Raises ``RuntimeError`` if the lane cannot be opened within the timeout.
        """
        opened: Future[Lane] = Future()

        def open_lane() -> None:
            try:
                opened.set_result(self.lane(0))
            except Exception as error:
                opened.set_exception(error)

        # The libraries wait indefinitely for a missing rank. Use a daemon thread, because on exit Python would wait for
        # the threads of a pool.
        threading.Thread(target=open_lane, name="eplb-first-lane", daemon=True).start()
        seconds = self._timeout.total_seconds()
        try:
            opened.result(seconds)
        except Exception as error:
            detail = f": {error}" if opened.done() else f" within {seconds:g} s"
            raise RuntimeError(f"could not open a {self._backend} lane{detail}") from error

    def retire(self) -> None:
        """Retire the open lane, if any. A retired lane is never used again."""
        previous = self._open
        self._open = None
        if previous is not None:
            previous[1].retire()

    def _open_lane(self, number: int) -> Lane:
        host = _HostLane(self._group.process_group(f"lane/{number}", self._timeout))
        if self._backend == "gloo":
            return host
        store = dist.PrefixStore(f"eplb/lane/{number}/{self._backend}", self._group.store)
        library = _NcclGroup if self._backend == "nccl" else _HcclGroup
        group: _DeviceGroup = library(store, self._group.rank, self._group.size, self.device)
        return _DeviceLane(group, host, lambda: Mark(self.device))
