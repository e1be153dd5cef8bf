"""A weights file holds a whole model, or is refused by the name of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.model.small import CONFIG, small_model, write_small_model
from worker_agent.model.config import ModelConfig
from worker_agent.model.transformer import ByteTransformer
from worker_agent.model.weights_file import EMBEDDED, WeightsError, WeightsFile

GATE = "blocks.1.experts.3.gate_proj.weight"


def _changed(path: Path, **changes: torch.Tensor | None) -> Path:
    """A small model whose tensors were replaced, added or taken away."""
    write_small_model(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path, metadata=metadata)
    return path


def test_what_was_saved_is_read_to_the_precision_it_is_stored_in(tmp_path: Path) -> None:
    model, moes = small_model()
    file = WeightsFile(write_small_model(tmp_path / "small.safetensors"))
    assert file.config == CONFIG
    read = ByteTransformer(CONFIG, moes)
    file.fill(read)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.bfloat16().float()), name
    w13_IH, w2_HI = file.experts(1)(3)
    assert torch.equal(w13_IH, moes[1].w13[3].bfloat16().float())
    assert torch.equal(w2_HI, moes[1].w2[3].bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({GATE: None}, rf"tensor {GATE} \[6, 16\] is missing"),
        ({"surprise": torch.ones(2)}, r"tensor surprise \[2\] is not of this model"),
        ({GATE: torch.ones(6, 15)}, rf"tensor {GATE} must have the shape \[6, 16\], got \[6, 15\]"),
        ({"embedding": torch.ones(3, 16)}, r"tensor embedding must have the shape \[256, 16\]"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    changes: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=words):
        WeightsFile(_changed(tmp_path / "changed.safetensors", **changes))


def test_files_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"missing.safetensors: no readable safetensors file"):
        WeightsFile(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors here")
    with pytest.raises(WeightsError, match="no readable safetensors file"):
        WeightsFile(tmp_path / "text.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(WeightsError, match="no model config in the metadata"):
        WeightsFile(tmp_path / "foreign.safetensors")


def test_the_embedded_model_comes_with_the_package() -> None:
    assert WeightsFile().config == ModelConfig()
    assert EMBEDDED.stat().st_size <= 16 * 2**20
