"""Simulated device on the CPU: operations on its tensors are queued, and a thread runs them in order.

``install`` registers ``torch.device("queued")`` in the rank's process. Agents and adapters then take the same code
paths as on an accelerator.
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

from worker_agent import forward_clock, heat, step_split, stepwise
from worker_agent.adapters.sglang import host as sglang_host
from worker_agent.adapters.vllm import host as vllm_host
from worker_agent.swap import staging, table_check

_SYNCHRONOUS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
"""Operators whose results the host reads, so it must first wait for the queue."""


class DeviceQueue:
    """First-in, first-out work queue of one rank's device."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, job: Callable[[], object]) -> None:
        """Queue a job without waiting for it."""
        self._jobs.put(job)

    def mark(self) -> threading.Event:
        """Return an event that is set when the device has run everything queued so far."""
        reached = threading.Event()
        self.put(reached.set)
        return reached

    def wait(self) -> None:
        """Wait until the queue is empty. Fails if a job has failed."""
        assert self.mark().wait(300), "the device did not run its queue within 300 s"
        assert self._failure is None, self._failure

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException as failure:
                self._failure = self._failure or failure


class QueuedTensor(torch.Tensor):
    """Tensor on the device. ``held`` is its CPU tensor, which only queued jobs may access."""

    held: torch.Tensor
    queue: DeviceQueue

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> QueuedTensor:
        with torch.inference_mode(False):
            tensor: QueuedTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device("queued", 0),
            )
        tensor.held = held
        return tensor

    def data_ptr(self) -> int:
        """Return the address of the tensor's memory."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the tensor's memory."""
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, call: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        to_host = options.get("device") is not None and torch.device(options["device"]).type == "cpu"
        if "device" in options:
            options["device"] = torch.device("cpu")
        arguments = tree_map_only(cls, lambda tensor: tensor.held, (args, options))

        def run() -> Any:
            return call(*arguments[0], **arguments[1])

        stream = _current_stream()
        if call in _SYNCHRONOUS or to_host:
            stream.wait()
            return run()
        aliases = [argument.alias_info for argument in call._schema.arguments]
        if any(alias is not None and alias.is_write for alias in aliases):
            stream.put(run)
            if call is torch.ops.aten.copy_.default and not _is_asynchronous_copy(args, options):
                stream.wait()
            return args[0]
        if any(alias is not None for alias in aliases):
            return tree_map_only(torch.Tensor, cls, run())
        shape = call(*tree_map_only(torch.Tensor, torch.zeros_like, arguments)[0], **arguments[1])
        result = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        stream.put(lambda: result.copy_(run()))
        return cls(result)


def _is_asynchronous_copy(args: Any, options: Any) -> bool:
    """Return True if a copy does not block the host, because it is non-blocking or within the device."""
    within = all(isinstance(tensor, QueuedTensor) for tensor in args[:2])
    return within or bool(options.get("non_blocking", args[2] if len(args) > 2 else False))


class Passes:
    """Forward passes of a model, run synchronously or queued on a device.

    After the first pass for which no rank is ``going``, each rank runs ``max(ahead)`` more passes, so that all ranks
    run the same number.

    Parameters
    ----------
    ahead
        For each rank, the maximum number of passes that its host queues ahead of its device. Empty to run passes
        synchronously.
    """

    def __init__(self, ahead: Sequence[int] = ()) -> None:
        self._ahead = ahead[dist.get_rank()] if ahead else 0
        self._extra_passes = max(ahead, default=0)
        self._device = install() if self._ahead else None
        self._under_way = deque[threading.Event]()
        self._number = 0
        self._last = None

    def live(self, layers: list[Any]) -> list[Any]:
        """Return the layers for the agent.

        If passes are queued, the layers' tensors are device tensors that share the original memory.
        """
        return layers if self._device is None else [_layer_on_device(layer) for layer in layers]

    def run(self, forward: Callable[[], object], going: bool) -> bool:
        """Run or queue a pass and wait for the one queued ``ahead`` passes earlier.

        Return True if more passes follow.
        """
        self._number += 1
        number = self._number
        any_going = torch.tensor(float(going))

        def run() -> None:
            forward()
            dist.all_reduce(any_going, op=dist.ReduceOp.MAX)
            if self._last is None and not any_going:
                self._last = number + self._extra_passes

        if self._device is None:
            run()
        else:
            self._device.put(run)
            self._under_way.append(self._device.mark())
            if len(self._under_way) > self._ahead:
                self._under_way.popleft().wait()
        return self._last is None or number < self._last

    def end(self) -> None:
        """Wait for all passes, and allow new ones to be queued afterwards."""
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
    """Stand-in for the module ``torch.queued``."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)


class _Event:
    def record(self, stream: DeviceQueue) -> None:
        self._reached = stream.mark()

    def query(self) -> bool:
        return self._reached.is_set()

    def wait(self, stream: DeviceQueue) -> None:
        stream.put(self._reached.wait)


_thread = threading.local()


def _current_stream(*_: object) -> DeviceQueue:
    """Return the calling thread's queue: the model's queue, unless the thread has entered another stream."""
    stream: DeviceQueue = getattr(_thread, "stream", QueuedTensor.queue)
    return stream


@contextlib.contextmanager
def _on(stream: DeviceQueue) -> Iterator[None]:
    _thread.stream = stream
    yield
    del _thread.stream


def install() -> DeviceQueue:
    """Register the device, once per process, and return its queue."""
    if hasattr(QueuedTensor, "queue"):
        return QueuedTensor.queue
    QueuedTensor.queue = DeviceQueue()
    module: Any = _Module("torch.queued")
    module.Event = _Event
    module.Stream = lambda **_: DeviceQueue()
    module.stream = _on
    module.current_stream = _current_stream
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
    kernels.impl("empty_strided", lambda size, _, **options: empty(size, **options), "PrivateUse1")

    def empty_on_host(shape: Any, dtype: torch.dtype, _: object) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    heat.empty_on_host = forward_clock.empty_on_host = table_check.empty_on_host = empty_on_host
    for using in (staging, vllm_host, sglang_host, step_split, stepwise):
        using.on_host = lambda tensor, _: tensor
    return QueuedTensor.queue
