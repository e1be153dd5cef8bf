"""Serve requests on one rank: prompts that change with the phase, batched decoding, and sampling."""

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
"""Domains of the requests in each phase of a demo. The phases run in this order."""

_PROMPTS = Path(__file__).parent / "prompts.json"


def prompts_by_domain() -> dict[str, list[bytes]]:
    """Return the prompts that the package contains, by domain."""
    texts: dict[str, list[str]] = json.loads(_PROMPTS.read_text(encoding="utf-8"))
    return {domain: [text.encode() for text in prompts] for domain, prompts in texts.items()}


class Traffic:
    """Requests for one rank. They depend only on the seed, rank, step and row.

    Parameters
    ----------
    steps
        Number of steps, divided evenly among ``PHASES``.
    rank
        Rank that receives the requests.
    seed
        Seed for the random draws.
    """

    def __init__(self, steps: int, rank: int, seed: int) -> None:
        self._prompts = prompts_by_domain()
        self.domains = sorted(self._prompts)
        self.phases = list(PHASES)
        self._steps = steps
        self._key = (seed, rank)

    def phase(self, step: int) -> int:
        """Return the phase of requests that start at a step, ``0..len(PHASES) - 1``."""
        return min(step * len(self.phases) // self._steps, len(self.phases) - 1)

    def request(self, step: int, row: int) -> tuple[str, bytes]:
        """Return the domain and prompt of the request that starts at a step in a row of the batch."""
        rng = np.random.default_rng([*self._key, step, row])
        domain = str(rng.choice(PHASES[self.phases[self.phase(step)]]))
        prompts = self._prompts[domain]
        return domain, prompts[rng.integers(len(prompts))]


class Decoder:
    """Model with a key-value cache for a batch of requests, each at its own position.

    A request generates the same bytes regardless of the other rows.

    Parameters
    ----------
    model
        Model to run.
    rows
        B, the number of requests in the batch.
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
        """Start a new request in this row."""
        self.positions_B[row] = 0

    @torch.no_grad()
    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Feed one byte per request, int64 ``[B]``, and return the logits for the next byte, ``[B, 256]``.

        All ranks must run the same number of steps. Raises ``ValueError`` if a request is longer than the context.
        """
        if int(self.positions_B.max()) >= self.context:
            raise ValueError(f"a request is longer than the model's context of {self.context} bytes")
        result: Forward = self._model(tokens_B.unsqueeze(1), self.positions_B.unsqueeze(1), self._attend)
        self.positions_B += 1
        return result.logits_BTV[:, 0]

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Add the byte's key and value to the cache, and attend to all bytes of the request so far."""
        rows = torch.arange(len(self.positions_B))
        self._keys[layer, rows, :, self.positions_B] = k[:, :, 0]
        self._values[layer, rows, :, self.positions_B] = v[:, :, 0]
        # Group the heads that share keys: [B, kv_heads, heads / kv_heads, width].
        grouped = q.view(len(rows), k.shape[1], -1, q.shape[-1])
        scores = torch.matmul(grouped, self._keys[layer].transpose(-1, -2)) * q.shape[-1] ** -0.5
        future_BC = torch.arange(self.context) > self.positions_B.unsqueeze(1)
        shares = scores.masked_fill(future_BC[:, None, None], -torch.inf).softmax(dim=-1)
        return torch.matmul(shares, self._values[layer]).view_as(q)


class Server:
    """Batch of requests that a ``ByteTransformer`` answers.

    Every request ends after a fixed number of bytes. At the start, each row is at a different position in its request,
    so that the requests do not all end in the same step. Servers with the same seed draw the same random numbers.

    Parameters
    ----------
    model
        Model to run.
    traffic
        Source of the requests.
    rows
        B, the number of requests in the batch.
    length
        Number of bytes per request, including the prompt.
    temperature
        Sampling temperature. With 0, the most likely byte is always chosen, and the text soon repeats itself.
    seed
        Seed for sampling.
    """

    def __init__(
        self, model: ByteTransformer, traffic: Traffic, rows: int, length: int, temperature: float, seed: int
    ) -> None:
        self._decoder = Decoder(model, rows)
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._traffic = traffic
        self.domains = traffic.domains
        self.phases = traffic.phases
        self.phase = traffic.phase
        self._length = length
        self._step = 0
        self._prompts = [b""] * rows
        self._domains = [0] * rows
        self._ends = [0] * rows
        self._next_B = torch.zeros(rows, dtype=torch.int64)

    def step(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Decode one byte per request; return the generated bytes ``[B]`` and the logits ``[B, 256]``.

        While a request is still reading its prompt, its byte is -1.
        """
        for row in range(len(self._prompts)):
            if self._step >= self._ends[row]:
                self._begin(row)
        positions_B = self._decoder.positions_B.tolist()
        for row, position in enumerate(positions_B):
            if position < len(self._prompts[row]):
                self._next_B[row] = self._prompts[row][position]
        logits_BV = self._decoder.step(self._next_B)
        self._next_B = _draw(logits_BV, self._temperature, self._generator)
        self._step += 1
        is_reading_B = [
            position + 1 < len(prompt) for position, prompt in zip(positions_B, self._prompts, strict=True)
        ]
        return np.where(is_reading_B, -1, self._next_B.numpy()), logits_BV

    def in_flight(self) -> npt.NDArray[np.int64]:
        """Return the number of requests per domain ``[D]``, in the order of ``domains``."""
        return np.bincount(self._domains, minlength=len(self._traffic.domains))

    def _begin(self, row: int) -> None:
        """Start the row's next request. The first request is shortened by an amount that differs between rows."""
        domain, self._prompts[row] = self._traffic.request(self._step, row)
        self._domains[row] = self._traffic.domains.index(domain)
        is_first = self._step == 0
        length = 1 + row * self._length // len(self._ends) if is_first else self._length
        self._ends[row] = self._step + length
        self._decoder.restart(row)


class LockstepServer:
    """Batch of requests that a transformers model answers. All requests start and end together.

    The first half of each request is a prompt of random tokens from one quarter of the vocabulary. Each of the four
    phases uses a different quarter. The rest of the request is decoded greedily. Servers with the same seed have the
    same prompts.

    Parameters
    ----------
    model
        Model to run.
    steps
        Total number of steps in all phases.
    rows
        B, the number of requests in the batch.
    length
        Number of tokens per request, including the prompt.
    vocabulary
        Number of tokens in the model's vocabulary.
    seed
        Seed for the prompts.
    """

    domains: Sequence[str] = ("first quarter", "second quarter", "third quarter", "last quarter")
    phases = domains

    def __init__(self, model: Any, steps: int, rows: int, length: int, vocabulary: int, seed: int) -> None:
        self._model = model
        self._steps = steps
        self._seed = seed
        self._rows = rows
        self._length = length
        self._quarter = vocabulary // len(self.phases)
        self._step = 0
        self._current_phase = 0
        self._cache: Any = None
        self._prompts_BT = torch.zeros(0, dtype=torch.int64)
        self._next_B = torch.zeros(0, dtype=torch.int64)

    def phase(self, step: int) -> int:
        """Return the phase of requests that start at a step."""
        return min(step * len(self.phases) // self._steps, len(self.phases) - 1)

    @torch.no_grad()
    def step(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Decode one token per request; return the generated tokens ``[B]`` and the logits ``[B, V]``.

        The tokens are -1 while the requests are reading their prompts.
        """
        position = self._step % self._length
        prompt_length = self._length // 2
        if position == 0:
            self._begin(prompt_length)
        tokens_B = self._prompts_BT[:, position] if position < prompt_length else self._next_B
        result = self._model(tokens_B.unsqueeze(1), past_key_values=self._cache, use_cache=True)
        self._cache = result.past_key_values
        logits_BV = result.logits[:, -1]
        self._next_B = logits_BV.argmax(dim=-1)
        self._step += 1
        return np.where(position + 1 < prompt_length, -1, self._next_B.numpy()), logits_BV

    def _begin(self, prompt_length: int) -> None:
        """Start new requests in all rows."""
        self._current_phase = self.phase(self._step)
        self._cache = None
        rng = np.random.default_rng([self._seed, self._step])
        prompts_BT = rng.integers(self._quarter, size=(self._rows, prompt_length))
        self._prompts_BT = torch.from_numpy(prompts_BT + self._current_phase * self._quarter)

    def in_flight(self) -> npt.NDArray[np.int64]:
        """Return the number of requests per domain ``[D]``."""
        return np.bincount([self._current_phase] * self._rows, minlength=len(self.domains))


def _draw(logits_BV: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """Return a sample of each row's next byte, int64 ``[B]``. The logits are divided by the temperature."""
    # Gumbel-max trick: the argmax of the logits plus Gumbel noise is a sample from their softmax.
    uniform_BV = torch.rand(logits_BV.shape, dtype=torch.float64, generator=generator)
    noise_BV = -(-uniform_BV.log()).log()
    return (logits_BV + temperature * noise_BV).argmax(dim=-1)
