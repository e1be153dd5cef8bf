"""Training on a folder of texts lowers the loss, by the same steps each time, and leaves a model that can be served."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from tests.model.small import CONFIG, small_model
from tools.training.corpus import DOMAIN_BYTES, _capped, _catalogue, _language
from tools.training.generated_text import GENERATORS
from tools.training.texts import Texts
from tools.training.train import losses, train
from worker_agent.model.checkpoint import Checkpoint


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for domain in ("sql", "logs"):
        pieces = GENERATORS[domain](Random(0))
        (tmp_path / f"{domain}.txt").write_text("\n".join(next(pieces) for _ in range(60)))
    return tmp_path


@pytest.mark.slow
def test_loss_falls_and_the_checkpoint_holds_the_model(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, moes = small_model()
    texts = Texts(corpus)
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


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.txt files; write them with"):
        Texts(tmp_path)


@pytest.mark.parametrize("domain", GENERATORS)
def test_made_text_depends_on_the_seed_alone(domain: str) -> None:
    def first(seed: int) -> list[str]:
        pieces = GENERATORS[domain](Random(seed))
        return [next(pieces) for _ in range(20)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_a_domain_ends_at_its_size() -> None:
    assert len(_capped(GENERATORS["logs"](Random(0)))) == DOMAIN_BYTES
    assert _capped(["один", "два"]) == "один\nдва\n".encode()


def test_random_sentences_are_put_between_messages_and_words_only_where_there_are_some() -> None:
    messages = [f"message {number}" for number in range(50)]
    assert list(_language("hindi", messages, [])) == messages
    mixed = list(_language("chinese", messages, ["字"]))
    assert [piece for piece in mixed if piece in messages] == messages
    assert any(piece.endswith("字。") for piece in mixed)


def test_a_catalogue_of_translations_gives_its_messages_without_the_header(tmp_path: Path) -> None:
    # One header and one message, as msgfmt lays them out.
    entries = [(b"", b"Content-Type: text/plain; charset=UTF-8\n"), (b"open", "öffnen".encode())]
    offset = 28 + 16 * len(entries)
    tables: list[list[int]] = [[], []]
    blob = b""
    for column in range(2):
        for entry in entries:
            tables[column] += [len(entry[column]), offset + len(blob)]
            blob += entry[column] + b"\0"
    numbers = [0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0, *tables[0], *tables[1]]
    compiled = b"".join(number.to_bytes(4, "little") for number in numbers) + blob
    assert _catalogue(compiled) == {"öffnen"}
