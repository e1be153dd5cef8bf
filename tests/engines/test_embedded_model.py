"""Tests that the embedded model gives the same results in transformers, in real vLLM and in this project's layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from eplb_core.placement import Placement
from eplb_lab.model.checkpoint import EMBEDDED, Checkpoint
from eplb_lab.model.expert_parallel import expert_parallel
from eplb_lab.model.serving import Decoder
from tests.engines.engine_checks import MAX_LOST
from tests.engines.environments import ROOT, VLLM_032, python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TEXTS = ["SELECT id, name\nFROM accounts", "Wählen Sie bitte", "ファイルを選択", "\x01\x7f\t"]
ROUNDING = 1e-4
"""Tolerance for transformers' float32 logits compared with double precision."""


def _own_logits(text: str) -> torch.Tensor:
    checkpoint = Checkpoint()
    config = checkpoint.config
    whole = Placement.linear(config.layers, config.experts, 1, config.experts)
    decoder = Decoder(expert_parallel(checkpoint, whole, None)[0], 1)
    return torch.cat([decoder.step(torch.tensor([byte])) for byte in text.encode()])


def test_transformers_reads_the_same_bytes_and_computes_the_same_logits(tmp_path):
    out = tmp_path / "logits.json"
    script = ROOT / "tests" / "engines" / "logits_of_transformers.py"
    command = [python_of(VLLM_032), script, EMBEDDED, out, *TEXTS]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, timeout=600, env=environment)
    reference = json.loads(out.read_text())
    assert reference["model"] == "Qwen3MoeForCausalLM"
    for text, expected in zip(TEXTS, reference["texts"], strict=True):
        assert expected["ids"] == list(text.encode())
        assert expected["text"] == text
        expected_TV = torch.tensor(expected["logits"], dtype=torch.float64)
        torch.testing.assert_close(_own_logits(text), expected_TV, rtol=0, atol=ROUNDING)


def test_a_balanced_vllm_server_gives_the_answers_of_an_unbalanced_one(tmp_path):
    out = tmp_path / "figures.json"
    options = ["--requests", "96", "--rounds", "4", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_serving", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    figures = json.loads(out.read_text())
    assert figures["failed"] == {"alone": 0, "balanced": 0}
    assert figures["identical"] + figures["split_draws"] == figures["requests"] == 96
    assert figures["layers_switched"] > 0
    assert figures["steps_lost"] <= MAX_LOST * figures["par"]["steps"]
    assert figures["par"]["after"] < figures["par"]["before"]
