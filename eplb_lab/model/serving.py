"""A stream of requests on one rank: prompts that change from phase to phase, decoding in a batch, and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eplb_lab.model.transformer import ByteTransformer, Forward

PHASES: Mapping[str, tuple[str, ...]] = {
    "european": ("english", "french", "german"),
    "code": ("python", "cpp", "javascript", "assembly"),
    "far scripts": ("russian", "arabic", "hindi", "chinese", "japanese"),
    "data": ("logs", "tables", "json", "sql"),
}
"""Domains that people ask about in each phase of a demo, in this order."""

_PROMPTS = Path(__file__).parent / "prompts.json"


def prompts_by_domain() -> dict[str, list[bytes]]:
    """Read the prompts that come with the package."""
    texts: dict[str, list[str]] = json.loads(_PROMPTS.read_text(encoding="utf-8"))
    return {domain: [text.encode() for text in of_domain] for domain, of_domain in texts.items()}


class Traffic:
    """Requests to one rank, in ``steps`` that ``PHASES`` divide evenly; they depend on seed, rank and number alone."""

    def __init__(self, steps: int, rank: int, seed: int) -> None:
        self._prompts = prompts_by_domain()
        self.domains = sorted(self._prompts)
        self.phases = list(PHASES)
        self._steps = steps
        self._key = (seed, rank)

    def phase(self, step: int) -> int:
        """Return the phase, ``0..len(PHASES) - 1``, that new requests belong to at a step."""
        return min(step * len(self.phases) // self._steps, len(self.phases) - 1)

    def request(self, step: int, row: int) -> tuple[str, bytes]:
        """Return domain and prompt of the request that begins at a step in a row of the batch."""
        rng = np.random.default_rng([*self._key, step, row])
        domain = str(rng.choice(PHASES[self.phases[self.phase(step)]]))
        prompts = self._prompts[domain]
        return domain, prompts[rng.integers(len(prompts))]


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


class Server:
    """Requests of ``traffic`` on a model; each ends after ``length`` bytes, its prompt among them.

    At the start the ``rows`` of the batch are at different places of their requests, so that they do not all end
    together. Bytes are drawn by their probability, because the likeliest one alone soon loops; a ``temperature`` of 0
    always takes that one. Servers of the same ``seed`` make the same draws.
    """

    def __init__(
        self, model: ByteTransformer, traffic: Traffic, rows: int, length: int, temperature: float, seed: int
    ) -> None:
        self._decoder = Decoder(model, rows)
        self._temperature, self._draws = temperature, torch.Generator().manual_seed(seed)
        self._traffic, self.domains, self.phases = traffic, traffic.domains, traffic.phases
        self.phase = traffic.phase
        self._length = length
        self._step = 0
        self._prompts = [b""] * rows
        self._domains = [0] * rows
        self._ends = [0] * rows
        self._next_B = torch.zeros(rows, dtype=torch.int64)

    def step(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Decode one byte of every request: those generated ``[B]``, -1 where a prompt is read, and all logits."""
        for row in range(len(self._prompts)):
            if self._step >= self._ends[row]:
                self._begin(row)
        places_B = self._decoder.positions_B.tolist()
        for row, place in enumerate(places_B):
            if place < len(self._prompts[row]):
                self._next_B[row] = self._prompts[row][place]
        logits_BV = self._decoder.step(self._next_B)
        self._next_B = _draw(logits_BV, self._temperature, self._draws)
        self._step += 1
        reading = [place + 1 < len(prompt) for place, prompt in zip(places_B, self._prompts, strict=True)]
        return np.where(reading, -1, self._next_B.numpy()), logits_BV

    def in_flight(self) -> npt.NDArray[np.int64]:
        """Count the requests of each domain, in the traffic's order of domains ``[D]``."""
        return np.bincount(self._domains, minlength=len(self._traffic.domains))

    def _begin(self, row: int) -> None:
        domain, self._prompts[row] = self._traffic.request(self._step, row)
        self._domains[row] = self._traffic.domains.index(domain)
        first = self._step == 0
        self._ends[row] = self._step + (1 + row * self._length // len(self._ends) if first else self._length)
        self._decoder.restart(row)


class LockstepServer:
    """Requests on a model of transformers, ``rows`` at a time: all begin together, and each has ``length`` tokens.

    Prompts are the first half: random tokens of a quarter of the ``vocabulary``, another in each of four phases of
    ``steps``. The likeliest token follows. Servers of the same ``seed`` have the same prompts.
    """

    domains: Sequence[str] = ("first quarter", "second quarter", "third quarter", "last quarter")
    phases = domains

    def __init__(self, model: Any, steps: int, rows: int, length: int, vocabulary: int, seed: int) -> None:
        self._model, self._steps, self._seed = model, steps, seed
        self._rows, self._length, self._quarter = rows, length, vocabulary // len(self.phases)
        self._step = 0
        self._begun = 0
        self._cache: Any = None
        self._prompts_BT = self._next_B = torch.zeros(0, dtype=torch.int64)

    def phase(self, step: int) -> int:
        """Return the phase that new requests belong to at a step."""
        return min(step * len(self.phases) // self._steps, len(self.phases) - 1)

    @torch.no_grad()
    def step(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Decode one token of every request: those generated ``[B]``, -1 where a prompt is read, and all logits."""
        place, reads = self._step % self._length, self._length // 2
        if place == 0:
            self._begun, self._cache = self.phase(self._step), None
            rng = np.random.default_rng([self._seed, self._step])
            prompts_BT = rng.integers(self._quarter, size=(self._rows, reads)) + self._begun * self._quarter
            self._prompts_BT = torch.from_numpy(prompts_BT)
        tokens_B = self._prompts_BT[:, place] if place < reads else self._next_B
        done = self._model(tokens_B.unsqueeze(1), past_key_values=self._cache, use_cache=True)
        logits_BV, self._cache = done.logits[:, -1], done.past_key_values
        self._next_B = logits_BV.argmax(dim=-1)
        self._step += 1
        return np.where(place + 1 < reads, -1, self._next_B.numpy()), logits_BV

    def in_flight(self) -> npt.NDArray[np.int64]:
        """Count the requests of each domain ``[D]``."""
        return np.bincount([self._begun] * self._rows, minlength=len(self.domains))


def _draw(logits_BV: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """Draw the next byte of each row, int64 ``[B]``, by its probability; the temperature divides the logits."""
    # Gumbel's trick: the largest of logits with this noise is a draw from their softmax.
    uniform_BV = torch.rand(logits_BV.shape, dtype=torch.float64, generator=generator)
    noise_BV = -(-uniform_BV.log()).log()
    return (logits_BV + temperature * noise_BV).argmax(dim=-1)
