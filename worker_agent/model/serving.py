"""Serves a stream of requests on one rank: whenever one is done, the next takes its row of the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker_agent.model.decode import Decoder
from worker_agent.model.sampling import Sampler
from worker_agent.model.traffic import Traffic


class Server:
    """Requests of ``traffic`` on ``decoder``; each ends after ``length`` bytes, its prompt among them.

    At the start the rows are at different places of their requests, so that they do not all end together.
    """

    def __init__(self, decoder: Decoder, sampler: Sampler, traffic: Traffic, rows: int, length: int) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._traffic = traffic
        self._length = length
        self._step = 0
        self._prompts = [b""] * rows
        self._domains = [0] * rows
        self._ends = [0] * rows
        self._next_B = torch.zeros(rows, dtype=torch.int64)

    def step(self) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """One byte of every request: what was generated ``[B]``, -1 in rows that read their prompt, and all logits."""
        for row in range(len(self._prompts)):
            if self._step >= self._ends[row]:
                self._begin(row)
        places_B = self._decoder.positions_B.tolist()
        for row, place in enumerate(places_B):
            if place < len(self._prompts[row]):
                self._next_B[row] = self._prompts[row][place]
        logits_BV = self._decoder.step(self._next_B)
        self._next_B = self._sampler.draw(logits_BV)
        self._step += 1
        reading = [place + 1 < len(prompt) for place, prompt in zip(places_B, self._prompts, strict=True)]
        return np.where(reading, -1, self._next_B.numpy()), logits_BV

    def in_flight(self) -> npt.NDArray[np.int64]:
        """Requests of each domain, in the traffic's order of domains ``[D]``."""
        return np.bincount(self._domains, minlength=len(self._traffic.domains))

    def _begin(self, row: int) -> None:
        domain, self._prompts[row] = self._traffic.request(self._step, row)
        self._domains[row] = self._traffic.domains.index(domain)
        first = self._step == 0
        self._ends[row] = self._step + (1 + row * self._length // len(self._ends) if first else self._length)
        self._decoder.restart(row)
