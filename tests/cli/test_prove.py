"""``eplb prove`` on a trace: table, page and JSON, with the recorded shape as default."""

import json

import numpy as np
import pytest

from eplb_service.io.native import TraceWriter
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import TraceFacts
from tests.cli.arguments import eplb, refusal
from tests.cli.published import checked_document

SCHEDULE = ("--window", 32, "--interval", 32, "--workers", 1)


@pytest.fixture
def heat():
    return synthetic_heat("static", 128, 2, 16, tokens=512, top_k=2, seed=1)


@pytest.fixture
def trace(tmp_path, heat):
    np.savez(tmp_path / "trace.npz", heat=heat)
    return tmp_path / "trace.npz"


def prove(capsys, *arguments):
    return eplb(capsys, "prove", *arguments, *SCHEDULE)


def test_the_document_has_every_arm(trace, capsys):
    shape = ("--heat", trace, "--ranks", 4, "--slots", 5)
    code, printed, err = prove(capsys, *shape, "--balancer", "deepseek,none", "--json")
    assert (code, err) == (0, "")
    document = checked_document("prove", printed)
    arms = {arm["arm"]: arm for arm in document["arms"]}
    assert list(arms) == ["off", "deepseek", "none", "ours", "forced balance"]
    assert document["steps"] == 96
    assert document["blocks"] == 16
    assert arms["none"]["gain"] == {"value": 0, "low": 0, "high": 0}
    assert arms["off"]["gain"] is None
    assert arms["ours"]["gain"]["low"] > 0
    assert arms["forced balance"]["par"] == pytest.approx(1.0)
    assert document["measured"] == ""


def test_table_and_page_have_the_same_figures(trace, tmp_path, capsys):
    for name, ids in (("a", [[1, 2], [3]]), ("b", [[1, 2], [4]])):
        (tmp_path / f"{name}.json").write_text(json.dumps(ids))
    page = tmp_path / "proof.html"
    shape = ("--heat", trace, "--ranks", 4, "--slots", 5, "--bytes-per-expert", 1000)
    answers = ("--answers", tmp_path / "a.json", tmp_path / "b.json")
    code, printed, _ = prove(capsys, *shape, *answers, "--report", page)
    assert code == 0
    html = page.read_text()
    for figure in ("off", "deepseek", "ours", "forced balance"):
        [line] = [line for line in printed.splitlines() if line.startswith(f" {figure} ")]
        assert f"<td>{line.removeprefix(f' {figure} ').split()[0]}</td>" in html
    assert (
        "Tokens: 1 of 2 answers equal (3 tokens compared); first difference: request 1, token 0." in printed
    )
    assert "weights</th>" in html
    table = printed.partition("Our planner")[0].splitlines()[1:]
    assert max(map(len, table)) <= 80


def test_ranks_and_slots_default_to_those_of_the_recording(tmp_path, heat, capsys):
    path = tmp_path / "recorded.zarr"
    with TraceWriter(path, TraceFacts(ranks=4, slots=5), 2, 16) as writer:
        writer.append(heat)
    code, printed, err = prove(capsys, "--heat", path)
    assert (code, err) == (0, "")
    assert "2 layers x 16 experts on 4 ranks x 5 slots; 96 steps scored" in printed


def test_ranks_and_slots_are_required_if_they_are_not_recorded(trace, capsys):
    assert "the trace does not record the number of ranks; pass" in refusal(capsys, "prove", "--heat", trace)
    assert "give --slots" in refusal(capsys, "prove", "--heat", trace, "--ranks", 4)


@pytest.mark.parametrize("option", [["--token", "my secret"], ["--token=my secret"]])
def test_the_page_does_not_contain_the_token(trace, tmp_path, capsys, monkeypatch, option):
    page = tmp_path / "proof.html"
    shape = ("--heat", trace, "--ranks", 4, "--slots", 5)
    arguments = [*map(str, shape), *option, "--report", str(page)]
    monkeypatch.setattr("sys.argv", ["/usr/bin/eplb", "prove", *arguments])
    code, _, err = prove(capsys, *arguments)
    assert (code, err) == (0, "")
    html = page.read_text()
    assert "eplb prove --heat" in html
    assert "secret" not in html
