"""Shipped cost curves of devices and shapes of models, for estimates before anything is measured on the machine itself.

The curves are fitted to measured tables of DeepSeek-V3's fp8 experts. For another model they are scaled: reading by the
bytes of an expert, computing by its operations. Each figure made of one is an estimate, and its source says so.

References
----------
aiconfigurator-core 0.12, tables of SGLang 0.5.10 (Apache-2.0), https://pypi.org/project/aiconfigurator-core/.
The models' shapes are those of their ``config.json`` on https://huggingface.co.
"""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.cost.curve import CostCurve


class DeviceError(ValueError):
    """An unknown device or model; the message lists those that are known."""


@dataclass(frozen=True)
class ModelShape:
    """The experts of a model.

    Parameters
    ----------
    name
        Its repository on huggingface.co.
    layers, experts, choices
        MoE layers, routed experts of a layer, and choices of a token.
    hidden, inter
        Sizes of an expert's matrices: three of ``hidden x inter``.
    weight_bytes
        Bytes of a weight as served.
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
        """Bytes of one expert in one layer."""
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
"""Floor, read, launch and slope in microseconds, of DeepSeek-V3's decode kernel."""
GPUS = tuple(_CURVES)


def model_shape(name: str) -> ModelShape:
    """Return a model's shape; raises ``DeviceError`` on an unknown name."""
    if name.lower() not in MODELS:
        raise DeviceError(f"--model {name!r} is not known; choose one of {', '.join(MODELS)}")
    return MODELS[name.lower()]


def estimated_curve(gpu: str, model: str) -> CostCurve:
    """Return the estimated cost curve of a model's experts on a device; raises ``DeviceError`` on an unknown name."""
    shape = model_shape(model)
    if gpu.lower() not in _CURVES:
        raise DeviceError(f"--gpu {gpu!r} is not known; choose one of {', '.join(GPUS)}")
    floor, read, launch, slope = _CURVES[gpu.lower()]
    source = (
        f"estimate: {gpu.lower()}, fitted to SGLang 0.5.10's DeepSeek-V3 kernel in aiconfigurator-core 0.12"
    )
    if shape is not _MEASURED:
        read *= shape.bytes_per_expert / _MEASURED.bytes_per_expert
        # Weights of 16 bits are multiplied at half the rate of those of 8, and so are smaller ones in 16-bit kernels.
        halved = 1.0 if shape.weight_bytes == 1.0 else 2.0
        slope *= halved * shape.hidden * shape.inter / (_MEASURED.hidden * _MEASURED.inter)
        source += f", scaled to {shape.name}"
    return CostCurve(floor, read, min(launch, read), slope, source=source)
