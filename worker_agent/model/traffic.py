"""What a rank is asked: prompts of domains that change from phase to phase, the same for whoever asks again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

PHASES: Mapping[str, tuple[str, ...]] = {
    "european": ("english", "french", "german"),
    "code": ("python", "cpp", "javascript", "assembly"),
    "far scripts": ("russian", "arabic", "hindi", "chinese", "japanese"),
    "data": ("logs", "tables", "json", "sql"),
}
"""What people ask in each phase of a demo, in this order."""

_PROMPTS = Path(__file__).parent / "prompts.json"


def prompts_by_domain() -> dict[str, list[bytes]]:
    """The prompts that come with the package."""
    texts: dict[str, list[str]] = json.loads(_PROMPTS.read_text(encoding="utf-8"))
    return {domain: [text.encode() for text in of_domain] for domain, of_domain in texts.items()}


class Traffic:
    """Requests to one rank. What is asked depends on seed, rank and the number of the request alone.

    Parameters
    ----------
    steps
        Steps of the whole run, divided evenly among ``PHASES``.
    rank, seed
        Draw the prompts.
    """

    def __init__(self, steps: int, rank: int, seed: int) -> None:
        self._prompts = prompts_by_domain()
        self.domains = sorted(self._prompts)
        self.phases = list(PHASES)
        self._steps = steps
        self._key = (seed, rank)

    def phase(self, step: int) -> int:
        """The phase, ``0..len(PHASES) - 1``, that new requests belong to at a step."""
        return min(step * len(self.phases) // self._steps, len(self.phases) - 1)

    def request(self, step: int, row: int) -> tuple[str, bytes]:
        """Domain and prompt of the request that begins at a step in a row of the batch."""
        rng = np.random.default_rng([*self._key, step, row])
        domain = str(rng.choice(PHASES[self.phases[self.phase(step)]]))
        prompts = self._prompts[domain]
        return domain, prompts[rng.integers(len(prompts))]
