"""Tests of the training tool: the loss falls, the checkpoint holds the model, and validation text is held out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eplb_lab.model.checkpoint import Checkpoint
from tests.model.small import CONFIG, small_model
from tools.train_model import Texts, losses, train


@pytest.mark.slow
def test_loss_falls_and_the_checkpoint_holds_the_model(tmp_path: Path, capsys) -> None:
    for domain in ("sql", "logs"):
        lines = [f"{domain} {number} of {number % 7} rows are ready" for number in range(200)]
        (tmp_path / f"{domain}.txt").write_text("\n".join(lines))
    model, moes = small_model()
    texts = Texts(tmp_path)
    before, balance = losses(model, texts.validation("sql", CONFIG.context + 1, 8))
    train(model, moes, texts, tmp_path / "trained", steps=40, batch=4, minutes=30.0)
    after, _ = losses(model, texts.validation("sql", CONFIG.context + 1, 8))
    assert after.item() < 0.95 * before.item()
    assert balance.item() >= 0.99
    assert "step 40:" in capsys.readouterr().out
    w13_IH, _ = Checkpoint(tmp_path / "trained").experts(1)(2)
    assert torch.equal(w13_IH, moes[1].w13[2].detach().bfloat16().float())


def test_validation_text_is_never_trained_on(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_bytes(b"a" * 950 + b"b" * 50)
    texts = Texts(tmp_path)
    generator = torch.Generator().manual_seed(0)
    assert set(texts.batch(50, 20, generator).unique().tolist()) == {ord("a")}
    assert set(texts.validation("only", 10, 99).unique().tolist()) == {ord("b")}
    assert texts.validation("only", 10, 99).shape == (5, 10)
