"""How the next byte is chosen: drawn by its probability, reproducibly, because the likeliest one alone soon loops."""

from __future__ import annotations

import torch


class Sampler:
    """Draws one byte per row and step; two samplers of the same seed make the same draws.

    Parameters
    ----------
    temperature
        Divides the logits; the smaller, the likelier is the likeliest byte. 0 always takes that one.
    seed
        Of the draws.

    Raises
    ------
    ValueError
        For a negative temperature.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """The next byte of each row, int64 ``[B]``."""
        # Gumbel's trick: the largest of logits with this noise is a draw from their softmax.
        uniform_BV = torch.rand(logits_BV.shape, dtype=torch.float64, generator=self._generator)
        noise_BV = -(-uniform_BV.log()).log()
        return (logits_BV + self._temperature * noise_BV).argmax(dim=-1)
