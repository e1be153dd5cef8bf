"""The corpus in memory: each domain's text, its last part held back for validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

_HELD_BACK = 0.05


class Texts:
    """Domains of a folder of ``<domain>.txt`` files, in order of name.

    Raises ``FileNotFoundError`` where the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.txt"))
        if not files:
            raise FileNotFoundError(
                f"{folder}: no .txt files; write them with python -m tools.training.corpus"
            )
        whole = [torch.from_numpy(np.fromfile(path, dtype=np.uint8)) for path in files]
        self.domains = [path.stem for path in files]
        self._training = [text[: int(len(text) * (1 - _HELD_BACK))] for text in whole]
        self._validation = [text[len(part) :] for text, part in zip(whole, self._training, strict=True)]
        # Small domains are read more often than their size says, yet less often than large ones.
        self._odds = torch.tensor([len(text) ** 0.5 for text in whole])

    def batch(self, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """``size`` random pieces of training text, int64 ``[size, length]``."""
        chosen = torch.multinomial(self._odds, size, replacement=True, generator=generator)
        rows = []
        for domain in chosen.tolist():
            text = self._training[domain]
            start = int(torch.randint(len(text) - length, (), generator=generator))
            rows.append(text[start : start + length].long())
        return torch.stack(rows)

    def validation(self, domain: str, length: int, most: int) -> torch.Tensor:
        """The text held back of a domain in pieces, int64 ``[<= most, length]``."""
        text = self._validation[self.domains.index(domain)]
        pieces = min(most, len(text) // length)
        return text[: pieces * length].view(pieces, length).long()
