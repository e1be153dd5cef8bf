"""Train the embedded model that ``eplb demo`` serves: ``python -m tools.train_model CORPUS FOLDER``.

CORPUS is a directory with one text file per domain. ``docs/research/model.md`` lists the corpus of the embedded
weights.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from eplb_lab.layer import MoEShape
from eplb_lab.model.checkpoint import CONFIG, EMBEDDED, WEIGHTS, expert_tensor_name
from eplb_lab.model.transformer import ByteTransformer, ModelConfig, attend_to_the_past

_STORED = torch.bfloat16
_PEAK_RATE = 3e-3
_LAST_RATE = 1e-4
_WARM_UP = 0.02
_WEIGHT_DECAY = 0.05
_BALANCE = 0.002
_LARGEST_GRADIENT = 1.0
_HELD_BACK = 0.05


class Texts:
    """Domains in a directory of ``<domain>.txt`` files, in name order.

    Raises ``FileNotFoundError`` if the directory contains none.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.txt"))
        if not files:
            raise FileNotFoundError(f"{folder} contains no .txt files; expected one text file per domain")
        full_texts = [torch.from_numpy(np.fromfile(path, dtype=np.uint8)) for path in files]
        self.domains = [path.stem for path in files]
        self._training = [text[: int(len(text) * (1 - _HELD_BACK))] for text in full_texts]
        self._validation = [
            text[len(training) :] for text, training in zip(full_texts, self._training, strict=True)
        ]
        # The odds are proportional to the square root of a domain's size, so small domains are drawn more often than
        # their size would suggest.
        self._odds = torch.tensor([len(text) ** 0.5 for text in full_texts])

    def batch(self, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Draw ``size`` random pieces of training text, int64 ``[size, length]``."""
        chosen = torch.multinomial(self._odds, size, replacement=True, generator=generator)
        rows = []
        for domain in chosen.tolist():
            text = self._training[domain]
            start = int(torch.randint(len(text) - length, (), generator=generator))
            rows.append(text[start : start + length].long())
        return torch.stack(rows)

    def validation(self, domain: str, length: int, most: int) -> torch.Tensor:
        """Return at most ``most`` pieces of a domain's validation text, int64 ``[pieces, length]``."""
        text = self._validation[self.domains.index(domain)]
        pieces = min(most, len(text) // length)
        return text[: pieces * length].view(pieces, length).long()


class TrainableMoE(nn.Module):
    """Layer with E SwiGLU experts. Tokens are sorted by expert, so that each expert runs once per batch."""

    def __init__(self, shape: MoEShape, output_scale: float = 1.0) -> None:
        super().__init__()
        experts = shape.experts
        hidden = shape.hidden
        inner = shape.intermediate
        self.w13 = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5 * output_scale)

    def forward(
        self, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's expert outputs, ``[T, H]``."""
        choices = ids_TK.reshape(-1)
        order_N = choices.argsort(stable=True)
        sizes = torch.bincount(choices, minlength=self.w13.shape[0]).tolist()
        rows = hidden_TH[order_N // ids_TK.shape[1]].split(sizes)
        outputs = [
            functional.linear(_swiglu(functional.linear(rows_NH, w13)), w2)
            for rows_NH, w13, w2 in zip(rows, self.w13, self.w2, strict=True)
        ]
        weighted_NH = torch.cat(outputs) * weights_TK.reshape(-1)[order_N].unsqueeze(-1)
        return torch.zeros_like(hidden_TH).index_add(0, order_N // ids_TK.shape[1], weighted_NH)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def build(config: ModelConfig) -> tuple[ByteTransformer, list[TrainableMoE]]:
    """Return a model with freshly initialised weights, and its MoE layers."""
    scale = (2 * config.layers) ** -0.5
    moes = [TrainableMoE(config.shape(layer), scale) for layer in range(config.layers)]
    return ByteTransformer(config, moes), moes


def losses(model: ByteTransformer, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross-entropy of the next byte in nats, and the routers' balancing loss.

    The balancing loss is 1 if all experts are used equally over the batch. A batch contains all domains, so experts
    can still specialise in some of them.
    """
    inputs_BT = tokens_BT[:, :-1]
    positions_BT = torch.arange(inputs_BT.shape[1]).expand_as(inputs_BT)
    outputs = model(inputs_BT, positions_BT, attend_to_the_past)
    entropy = functional.cross_entropy(outputs.logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
    experts = model.config.experts
    top_k = model.config.top_k
    balance = torch.zeros(())
    for logits_NE in outputs.router_logits_LNE:
        chosen_N = logits_NE.topk(top_k, dim=-1).indices.flatten()
        share_E = torch.bincount(chosen_N, minlength=experts) / chosen_N.numel()
        balance = balance + experts * (share_E * logits_NE.softmax(dim=-1).mean(dim=0)).sum()
    return entropy, balance / model.config.layers


def train(
    model: ByteTransformer,
    moes: list[TrainableMoE],
    texts: Texts,
    folder: Path,
    *,
    steps: int,
    batch: int,
    minutes: float,
    save_every: float = 180.0,
) -> None:
    """Train a model and save checkpoints.

    Training ends after ``steps`` batches or ``minutes`` minutes, whichever comes first. In either case, the
    learning-rate schedule is completed.

    Parameters
    ----------
    model
        Model to train.
    moes
        Its MoE layers.
    texts
        Corpus.
    folder
        Directory for the checkpoint.
    steps
        Maximum number of batches.
    batch
        Number of pieces of text per batch.
    minutes
        Maximum duration in minutes.
    save_every
        Seconds between two checkpoints.
    """
    parameters = [*model.parameters(), *nn.ModuleList(moes).parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY, fused=True
    )
    generator = torch.Generator().manual_seed(1)
    began = saved = time.monotonic()
    step = 0
    progress = 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = _rate(progress)
        entropy, balance = losses(model, texts.batch(batch, model.config.context + 1, generator))
        optimizer.zero_grad()
        (entropy + _BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(parameters, _LARGEST_GRADIENT)
        optimizer.step()
        step += 1
        now = time.monotonic()
        progress = max(step / steps, (now - began) / (60 * minutes))
        if step % 25 == 0 or progress >= 1:
            print(
                f"step {step}: {entropy.item() / math.log(2):.3f} bits per byte, balance {balance.item():.3f}, "
                f"{now - began:.0f} s",
                flush=True,
            )
        if now - saved > save_every or progress >= 1:
            save(folder, model, moes)
            saved = now


def save(folder: Path, model: ByteTransformer, moes: Sequence[TrainableMoE]) -> None:
    """Write a model and its ``TrainableMoE`` layers as a checkpoint, replacing the previous one in ``folder``."""
    tensors = dict(model.state_dict())
    for layer, moe in enumerate(moes):
        for expert, (w13_IH, w2_HI) in enumerate(zip(moe.w13, moe.w2, strict=True)):
            gate, up = w13_IH.chunk(2)
            for projection, tensor in {"gate_proj": gate, "up_proj": up, "down_proj": w2_HI}.items():
                tensors[expert_tensor_name(layer, expert, projection)] = tensor
    stored = {name: tensor.detach().to(_STORED).contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(
        json.dumps(model.config.to_hugging_face(), indent=2) + "\n", encoding="utf-8"
    )
    shutil.copyfile(EMBEDDED / "tokenizer.json", folder / "tokenizer.json")
    tokenizer = json.loads((EMBEDDED / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["model_max_length"] = model.config.context
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n", encoding="utf-8")
    temporary = folder / f"{WEIGHTS}.part"
    save_file(stored, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)


def _rate(progress: float) -> float:
    """Return the learning rate: a linear warm-up followed by a cosine decay."""
    if progress < _WARM_UP:
        return _PEAK_RATE * (progress + 1e-3) / _WARM_UP
    decay = 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))
    return _LAST_RATE + (_PEAK_RATE - _LAST_RATE) * decay


def main() -> None:
    """Train with the settings from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="directory of text files, one per domain")
    parser.add_argument("folder", type=Path, help="directory for the checkpoint")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    model, moes = build(ModelConfig())
    train(
        model,
        moes,
        Texts(chosen.corpus),
        chosen.folder,
        steps=chosen.steps,
        batch=chosen.batch,
        minutes=chosen.minutes,
    )


if __name__ == "__main__":
    main()
