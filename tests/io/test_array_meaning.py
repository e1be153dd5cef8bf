"""Tests of ambiguous arrays: the error asks for an option, and the option determines how the file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_core.placement import Placement
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace

PLACED_LRS = Placement.linear(4, 32, 8, 5).phy2log_LRS
PLACED_LP = PLACED_LRS.reshape(4, 40)
COUNTS_TLP = np.random.default_rng(0).integers(0, 99, (7, 4, 40))
ROUTES_KLC = np.argsort(np.random.default_rng(0).random((20, 4, 16)), axis=2)[:, :, :4]
COUNTS_CSV = "\n".join(f"{step},{layer},{step + layer},7" for step in range(3) for layer in range(2))


def npz(**arrays: np.ndarray) -> Any:
    return lambda path: np.savez(path, **arrays)


def npy(array: np.ndarray) -> Any:
    return lambda path: np.save(path, array)


SEVERAL = r"which is ambiguous: use --as heat, weights, routes or slots"
QUESTIONS = {
    "steps of one layer": (
        "a.npy",
        npy(COUNTS_TLP.reshape(-1, 1)),
        SEVERAL,
        {"meaning": "heat"},
        (7 * 160, 1, 1),
    ),
    "few tokens' experts": (
        "a.npy",
        npy(ROUTES_KLC),
        SEVERAL,
        {"meaning": "routes", "experts": 16, "batch": 10},
        (2, 4, 16),
    ),
    "two dimensions under a name": (
        "a.npz",
        npz(heat=COUNTS_TLP[0]),
        r"holds heat \[4, 40\]: use --as weights if the rows of heat are layers, --as heat",
        {"meaning": "weights"},
        (1, 4, 40),
    ),
    "heat with a placement": (
        "a.npz",
        npz(physical_to_logical_map=PLACED_LP, expert_load=COUNTS_TLP),
        r"expert_load \[7, 4, 40\]: use .* --as slots if it has tokens by slot",
        {"meaning": "slots"},
        (7, 4, 32),
    ),
    "heat and tokens by slot": (
        "a.npz",
        npz(heat=COUNTS_TLP[..., :32], slot_heat=COUNTS_TLP),
        r"holds heat \[7, 4, 32\], slot_heat \[7, 4, 40\]: specify the meaning with --as",
        {"meaning": "heat"},
        (7, 4, 32),
    ),
    "tokens of one pass by slot": (
        "expert_load_pass.npy",
        npy(COUNTS_TLP[0]),
        r"physical slot, of shape \[4, 40\], without a placement: pass .* with --map, or use --as heat or --as weights",
        {"phy2log": PLACED_LP},
        (1, 4, 32),
    ),
    "tokens by rank and slot": (
        "a.npy",
        npy(COUNTS_TLP.reshape(7, 4, 8, 5)),
        "without a placement: pass the expert in each slot with --map",
        {"phy2log": PLACED_LRS},
        (7, 4, 32),
    ),
    "a table of four columns": (
        "a.csv",
        lambda path: path.write_text(COUNTS_CSV),
        "has 4 columns and no header: add the header step,layer,expert,tokens .* or use --as weights",
        {"meaning": "weights"},
        (1, 6, 4),
    ),
}


@pytest.mark.parametrize(("name", "write", "question", "answer", "shape"), QUESTIONS.values(), ids=QUESTIONS)
def test_an_ambiguous_array_is_rejected_unless_an_option_states_its_meaning(
    tmp_path: Path, name: str, write: Any, question: str, answer: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    path = tmp_path / name
    write(path)
    with pytest.raises(HeatError, match=question) as refused:
        open_trace(path)
    assert "\n" not in str(refused.value)
    assert open_trace(path, ReadAs(**answer)).shape == shape


def test_a_map_implies_tokens_by_slot(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", heat=COUNTS_TLP)
    assert open_trace(tmp_path / "a.npz", ReadAs(phy2log=PLACED_LP)).shape == (7, 4, 32)
    np.save(tmp_path / "a.npy", COUNTS_TLP.reshape(7, 4, 8, 5))
    by_rank = open_trace(tmp_path / "a.npy", ReadAs(phy2log=PLACED_LRS))
    assert (by_rank.facts.ranks, by_rank.facts.slots) == (8, 5)


def test_the_origin_says_whether_the_expert_count_is_inferred(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", routes=ROUTES_KLC)
    assert (
        "16 experts, inferred from the highest expert id"
        in open_trace(tmp_path / "a.npz", ReadAs(batch=10)).facts.origin
    )
    trace = open_trace(tmp_path / "a.npz", ReadAs(batch=10, experts=32))
    assert trace.experts == 32
    assert "largest" not in trace.facts.origin
