"""Every row of docs/forfeits.md agrees with the adapters, and every refusal of an option has a row."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters.sglang_fakes import PLAIN
from tests.adapters.vllm_fakes import config, layer, modules, vllm_config
from tests.engines.ascend_layers import LISTS, SCALES, SLOTS, per_expert, weighted
from tests.engines.ascend_settings import ascend
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.vllm import hooks
from worker_agent.adapters.vllm.dispatch import token_group
from worker_agent.adapters.vllm_ascend import weights
from worker_agent.adapters.vllm_ascend.refusals import (
    refuse_misread_lists,
    refuse_second_runner,
    refuse_settings,
)
from worker_agent.adapters.vllm_ascend.weights import expert_weights

ROOT = Path(__file__).parents[2]
STATES = {"works", "slower", "not tried", "refused"}


def rows() -> dict[tuple[str, str, str], str]:
    """Return the state of each row, keyed by engine, kind and feature."""
    states = {}
    engine = ""
    for line in (ROOT / "docs/forfeits.md").read_text().splitlines():
        if line.startswith("## "):
            engine = line[3:]
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] != "kind" and set(cells[0]) != {"-"}:
            states[engine, cells[0], cells[1]] = cells[2]
    return states


ROWS = rows()
Probe = Callable[[pytest.MonkeyPatch], Any]


def settings(**engine: Any) -> Probe:
    return lambda patch: refuse_settings(ascend(patch, **engine))


def second_runner(patch: pytest.MonkeyPatch) -> None:
    ascend(patch, second_runner=True)
    refuse_second_runner()


def quantised(kind: str, formats: int = 2, names: tuple[str, ...] = LISTS, *, move: bool = True) -> Probe:
    def probe(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(weights, "format_of", lambda _: formats)
        host = weighted(kind, **{name: [torch.zeros(2) for _ in range(SLOTS)] for name in names})
        expert_weights(host, quantised=True, move_quantised=move)

    return probe


def unquantised(formats: int) -> Probe:
    def probe(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(weights, "format_of", lambda _: formats)
        expert_weights(
            weighted("NONE", w13_weight=per_expert(2, 3), w2_weight=per_expert(3, 2)), quantised=False
        )

    return probe


def vllm(release: str = "0.32.0", second_runner: bool = False, lora: Any = None, **changes: Any) -> Probe:
    def probe(patch: pytest.MonkeyPatch) -> None:
        envs = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=second_runner)
        modules(patch, vllm={"__version__": release, "envs": envs})
        hooks.refuse_settings(vllm_config(lora, **changes))

    return probe


def dispatching(*layers: Any, **parallel: int) -> Probe:
    return lambda _: token_group(layers, config(**parallel), 0, 4)


def sglang(**changes: Any) -> Probe:
    return lambda _: replace(PLAIN, **changes).check(allow_unverified=False)


REDUNDANT = {"num_redundant_experts": 16}
MX = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
PROBES: dict[tuple[str, str], list[Probe]] = {
    ("vLLM-Ascend", "A2, A3 with MC2"): [
        settings(device=device, tokens=512, eplb=REDUNDANT) for device in ("A2", "A3")
    ],
    ("vLLM-Ascend", "A5"): [settings(device="A5", eplb=REDUNDANT)],
    ("vLLM-Ascend", "Atlas 300I (310P)"): [settings(device="_310P")],
    ("vLLM-Ascend", "none, ND weights"): [unquantised(2)],
    ("vLLM-Ascend", "none, `weight_nz_mode: 2`"): [unquantised(29)],
    ("vLLM-Ascend", "W8A8 with `EPLB_AGENT_QUANTISED_EXPERTS=true`"): [quantised("W8A8", 29)],
    ("vLLM-Ascend", "W8A8 without that variable"): [quantised("W8A8", move=False)],
    ("vLLM-Ascend", "W8A8 without the custom operators"): [
        lambda _: refuse_misread_lists(SCALES, SCALES, first_only=True, kernel_for_lists=False),
        lambda _: refuse_misread_lists(
            SCALES, [scale.to(torch.bfloat16) for scale in SCALES], first_only=False, kernel_for_lists=False
        ),
    ],
    ("vLLM-Ascend", "MXFP8, MXFP4 with that variable"): [
        quantised(kind, 2, MX) for kind in ("MXFP8", "MXFP4", "W8A8MXFP", "W4A4MXFP")
    ],
    ("vLLM-Ascend", "W4A8"): [quantised("W4A8")],
    ("vLLM-Ascend", "all-gather without redundant experts"): [settings(device="A2", ranks=8)],
    ("vLLM-Ascend", "all-gather with redundant experts"): [
        settings(device="A2", ranks=8, eplb=REDUNDANT),
        settings(device="A2", tokens=8192, eplb=REDUNDANT),
    ],
    ("vLLM-Ascend", "fused MC2 (A3's fastest W8A8 path)"): [settings(settings={"enable_fused_mc2": 1})],
    ("vLLM-Ascend", "grouped experts (MoGE)"): [settings(device="_310P")],
    ("vLLM-Ascend", "xlite graphs"): [settings(xlite=True)],
    ("vLLM-Ascend", "pipeline"): [settings(stages=2)],
    ("vLLM-Ascend", "sleep mode"): [settings(sleeps=True)],
    ("vLLM-Ascend", "LoRA"): [settings(lora="some")],
    ("vLLM-Ascend", "pooling models"): [settings(runner="pooling")],
    ("vLLM-Ascend", "`mix_placement`"): [settings(settings={"mix_placement": True})],
    ("vLLM-Ascend", "`EXPERT_MAP_RECORD`"): [settings(variable=True)],
    ("vLLM-Ascend", "`expert_map_path` in release 0.30"): [settings(placed="map.json")],
    ("vLLM-Ascend", "the second model runner of 0.30"): [second_runner],
    ("vLLM", "tensor parallel, data parallel, sequence parallel"): [
        dispatching(layer()),
        dispatching(layer(), data_parallel=4),
        dispatching(layer(sequence_parallel=True)),
    ],
    ("vLLM", "the naive dispatcher"): [dispatching(layer(naive=True))],
    ("vLLM", "kernels that do their own routing (monolithic)"): [dispatching(layer(monolithic=True))],
    ("vLLM", "`--moe-backend deep_gemm_mega_moe`"): [dispatching(SimpleNamespace())],
    ("vLLM", "layers that dispatch differently"): [dispatching(layer(), layer(naive=True))],
    ("vLLM", "pipeline"): [vllm(pipeline_parallel_size=2)],
    ("vLLM", "prefill context parallel"): [dispatching(layer(), prefill_context=2)],
    ("vLLM", "elastic expert parallelism"): [vllm(enable_elastic_ep=True)],
    ("vLLM", "the second model runner of 0.23"): [vllm("0.23.0", second_runner=True)],
    ("vLLM", "the second model runner of 0.32"): [vllm("0.32.0", second_runner=True)],
    ("vLLM", "LoRA"): [vllm(lora="some")],
    ("SGLang", "no all-to-all, `dynamic`"): [sglang()],
    ("SGLang", "DeepEP, `static`"): [sglang(all_to_all="deepep", dispatch="static", shares_tokens=False)],
    ("SGLang", "another all-to-all backend"): [sglang(all_to_all="mooncake")],
    ("SGLang", "`--ep-dispatch-algorithm lp`"): [sglang(dispatch="lp")],
    ("SGLang", "pipeline"): [sglang(pipeline_parallel=2)],
    ("SGLang", "context parallel"): [sglang(context_parallel=2)],
    ("SGLang", "`--ep-size` different from `--tp-size`"): [sglang(expert_parallel=4)],
    ("SGLang", "replicas in one server (`--dp-size`)"): [sglang(replicas=2)],
    ("SGLang", "other recorder modes"): [sglang(recorder="per_pass")],
    ("SGLang", "LoRA, elastic experts, `--enable-pdmux`, offloading"): [
        sglang(unsupported=((name, "why"),)) for name in ("--enable-lora", "--enable-pdmux")
    ],
}
"""Probes of the engine's adapter for each row, one per variant of the feature."""

OF_THE_MODEL = {
    "recording of expert maps",  # matches both spellings
    # Raised while serving if vLLM-Ascend dispatches by all-gather although the check at startup expected a different
    # method.
    "all-gather dispatch with redundant experts",
    "all-gather dispatch on a device that was not expected to use it",
    "dynamic_eplb on a model in which vLLM-Ascend balances no MoE layers",
    "an expert in two slots of one rank",
    "MoE layers whose dispatch changed after the model was loaded",
    "a router that picks different replicas for the same tokens",
    "a quantised expert whose tensors vLLM-Ascend replaces during serving",
    ", whose experts' NPU formats differ from those of rank 0",
    " with experts in NPU formats ",
    "MoE layers (quantisation ",
}
"""Refusals that depend on the model or on a mismatch between ranks, not on an option."""


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_row_matches_the_adapters_behaviour(
    row: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, use = row
    assert ROWS[row] in STATES
    probes = PROBES.get((engine, use), [])
    assert probes or ROWS[row] != "refused", "no probe calls the adapter"
    for probe in probes:
        with monkeypatch.context() as patch:
            if ROWS[row] == "refused":
                with pytest.raises(UnsupportedEngineError):
                    probe(patch)
            else:
                probe(patch)


def _subject(node: ast.expr) -> str:
    """Return the longest constant part of a refusal's subject."""
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    return max((str(value.value) for value in values if isinstance(value, ast.Constant)), key=len, default="")


def refusals() -> set[str]:
    """Return the constant parts of the messages of all refusals in the adapters."""
    subjects = set()
    files = (
        "vllm/hooks.py",
        "vllm/host.py",
        "vllm_ascend/host.py",
        "vllm_ascend/refusals.py",
        "sglang/options.py",
    )
    for name in (*files, "vllm_ascend/weights.py"):
        for node in ast.walk(ast.parse((ROOT / "worker_agent/adapters" / name).read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "id", "")
            if called == "UnsupportedEngineError":
                subjects.add(_subject(node.args[0]))
            elif called == "refuse":
                cases = [
                    item for item in ast.walk(node) if isinstance(item, ast.Tuple) and len(item.elts) == 4
                ]
                subjects |= {_subject(case.elts[1]) for case in cases}
    return subjects - {""}


def test_every_refusal_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []
    for probes in PROBES.values():
        for probe in probes:
            with monkeypatch.context() as patch:
                try:
                    probe(patch)
                except UnsupportedEngineError as error:
                    messages.append(str(error))
    text = "\n".join(messages)
    assert len(refusals()) > 20
    left_out = {
        subject
        for subject in refusals()
        if subject not in text and not re.match("|".join(map(re.escape, OF_THE_MODEL)), subject)
    }
    assert left_out == set()


def test_every_probe_belongs_to_a_row() -> None:
    assert {*PROBES} <= {(engine, use) for engine, _, use in ROWS}
