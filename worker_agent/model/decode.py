"""Decoding in a batch: each step feeds every request one byte, and gives the logits of the next."""

from __future__ import annotations

import torch

from worker_agent.model.transformer import ByteTransformer, Forward


class Decoder:
    """A model and the keys and values of ``rows`` requests, each at a position of its own.

    Nothing depends on the contents of the other rows: a request gives the same bytes in any company.
    """

    def __init__(self, model: ByteTransformer, rows: int) -> None:
        config = model.config
        self._model = model
        self.context = config.context
        self.positions_B = torch.zeros(rows, dtype=torch.int64)
        cache = (config.layers, rows, config.kv_heads, config.context, config.head_width)
        self._keys = torch.zeros(cache, dtype=model.dtype)
        self._values = torch.zeros_like(self._keys)

    def restart(self, row: int) -> None:
        """Begin another request in a row."""
        self.positions_B[row] = 0

    @torch.no_grad()
    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Feed one byte of each request, int64 ``[B]``; return the logits of the next, ``[B, 256]``.

        All ranks make the same number of steps. Raises ``ValueError`` where a request is longer than the context.
        """
        if int(self.positions_B.max()) >= self.context:
            raise ValueError(f"a request is longer than the model's context of {self.context} bytes")
        done: Forward = self._model(tokens_B.unsqueeze(1), self.positions_B.unsqueeze(1), self._attend)
        self.positions_B += 1
        return done.logits_BTV[:, 0]

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write this byte's key and value into the cache, and look back at all so far."""
        rows = torch.arange(len(self.positions_B))
        self._keys[layer, rows, :, self.positions_B] = k[:, :, 0]
        self._values[layer, rows, :, self.positions_B] = v[:, :, 0]
        # The heads that share keys, side by side: [B, kv_heads, heads / kv_heads, width].
        grouped = q.view(len(rows), k.shape[1], -1, q.shape[-1])
        scores = torch.matmul(grouped, self._keys[layer].transpose(-1, -2)) * q.shape[-1] ** -0.5
        future_BC = torch.arange(self.context) > self.positions_B.unsqueeze(1)
        shares = scores.masked_fill(future_BC[:, None, None], -torch.inf).softmax(dim=-1)
        return torch.matmul(shares, self._values[layer]).view_as(q)
