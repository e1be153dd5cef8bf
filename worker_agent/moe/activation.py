"""The functions between an expert's two products, by the names that engines give them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch.nn.functional import gelu, relu, silu

SWIGLUOAI_SLOPE = 1.702
SWIGLUOAI_LIMIT = 7.0


class Activation(str, Enum):
    """A model's own. Gated ones multiply a function of the gate's half with the up projection's half."""

    SILU = "silu"
    GELU = "gelu"
    """Exact, by the error function."""

    SWIGLUOAI = "swigluoai"
    """gpt-oss: both halves are clamped, the gate's sigmoid is steeper, and one is added to the up projection."""

    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"
    """The square of what is positive."""

    @property
    def gated(self) -> bool:
        """Whether the first product has a gate beside the up projection."""
        return not self.value.endswith("_no_mul")

    def into(self, first: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the activation of a first product ``[..., 2*I]`` (gate first; ``[..., I]`` without) to ``[..., I]``.

        Returns ``out``; ``first`` is used up.
        """
        if not self.gated:
            return out.copy_(_PLAIN[self](first))
        gate, up = first.chunk(2, dim=-1)
        if self is Activation.SILU:
            return torch.mul(silu(gate, inplace=True), up, out=out)
        if self is Activation.GELU:
            return torch.mul(gelu(gate), up, out=out)
        gate = gate.clamp_(max=SWIGLUOAI_LIMIT)
        up = up.clamp_(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT).add_(1.0)
        return torch.mul(gate, torch.sigmoid(gate * SWIGLUOAI_SLOPE), out=out).mul_(up)


def _squared_relu(first: torch.Tensor) -> torch.Tensor:
    return relu(first).square_()


_PLAIN: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU_NO_MUL: silu,
    Activation.GELU_NO_MUL: gelu,
    Activation.RELU2_NO_MUL: _squared_relu,
}
