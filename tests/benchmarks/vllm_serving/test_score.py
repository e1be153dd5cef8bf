"""A run's figures name what it does not show, on a terminal and in a log."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks.vllm_serving.score import ALONE, BALANCED, Balance, Round, Switches, complaint, figures
from benchmarks.vllm_serving.screen import Screen, live, summary
from tests.benchmarks.vllm_serving.answers import REQUEST, answer_of

SWITCHES = Switches(layers_switched=7, experts_moved=9, bytes_moved=10**6, steps_lost=0)
BALANCE = Balance(1.5, 1.1, 80)


def _served(**of_balanced: object) -> list[Round]:
    rounds = []
    for number in range(2):
        part = Round([REQUEST, REQUEST])
        part.answers = {
            ALONE: [answer_of("good"), answer_of("more")],
            BALANCED: [answer_of("good"), answer_of("more")],
        }
        if number and of_balanced:
            part.answers[BALANCED][1] = answer_of(**of_balanced)  # type: ignore[arg-type]
        part.complete = {ALONE, BALANCED}
        rounds.append(part)
    return rounds


def test_a_run_without_fault_has_nothing_to_complain_of() -> None:
    found = figures(_served(), SWITCHES, BALANCE)
    assert complaint(found) is None
    assert (found["identical"], found["tokens"][BALANCED], found["layers_switched"]) == (4, 16, 7)
    assert found["latency_ratio_by_round"]["token_p50"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("of_balanced", "switches", "message"),
    [
        ({"text": "more", "error": "lost"}, SWITCHES, "1 requests failed"),
        ({"text": "more", "shift": 0.5}, SWITCHES, "1 of 4 answers differ"),
        ({"text": "more"}, Switches(0, 0, 0, 0), "no layer was switched"),
    ],
)
def test_what_a_run_does_not_show_is_named(
    of_balanced: dict[str, object], switches: Switches, message: str
) -> None:
    assert message in str(complaint(figures(_served(**of_balanced), switches, BALANCE)))


def test_rounds_and_summary_are_shown_on_a_terminal_and_logged_elsewhere() -> None:
    rounds = _served()
    painted = Console(force_terminal=True, width=140, record=True)
    with live(painted, rounds, lambda: "PAR 1.1") as screen:
        screen.doing("round 1")
    reported = Console(force_terminal=False, width=140, record=True)
    Screen(reported, rounds, lambda: "PAR 1.1").finished(rounds[0])
    reported.print(summary(figures(rounds, SWITCHES, BALANCE)))
    assert "2 + 2 of 2" in painted.export_text()
    text = reported.export_text()
    assert "data: 2/2 identical" in text
    assert "4 of 4 requests, 16 tokens" in text
    assert "1.100, while domains drift" in text
