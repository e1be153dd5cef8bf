"""A file whose array could be two things is refused with the question that decides, and read as the answer says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_service.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace
from eplb_service.placement import Placement

PLACED_LRS = Placement.linear(4, 32, 8, 5).phy2log_LRS
PLACED_LP = PLACED_LRS.reshape(4, 40)
COUNTS_TLP = np.random.default_rng(0).integers(0, 99, (7, 4, 40))
ROUTES_KLC = np.argsort(np.random.default_rng(0).random((20, 4, 16)), axis=2)[:, :, :4]
COUNTS_CSV = "\n".join(f"{step},{layer},{step + layer},7" for step in range(3) for layer in range(2))


def npz(**arrays: np.ndarray) -> Any:
    return lambda path: np.savez(path, **arrays)


def npy(array: np.ndarray) -> Any:
    return lambda path: np.save(path, array)


QUESTIONS = {
    "a placement": (
        "a.npy",
        npy(PLACED_LP),
        r"names each of the experts 0 to 31: it is a placement, which --map and --placement take; or say --as weights",
        {"meaning": "weights"},
        (1, 4, 40),
    ),
    "a placement by rank": (
        "a.npy",
        npy(PLACED_LRS),
        "it is a placement.* --as heat",
        {"meaning": "heat"},
        (4, 8, 5),
    ),
    "steps of one layer": (
        "a.npy",
        npy(COUNTS_TLP.reshape(-1, 1)),
        "say --as heat if its rows are steps of one layer, --as weights if they are layers",
        {"meaning": "heat"},
        (7 * 160, 1, 1),
    ),
    "two dimensions under a name": (
        "a.npz",
        npz(heat=COUNTS_TLP[0]),
        r"holds heat \[4, 40\]: say --as weights if its rows are layers, --as heat",
        {"meaning": "weights"},
        (1, 4, 40),
    ),
    "a name of either, with a placement of as many slots": (
        "a.npz",
        npz(physical_to_logical_map=PLACED_LP, expert_load=COUNTS_TLP),
        r"holds expert_load \[7, 4, 40\] and a placement of as many slots: say --as slots .*, --as heat",
        {"meaning": "slots"},
        (7, 4, 32),
    ),
    "a map for what is named heat": (
        "a.npz",
        npz(heat=COUNTS_TLP),
        "calls its array heat.* say --as slots if they are tokens by slot, or leave --map out",
        {"meaning": "slots"},
        (7, 4, 32),
    ),
    "heat and tokens by slot": (
        "a.npz",
        npz(heat=COUNTS_TLP[..., :32], slot_heat=COUNTS_TLP),
        r"holds heat \[7, 4, 32\], slot_heat \[7, 4, 40\]: say with --as which one is meant",
        {"meaning": "heat"},
        (7, 4, 32),
    ),
    "tokens of one pass by slot": (
        "expert_load_pass.npy",
        npy(COUNTS_TLP[0]),
        r"physical slot \[4, 40\] without their placement: give .* with --map, or say --as weights",
        {"phy2log": PLACED_LP},
        (1, 4, 32),
    ),
    "tokens by rank and slot": (
        "a.npy",
        npy(COUNTS_TLP.reshape(7, 4, 8, 5)),
        "without their placement: give the expert in each slot with --map, or say --as heat",
        {"phy2log": PLACED_LRS},
        (7, 4, 32),
    ),
    "few tokens' experts": (
        "a.npy",
        npy(ROUTES_KLC),
        "say --as routes if they are the experts of each token, or --as heat",
        {"meaning": "routes", "experts": 16, "batch": 10},
        (2, 4, 16),
    ),
    "a table of four columns": (
        "a.csv",
        lambda path: path.write_text(COUNTS_CSV),
        "has 4 columns and no header: put step,layer,expert,tokens above .* or say --as weights",
        {"meaning": "weights"},
        (1, 6, 4),
    ),
}


@pytest.mark.parametrize(("name", "write", "question", "answer", "shape"), QUESTIONS.values(), ids=QUESTIONS)
def test_what_could_be_two_things_is_asked(
    tmp_path: Path, name: str, write: Any, question: str, answer: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    path = tmp_path / name
    write(path)
    mapped = ReadAs(phy2log=PLACED_LP) if "leave --map out" in question else ReadAs()
    with pytest.raises(HeatError, match=question) as refused:
        open_trace(path, mapped)
    assert "\n" not in str(refused.value)
    phy2log = answer.get("phy2log", mapped.phy2log)
    assert open_trace(path, ReadAs(**{**answer, "phy2log": phy2log})).shape == shape


def test_a_header_answers_for_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"step,layer,expert,tokens\n{COUNTS_CSV}")
    assert open_trace(tmp_path / "a.csv").shape == (3, 2, 4)


@pytest.mark.parametrize(
    "array", [np.array([[0, 0]]), np.array([[1, 0], [2, 0]]), np.array([[0.0, 1.0]]), np.array([[5, 9, 7]])]
)
def test_tokens_are_not_taken_for_a_placement(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    assert open_trace(tmp_path / "a.npy").shape == (1, *array.shape)


def test_what_deepseek_s_solver_returns_is_no_heat(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="DEEPSEEK'S TENSORS ARE NOT TESTED: no torch here")
    torch.save((torch.tensor(PLACED_LP.tolist()), torch.zeros(4, 32, 2)), tmp_path / "a.pt")
    with pytest.raises(HeatError, match="as a placement of DeepSeek's EPLB: --map and --placement take that"):
        open_trace(tmp_path / "a.pt")


def test_how_many_experts_there_are_is_said_where_it_is_taken_from_choices(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", routes=ROUTES_KLC)
    assert (
        "16 experts by the largest that was chosen"
        in open_trace(tmp_path / "a.npz", ReadAs(batch=10)).facts.origin
    )
    known = open_trace(tmp_path / "a.npz", ReadAs(batch=10, experts=32))
    assert known.experts == 32
    assert "largest" not in known.facts.origin
