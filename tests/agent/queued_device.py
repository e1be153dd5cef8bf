"""A device on a CPU: what a rank's host asks of its tensors is queued, and done in order by a thread behind it.

``install`` makes ``torch.device("queued")`` of the rank's process: agents and adapters take the paths there that they
take on an accelerator.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from worker_agent import forward_clock, heat
from worker_agent.adapters.sglang import host as sglang_host
from worker_agent.adapters.vllm import host as vllm_host
from worker_agent.swap import staging, table_check

_ANSWERS_AT_ONCE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
"""Operators whose results the host needs: it waits for all that is queued."""


class DeviceQueue:
    """Work of one rank's device, in the order in which it was queued."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, job: Callable[[], object]) -> None:
        """Queue work, and return at once."""
        self._jobs.put(job)

    def mark(self) -> threading.Event:
        """A point in the queue; set once the device is there."""
        there = threading.Event()
        self.put(there.set)
        return there

    def wait(self) -> None:
        """Wait for all that is queued."""
        assert self.mark().wait(300), "the device hangs"
        assert self._failure is None, self._failure

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException as failure:
                self._failure = self._failure or failure


class QueuedTensor(torch.Tensor):
    """A tensor of the device; ``held`` is its memory, which belongs to the queue."""

    held: torch.Tensor
    queue: DeviceQueue

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> QueuedTensor:
        with torch.inference_mode(False):
            made: QueuedTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device("queued", 0),
            )
        made.held = held
        return made

    def data_ptr(self) -> int:
        """Address of its memory."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """See ``data_ptr``."""
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, call: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        to_host = named.get("device") is not None and torch.device(named["device"]).type == "cpu"
        if "device" in named:
            named["device"] = torch.device("cpu")
        arguments = tree_map_only(cls, lambda one: one.held, (args, named))

        def run() -> Any:
            return call(*arguments[0], **arguments[1])

        stream = _current_stream()
        if call in _ANSWERS_AT_ONCE or to_host:
            stream.wait()
            return run()
        aliases = [one.alias_info for one in call._schema.arguments]
        if any(one is not None and one.is_write for one in aliases):
            stream.put(run)
            if call is torch.ops.aten.copy_.default and not _is_queued_alone(args, named):
                stream.wait()
            return args[0]
        if any(one is not None for one in aliases):
            return tree_map_only(torch.Tensor, cls, run())
        shape = call(*tree_map_only(torch.Tensor, torch.zeros_like, arguments)[0], **arguments[1])
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        stream.put(lambda: made.copy_(run()))
        return cls(made)


def _is_queued_alone(args: Any, named: Any) -> bool:
    """Return whether the host does not wait for a copy: within the device, or asked for so."""
    within = all(isinstance(one, QueuedTensor) for one in args[:2])
    return within or bool(named.get("non_blocking", args[2] if len(args) > 2 else False))


class Passes:
    """A model's passes: run at once, or by a device that each rank's host is so many ``ahead`` of at most.

    Once no rank is ``going`` at a pass each makes as many more as the host that is furthest ahead may have queued.
    """

    def __init__(self, ahead: Sequence[int] = ()) -> None:
        self._ahead, self._more = ahead[dist.get_rank()] if ahead else 0, max(ahead, default=0)
        self._device = install() if self._ahead else None
        self._under_way = deque[threading.Event]()
        self._number, self._last = 0, None

    def live(self, layers: list[Any]) -> list[Any]:
        """The layers as their host has them: where it is ahead, the same memory on its device."""
        return layers if self._device is None else [_layer_on_device(layer) for layer in layers]

    def run(self, forward: Callable[[], object], going: bool) -> bool:
        """Run or queue a pass, and wait for those far behind; return whether another is to follow."""
        self._number += 1
        number, any_going = self._number, torch.tensor(float(going))

        def run() -> None:
            forward()
            dist.all_reduce(any_going, op=dist.ReduceOp.MAX)
            if self._last is None and not any_going:
                self._last = number + self._more

        if self._device is None:
            run()
        else:
            self._device.put(run)
            self._under_way.append(self._device.mark())
            if len(self._under_way) > self._ahead:
                self._under_way.popleft().wait()
        return self._last is None or number < self._last

    def end(self) -> None:
        """Wait for all; others may follow."""
        if self._device is not None:
            self._device.wait()
        self._last = None


def _layer_on_device(layer: Any) -> Any:
    names = ("expert_map", "log2phy", "moe_load", "source_load", "load_counter")
    return SimpleNamespace(
        **{name: QueuedTensor(getattr(layer, name)) for name in names},
        shares_tokens=layer.shares_tokens,
        expert_weights=lambda: [QueuedTensor(weight) for weight in layer.expert_weights()],
    )


class _Module(ModuleType):
    """``torch.queued``."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)


class _Event:
    def record(self, stream: DeviceQueue) -> None:
        self._there = stream.mark()

    def query(self) -> bool:
        return self._there.is_set()

    def wait(self, stream: DeviceQueue) -> None:
        stream.put(self._there.wait)


_thread = threading.local()


def _current_stream(*_: object) -> DeviceQueue:
    """The queue of what this thread asks for: the model's, unless it is on a stream of its own."""
    stream: DeviceQueue = getattr(_thread, "stream", QueuedTensor.queue)
    return stream


@contextlib.contextmanager
def _on(stream: DeviceQueue) -> Iterator[None]:
    _thread.stream = stream
    yield
    del _thread.stream


def install() -> DeviceQueue:
    """Make the device, once per process; return the queue of its work."""
    if hasattr(QueuedTensor, "queue"):
        return QueuedTensor.queue
    QueuedTensor.queue = DeviceQueue()
    module: Any = _Module("torch.queued")
    module.Event, module.Stream = _Event, lambda **_: DeviceQueue()
    module.stream, module.current_stream = _on, _current_stream
    _setup_privateuseone_for_python_backend("queued", backend_module=module)
    kernels = torch.library.Library("aten", "IMPL")
    QueuedTensor.kernels = kernels

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return QueuedTensor(torch.empty(size, dtype=dtype, device="cpu"))

    kernels.impl("empty.memory_format", empty, "PrivateUse1")

    def copy_from(source: Any, destination: Any, _: bool = False) -> Any:
        _current_stream().put(lambda: destination.held.copy_(source))
        return destination

    kernels.impl("_copy_from", copy_from, "PrivateUse1")
    kernels.impl("empty_strided", lambda size, _, **named: empty(size, **named), "PrivateUse1")

    def host_empty(shape: Any, dtype: torch.dtype, _: object) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    heat.host_empty = forward_clock.host_empty = table_check.host_empty = host_empty
    staging.on_host = vllm_host.on_host = sglang_host.on_host = lambda tensor, _: tensor
    return QueuedTensor.queue
