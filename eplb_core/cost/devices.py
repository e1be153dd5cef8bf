"""Built-in cost curves for devices, and model shapes, for estimates without measurements on the target machine.

The GPU curves are fitted to measured tables of DeepSeek-V3's fp8 experts. The curves for Ascend NPUs are derived from
published peak memory bandwidth and 8-bit throughput and from assumed kernel efficiencies. For other models, read time
scales with an expert's size and compute time with its number of operations. Every built-in curve is an estimate, and
its source says so.

References
----------
aiconfigurator-core 0.12, tables of SGLang 0.5.10 (Apache-2.0), https://pypi.org/project/aiconfigurator-core/.
Zuo et al., *Serving Large Language Models on Huawei CloudMatrix384*, https://arxiv.org/abs/2506.12708 (the 910C).
The model shapes come from the models' ``config.json`` on https://huggingface.co.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eplb_core.cost.curve import CostCurve


class DeviceError(ValueError):
    """The device or model is unknown. The message lists the supported names."""


@dataclass(frozen=True)
class ModelShape:
    """Shape of a model's experts.

    Parameters
    ----------
    name
        Repository on huggingface.co.
    layers
        Number of MoE layers.
    experts
        Routed experts per layer.
    choices
        Experts per token (top-k).
    hidden
        Hidden size. An expert has three matrices of ``hidden x inter``.
    inter
        Intermediate size of an expert.
    weight_bytes
        Bytes per weight in the format that is served.
    """

    name: str
    layers: int
    experts: int
    choices: int
    hidden: int
    inter: int
    weight_bytes: float

    @property
    def bytes_per_expert(self) -> int:
        """Size of one expert in one layer, in bytes."""
        return round(3 * self.hidden * self.inter * self.weight_bytes)


MODELS = {
    "deepseek-v2-lite": ModelShape("deepseek-ai/DeepSeek-V2-Lite", 26, 64, 6, 2048, 1408, 2.0),
    "deepseek-v3": ModelShape("deepseek-ai/DeepSeek-V3", 58, 256, 8, 7168, 2048, 1.0),
    "gpt-oss-20b": ModelShape("openai/gpt-oss-20b", 24, 32, 4, 2880, 2880, 0.53125),
    "gpt-oss-120b": ModelShape("openai/gpt-oss-120b", 36, 128, 4, 2880, 2880, 0.53125),
    "kimi-k2": ModelShape("moonshotai/Kimi-K2-Instruct", 60, 384, 8, 7168, 2048, 1.0),
    "qwen3-30b-a3b": ModelShape("Qwen/Qwen3-30B-A3B", 48, 128, 8, 2048, 768, 2.0),
    "qwen3-235b-a22b": ModelShape("Qwen/Qwen3-235B-A22B", 94, 128, 8, 4096, 1536, 2.0),
}
_MEASURED = MODELS["deepseek-v3"]
_CURVES = {
    "h100": (21.1, 16.1, 10.2, 0.0584),
    "h200": (19.9, 11.6, 5.4, 0.0610),
    "b200": (19.4, 8.2, 4.1, 0.0360),
    "gb200": (20.4, 7.7, 4.5, 0.0319),
}
"""Floor, read, launch and slope of DeepSeek-V3's decode kernel, in microseconds."""
_PEAKS = {"910b": (1600.0, 640.0), "910c": (1600.0, 752.0)}
"""Published memory bandwidth (GB/s) and 8-bit throughput (TOPS) of one processor. A 910C package has two processors,
each with its own ranks."""
_MEMORY_SHARE = 0.8
"""Fraction of the peak memory bandwidth that grouped kernels reach. It is assumed, because no measurements have
been published."""
_COMPUTE_SHARE = 0.6
"""Fraction of the peak compute throughput that grouped kernels reach. This value is assumed as well."""
_NPU_FLOOR_US = 20.0
"""Floor of the NPU curves, assumed to be about the same as on the GPUs."""
GPUS = (*_CURVES, *_PEAKS)
"""GPUs and NPUs with a built-in curve."""
_NAMES = (
    ("gb200", r"\bGB200\b"),
    ("b200", r"\bB200\b"),
    ("h200", r"\bH200\b"),
    ("h100", r"\bH100\b"),
    ("910c", r"^Ascend910_93"),
    ("910b", r"^Ascend910B"),
)
"""Devices with patterns that match their PyTorch names, such as ``NVIDIA H100 80GB HBM3``, ``Ascend910B3`` and
``Ascend910_9392``. The first match is used."""


def model_shape(name: str) -> ModelShape:
    """Return the shape of the model ``name``, ignoring case. Raises ``DeviceError`` if it is unknown."""
    if name.lower() not in MODELS:
        raise DeviceError(f"--model {name!r} is unknown; choose one of {', '.join(MODELS)}")
    return MODELS[name.lower()]


def estimated_curve(gpu: str, model: str) -> CostCurve:
    """Return the estimated cost curve of a model's experts on a device.

    Raises ``DeviceError`` if the device or the model is unknown.

    Examples
    --------
    >>> curve = estimated_curve("h200", "qwen3-235b-a22b")
    >>> round(curve.read_us, 1)
    9.9
    >>> curve.source.partition(":")[0]
    'estimate'
    """
    shape = model_shape(model)
    # 16-bit kernels run at half the rate of 8-bit kernels. Weights smaller than 8 bits use 16-bit kernels as well.
    halved = 1.0 if shape.weight_bytes == 1.0 else 2.0
    operations = halved * shape.hidden * shape.inter / (_MEASURED.hidden * _MEASURED.inter)
    return _scaled(gpu, shape.bytes_per_expert, operations, "" if shape is _MEASURED else shape.name)


def knee_tokens(device: str, bytes_per_expert: int) -> float | None:
    """Return the maximum number of tokens per step that an expert processes in the same time as one token.

    Up to this number, reading the weights dominates.

    Parameters
    ----------
    device
        PyTorch's name for the device.
    bytes_per_expert
        Size of one expert in one layer, in bytes. 8-bit and 16-bit weights have the same knee, because 16-bit weights
        take twice as long both to read and to multiply.

    Returns
    -------
    float or None
        The number of tokens; ``None`` if the device has no built-in curve or the size is unknown.

    Examples
    --------
    >>> round(knee_tokens("Ascend910B3", 3 * 7168 * 2048))
    150
    >>> knee_tokens("cpu", 1 << 20) is None
    True
    """
    name = next((name for name, pattern in _NAMES if re.search(pattern, device)), None)
    if name is None or bytes_per_expert <= 0:
        return None
    curve = _scaled(name, bytes_per_expert, bytes_per_expert / _MEASURED.bytes_per_expert)
    return curve.knee_tokens


def _scaled(gpu: str, bytes_per_expert: int, operations: float, model: str = "") -> CostCurve:
    """Return a device's curve, scaled by an expert's size and number of operations relative to DeepSeek-V3's."""
    device = gpu.lower()
    if device in _PEAKS:
        gigabytes, tera_operations = _PEAKS[device]
        floor = _NPU_FLOOR_US
        launch = 0.0
        read = _MEASURED.bytes_per_expert / (gigabytes * 1e3 * _MEMORY_SHARE)
        slope = 2 * _MEASURED.bytes_per_expert / (tera_operations * 1e6 * _COMPUTE_SHARE)
        source = (
            f"estimate: {device}, assuming {_MEMORY_SHARE:.0%} of its published memory bandwidth and "
            f"{_COMPUTE_SHARE:.0%} of its published 8-bit throughput"
        )
    elif device in _CURVES:
        floor, read, launch, slope = _CURVES[device]
        source = (
            f"estimate: {device}, fitted to SGLang 0.5.10's DeepSeek-V3 kernel in aiconfigurator-core 0.12"
        )
    else:
        raise DeviceError(f"--gpu {gpu!r} is unknown; choose one of {', '.join(GPUS)}")
    read *= bytes_per_expert / _MEASURED.bytes_per_expert
    slope *= operations
    if model:
        source += f", scaled to {model}"
    return CostCurve(floor, read, min(launch, read), slope, source=source)
