"""A fake torch_npu for tests only, sufficient to import vLLM-Ascend and run its MoE layers on CPU.

Devices named ``npu`` become the CPU, streams and events do nothing, and operators are this project's reference
operators, which have the same semantics as CANN's. Names that MoE layers only import but never call are stand-ins.
"""

from __future__ import annotations

import inspect
import sys
import types

import torch
import torch.distributed as dist

from eplb_lab.layer.operators import reference
from tests.engines.stand_ins import Finder, StandIn

__version__ = "2.11.0"

NEUTRAL = {
    "npu_grouped_matmul": ("bias",),
    "npu_moe_distribute_dispatch_v2": ("scales", "comm_alg"),
    "npu_moe_distribute_combine_v2": ("comm_quant_mode", "comm_alg"),
    "npu_moe_token_unpermute": ("restore_shape",),
    "npu_moe_init_routing_v2": ("x_dtype",),
    "npu_dynamic_quant": ("dst_type",),
}
"""For each operator, arguments that vLLM-Ascend passes but the reference operator does not have.

Any other unknown argument is an error.
"""
SAY_NOTHING_NEW = ("restore_shape", "comm_alg", "dst_type", "x_dtype")
"""Arguments in ``NEUTRAL`` that may have a value, because the reference operators always behave as it requests."""


class Unused(StandIn):
    """A name that is only called or subclassed while modules are imported, if at all."""

    def __call__(self, *_arguments, **_named):
        return Unused(f"{self._name}()")

    def __mro_entries__(self, _bases):
        return (object,)

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __or__(self, _other):
        return self

    __ror__ = __or__


class Stream:
    """A stream or event whose work is always complete, because each call finishes before it returns."""

    def __init__(self, *_arguments, **_named):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_named: Stream()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return False


def _device_module():
    npu = types.ModuleType("torch.npu")
    npu.Stream = npu.Event = npu.NPUGraph = npu.ExternalEvent = npu.graph = Stream
    npu.stream = npu.current_stream = lambda *_arguments, **_named: Stream()
    npu.current_device = lambda: "cpu"
    npu.is_available = lambda: False
    npu.device_count = lambda: 0
    npu.empty_cache = npu.synchronize = npu.set_device = lambda *_arguments, **_named: None
    npu.get_device_name = lambda *_arguments: "fake"
    return npu


def _on_cpu(factory):
    def make(*arguments, **named):
        if str(named.get("device", "")).startswith("npu"):
            named["device"] = "cpu"
        return factory(*arguments, **named)

    make.__name__ = factory.__name__
    return make


def _operator(name):
    operator = getattr(reference, name)
    parameters = inspect.signature(operator).parameters

    def call(*arguments, **named):
        for extra in NEUTRAL.get(name, ()):
            if extra not in parameters:
                value = named.pop(extra, None)
                assert extra in SAY_NOTHING_NEW or not value, f"{name}: {extra} is {value}"
        if name == "npu_moe_init_routing_v2":
            named.setdefault("active_num", arguments[1].numel())  # torch_npu's default is to sort all choices
        for experts in ("weight", "scale"):
            # One tensor per expert, which the reference operators accept as one tensor.
            if isinstance(named.get(experts), list) and len(named[experts]) > 1:
                named[experts] = [torch.stack(named[experts])]
        for scale in ("scale", "per_token_scale"):
            if isinstance(named.get(scale), list) and named[scale][0] is None:
                named[scale] = None
        return operator(*arguments, **named)

    return call


class TorchOfTokenDispatcher:
    """Replacement for ``torch`` in a module that uses ``torch.device("npu")`` and counts integers with ``histc``."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def histc(values, **named):
        return torch.histc(values.float(), **named).to(torch.int64)

    @staticmethod
    def device(name, *index):
        return (
            types.SimpleNamespace(type="npu") if str(name).startswith("npu") else torch.device(name, *index)
        )


def npu_format_cast(tensor, _format, **_named):
    """Return the tensor unchanged, because a CPU has only one format."""
    return tensor


def get_npu_format(_tensor):
    """Return the code of the ND format."""
    return 2


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if hasattr(reference, name):
        return _operator(name)
    return Unused(name)


def _install():
    prefixes = ("torch_npu.", "acl", "mooncake_")
    sys.meta_path.append(Finder(lambda name: name.startswith(prefixes), Unused))
    sys.modules["torch.npu"] = torch.npu = globals()["npu"] = _device_module()
    torch.Tensor.npu = lambda self, *_arguments, **_named: self
    filled = ("zeros", "empty", "ones", "full", "empty_like", "zeros_like")
    for name in (*filled, "tensor", "arange", "rand", "randn"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    backend_of = dist.ProcessGroup._get_backend

    def _get_backend(self, device):
        if device.type == "npu":
            return types.SimpleNamespace(get_hccl_comm_name=lambda _rank: self.group_name)
        return backend_of(self, device)

    dist.ProcessGroup._get_backend = _get_backend


_install()
