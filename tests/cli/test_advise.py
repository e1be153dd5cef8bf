"""``eplb advise`` says what to set and what it wins, as text and as JSON, and refuses bad input in one line."""

import json

import numpy as np
import pytest

from eplb_service.cost.curve import write_curves
from eplb_service.heat.synthetic import synthetic_heat
from tests.cli.arguments import eplb
from tests.cli.published import held
from tests.cost.curves import H200


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, heat=synthetic_heat("static", 120, 2, 16, tokens=512, top_k=2, seed=1))
    return path


def test_json_on_stdout_and_in_the_file_agree(tmp_path, trace, capsys):
    out = tmp_path / "advice.json"
    code, printed, _ = eplb(
        capsys, "advise", "--heat", trace, "--ranks", 4, "--redundant", "0,4", "--out", out, "--json"
    )
    assert code == 0
    reported = held("advise", printed)
    assert reported == json.loads(out.read_text())
    assert reported["pays"] is True
    assert [option["setup"]["slots"] for option in reported["by_redundancy"]] == [4, 5]
    assert reported["redundant"] in (0, 4)
    assert len(reported["gain_L"]) == 2


def test_with_a_cost_curve_slots_are_set_against_time_and_memory(tmp_path, trace, capsys):
    curve = tmp_path / "curve.json"
    write_curves(curve, [H200])
    arguments = ("--heat", trace, "--ranks", 4, "--cost-curve", curve, "--bytes-per-expert", 1 << 30)
    code, out, _ = eplb(capsys, "advise", *arguments)
    assert code == 0
    for phrase in ("MoE ms", "GiB per rank", "move price", "(advised)", "This rests on:", "H200"):
        assert phrase in out
    code, out, _ = eplb(capsys, "advise", *arguments, "--json")
    reported = held("advise", out)
    assert {"name": "commit_ms", "value": "0.5 ms and a copy", "source": "assumed"} in reported["assumptions"]
    assert reported["chosen"]["moe_ms"] < reported["moe_ms_left_alone"] * 1.001
    assert reported["by_redundancy"][0]["bytes_per_rank"] == 2 * 4 << 30
