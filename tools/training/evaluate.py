"""Validation loss and expert skew of each domain: ``python -m tools.training.evaluate CORPUS CHECKPOINT [CHECKPOINT]``.

Skew is that of a linear layout on R ranks: how much more work the hottest rank would have than the average one if the
whole deployment were asked in one domain, without any sampling noise of small batches.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from eplb_service.placement.par import step_par
from tools.training.texts import Texts
from worker_agent.model.checkpoint import Checkpoint
from worker_agent.model.transformer import ByteTransformer, attend_to_the_past
from worker_agent.moe import DenseMoE

RANKS = 4


@dataclass(frozen=True)
class DomainFigures:
    """What a model makes of one domain's validation text.

    Parameters
    ----------
    bits
        Cross-entropy in bits per byte.
    share_LE
        Part of the domain's choices that each expert gets, float64 ``[L, E]``.
    """

    bits: float
    share_LE: torch.Tensor

    @property
    def top_share(self) -> float:
        """Part of the choices that the most popular eighth of the experts gets, averaged over layers."""
        experts = self.share_LE.shape[1]
        return float(self.share_LE.topk(max(1, experts // 8), dim=1).values.sum(dim=1).mean())

    def par(self, ranks: int) -> float:
        """Peak-to-average ratio of the rank loads under the linear layout, averaged over layers; 1 for one expert."""
        if self.share_LE.shape[1] % ranks:
            return 1.0
        loads_LR = self.share_LE.unflatten(1, (ranks, -1)).sum(dim=2)
        return float(step_par(loads_LR.numpy()).mean())


@torch.no_grad()
def evaluate(checkpoint: Checkpoint, texts: Texts, pieces: int) -> dict[str, DomainFigures]:
    """Figures of every domain, over up to ``pieces`` stretches of validation text as long as the context."""
    config = checkpoint.config
    moes = [DenseMoE(config.shape(layer), checkpoint.experts(layer)) for layer in range(config.layers)]
    model = ByteTransformer(config, moes)
    checkpoint.fill(model)
    figures = {}
    for domain in texts.domains:
        tokens_BT = texts.validation(domain, config.context + 1, pieces)
        positions_BT = torch.arange(config.context).expand(len(tokens_BT), -1)
        done = model(tokens_BT[:, :-1], positions_BT, attend_to_the_past)
        entropy = functional.cross_entropy(done.logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        counts = [
            torch.bincount(logits_NE.topk(config.top_k).indices.flatten(), minlength=config.experts)
            for logits_NE in done.router_logits_LNE
        ]
        counts_LE = torch.stack(counts).double()
        share_LE = counts_LE / counts_LE.sum(dim=1, keepdim=True)
        figures[domain] = DomainFigures(entropy.item() / math.log(2), share_LE)
    return figures


def main() -> None:
    """Print a table in Markdown: one row per domain, one column of bits per model, and the skew of the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--pieces", type=int, default=32, help="stretches of validation text per domain")
    chosen = parser.parse_args()
    texts = Texts(chosen.corpus)
    models = [evaluate(Checkpoint(path), texts, chosen.pieces) for path in chosen.checkpoints]
    names = [f"{path.name}, bits per byte" for path in chosen.checkpoints]
    print("| domain |", " | ".join(names), f"| choices of the top eighth | PAR on {RANKS} ranks |")
    print("|---" * (len(names) + 3) + "|")
    for domain in texts.domains:
        bits = " | ".join(f"{model[domain].bits:.3f}" for model in models)
        first = models[0][domain]
        print(f"| {domain} | {bits} | {first.top_share:.0%} | {first.par(RANKS):.2f} |")
    means = " | ".join(
        f"{sum(figure.bits for figure in model.values()) / len(model):.3f}" for model in models
    )
    print(f"| mean of domains | {means} | | |")


if __name__ == "__main__":
    main()
