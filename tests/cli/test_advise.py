"""Tests of ``eplb advise``: recommended settings, expected gain, JSON output, and errors on one line."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from eplb_core.cost.curve import write_curves
from eplb_service.cli.advise import headline
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import eplb
from tests.cli.published import checked_document
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
    reported = checked_document("advise", printed)
    assert reported == json.loads(out.read_text())
    assert reported["pays"] is True
    assert [option["setup"]["slots"] for option in reported["by_redundancy"]] == [4, 5]
    assert reported["redundant"] in (0, 4)
    assert len(reported["gain_L"]) == 2


def test_with_a_cost_curve_the_advice_shows_the_time_and_memory_of_slots(tmp_path, trace, capsys):
    curve = tmp_path / "curve.json"
    write_curves(curve, [H200])
    arguments = ("--heat", trace, "--ranks", 4, "--cost-curve", curve, "--bytes-per-expert", 1 << 30)
    code, out, _ = eplb(capsys, "advise", *arguments)
    assert code == 0
    for phrase in ("MoE ms", "GB per rank", "move price", "(advised)", "Based on:", "H200"):
        assert phrase in out
    code, out, _ = eplb(capsys, "advise", *arguments, "--json")
    reported = checked_document("advise", out)
    assert {"name": "commit_ms", "value": "0.5 ms plus a copy", "source": "assumed"} in reported[
        "assumptions"
    ]
    assert reported["chosen"]["moe_ms"] < reported["moe_ms_left_alone"] * 1.001
    assert reported["by_redundancy"][0]["bytes_per_rank"] == 2 * 4 << 30


def test_the_first_line_says_whether_balancing_pays_off(trace, capsys):
    # With this many tokens, an H100 is compute-bound rather than bound by weight reads.
    np.savez(trace, heat=synthetic_heat("static", 120, 2, 16, tokens=1 << 17, top_k=2, seed=1))
    arguments = ("advise", "--heat", trace, "--ranks", 4, "--redundant", "0,4")
    code, out, _ = eplb(capsys, *arguments, "--model", "deepseek-v3", "--gpu", "h100", "--step-ms", 30)
    assert code == 0
    first = out.splitlines()[0]
    for phrase in ("Balancing", "less time", "of 4 ranks", "ms per step", "tokens/s", "(estimate)"):
        assert phrase in " ".join(out.split("Set")[0].split()), first
    code, out, _ = eplb(capsys, *arguments)
    assert code == 0
    assert "(estimate)" not in out
    assert "of 4 ranks" in out


def test_a_warning_says_that_a_slot_adds_reads_and_memory(trace, capsys):
    arguments = ("advise", "--heat", trace, "--ranks", 4, "--redundant", "0,4")
    _, out, _ = eplb(capsys, *arguments)
    text = " ".join(out.split())
    assert "An expert gets 64 tokens per step on average. A device takes no longer for 100 or 200" in text
    code, out, _ = eplb(capsys, *arguments, "--model", "deepseek-v3", "--gpu", "910b")
    text = " ".join(out.split())
    assert code == 0
    assert (
        "Each slot that gets tokens takes 34.4 us per layer and step to read its weights, and 0.09 GB" in text
    )
    assert (
        "An expert gets 64 tokens per step on average. A slot takes no longer for 150 tokens than for one"
        in text
    )


def test_tables_agree_and_have_no_duplicate_rows(trace, capsys):
    code, out, _ = eplb(capsys, "advise", "--heat", trace, "--ranks", 4, "--redundant", "0,4", "--json")
    assert code == 0
    advice = json.loads(out)
    shown = {}
    for option in (*advice["by_redundancy"], *advice["by_schedule"]):
        figures = option["par"], option["moved_per_100_steps"]
        assert shown.setdefault(f"{option['setup']} {option['move_price']}", figures) == figures
    for rows in (advice["by_schedule"], advice["by_moves"]):
        figures = [(round(option["par"], 3), round(option["moved_per_100_steps"], 3)) for option in rows]
        assert len(set(figures)) == len(figures)
    assert (
        len({option["setup"]["start"] for option in (*advice["by_redundancy"], *advice["by_schedule"])}) == 1
    )
    assert advice["share"] == pytest.approx(1 - advice["par"] / advice["par_left_alone"])
    assert advice["ranks_worth"] == pytest.approx(4 * advice["share"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h100"), "--gpu needs --model"),
        (("--gpu", "a100", "--model", "deepseek-v3"), "--gpu 'a100' is unknown; choose one of h100"),
        (("--model", "gpt-5"), "--model 'gpt-5' is unknown; choose one of"),
    ],
)
def test_unknown_devices_and_models_are_rejected_on_one_line(trace, capsys, arguments, message):
    code, _, err = eplb(capsys, "advise", "--heat", trace, "--ranks", 4, *arguments)
    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("net_ms", "ends"), [(None, "than it saves."), (-0.011, "than it saves, by 0.01 ms per step.")]
)
def test_a_loss_is_not_reported_as_a_negative_gain(net_ms, ends):
    advice = SimpleNamespace(
        pays=False,
        share=-0.03,
        ranks_worth=-0.2,
        ranks=8,
        net_ms=net_ms,
        tokens_per_second_won=None,
        redundant_bytes_per_rank=0,
        redundant=0,
    )
    assert headline(advice, True) == f"Balancing does not pay off: moving experts would take more time {ends}"
