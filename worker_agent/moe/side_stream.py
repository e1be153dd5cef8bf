"""Shared experts on a stream of their own, so that a device runs them beside dispatch and combine."""

from __future__ import annotations

from typing import Any

import torch

from worker_agent.moe.kernel import WorkBeside


class SideStream:
    """A stream beside the one that the model runs on.

    Parameters
    ----------
    streams
        What has streams, as ``torch.cuda`` and ``torch.npu`` do: ``Stream``, ``current_stream`` and ``stream``.
    """

    def __init__(self, streams: Any, device: torch.device) -> None:
        self._streams = streams
        self._stream = streams.Stream(device=device)

    @classmethod
    def of(cls, device: torch.device) -> SideStream | None:
        """A stream of the device; ``None`` for a CPU, which has none."""
        return None if device.type == "cpu" else cls(torch.get_device_module(device), device)

    def beside(self, work: WorkBeside, read: torch.Tensor) -> WorkBeside:
        """The same work on this stream: it waits for what the model has queued now, and no later.

        ``read`` is the tensor that it reads, whose memory must not be used again before.
        """
        self._stream.wait_stream(self._streams.current_stream())
        read.record_stream(self._stream)
        return _OnStream(self._streams, self._stream, work)


class _OnStream:
    """Queues work on a stream; the model's own waits for it where the result is needed."""

    def __init__(self, streams: Any, stream: Any, work: WorkBeside) -> None:
        self._streams = streams
        self._stream = stream
        self._work = work

    def during_dispatch(self) -> None:
        """Part 1."""
        with self._streams.stream(self._stream):
            self._work.during_dispatch()

    def during_combine(self) -> torch.Tensor:
        """Part 2, and its result ``[T, H]``."""
        with self._streams.stream(self._stream):
            out_TH = self._work.during_combine()
        current = self._streams.current_stream()
        current.wait_stream(self._stream)
        out_TH.record_stream(current)
        return out_TH
