"""Commands score a recording with the split of tokens that its ranks performed, unless the user names another."""

import json

import pytest

from eplb_service.io.native import TraceWriter
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import TraceFacts
from tests.cli.arguments import eplb

SHAPE = ("--ranks", 4)
SLOTS = ("--slots", 5)
SCHEDULE = ("--window", 32, "--interval", 32, "--workers", 1)
COMMANDS = {
    "prove": ((*SHAPE, *SLOTS, *SCHEDULE), lambda found: [arm["par"] for arm in found["arms"]]),
    "replay": (
        (*SHAPE, *SLOTS, *SCHEDULE, "--policy", "flashlb"),
        lambda found: found["policies"]["flashlb"]["par"],
    ),
    "sweep": ((*SHAPE, *SLOTS, *SCHEDULE, "--policy", "flashlb"), lambda found: found["rows"][0]["par"]),
    "advise": ((*SHAPE, "--redundant", "4", "--workers", 1), lambda found: found["par"]),
    "solve": ((*SHAPE, *SLOTS), lambda found: found["par_after"]),
}


@pytest.fixture
def trace(tmp_path):
    """Return a function that writes the same heat as recorded with a split."""
    heat_TLE = synthetic_heat("static", 128, 2, 16, tokens=512, top_k=2, seed=1)

    def write(split):
        path = tmp_path / f"recorded-{split}.zarr"
        if not path.exists():
            with TraceWriter(path, TraceFacts(ranks=4, slots=5, split=split), 2, 16) as writer:
                writer.append(heat_TLE)
        return path

    return write


@pytest.mark.parametrize("command", COMMANDS)
def test_the_recorded_split_replaces_the_default(command, trace, capsys):
    arguments, par = COMMANDS[command]

    def found(split, *chosen):
        heat = (trace(split),) if command == "sweep" else ("--heat", trace(split))
        code, printed, err = eplb(capsys, command, *heat, *arguments, *chosen, "--json")
        assert code == 0, err
        return par(json.loads(printed))

    even = found("even")
    assert even == found("", "--split", "even") != found("")
    for chosen in ("deal", "tables"):
        assert found("even", "--split", chosen) == found("", "--split", chosen)


def test_a_sweep_varies_the_split_of_a_recording(trace, capsys):
    varied = (*SHAPE, *SLOTS, *SCHEDULE, "--policy", "flashlb", "--set", "split=tables,even", "--json")
    rows = []
    for split in ("even", ""):
        _, printed, _ = eplb(capsys, "sweep", trace(split), *varied)
        rows.append([row["par"] for row in json.loads(printed)["rows"]])
    assert rows[0] == rows[1]
    assert rows[0][0] != rows[0][1]
