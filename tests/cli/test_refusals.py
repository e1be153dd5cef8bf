"""Whatever a user gets wrong is said in one line before any work begins, and nothing is written."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from eplb_service.cli import advise, bench, replay, solve, sweep
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.placement import Placement
from tests.cli.arguments import changed, refusal

GOOD = {
    "solve": "--heat trace.npz --ranks 4 --slots 5 --out out.npz",
    "replay": "--heat trace.npz --ranks 4 --slots 5 --window 40 --out out.json",
    "advise": "--heat trace.npz --ranks 4",
    "sweep": "trace.npz --ranks 4 --interval 16",
    "bench": "--heat trace.npz --ranks 4 --peers none",
    "trace": "",
    "serve": "",
    "slove": "",
}
REFUSED = (
    ("slove", "", "No such command 'slove'. Did you mean 'solve', 'serve'?"),
    ("solve", "--bogus", "No such option: --bogus"),
    ("solve", "--ranks many", "'--ranks'"),
    ("solve", "--ranks 0", "'--ranks'"),
    ("solve", "--ranks 4 --ranks 8 --ranks=2", "--ranks is given 3 times; give it once"),
    ("solve", "--slots 3", "12 slots cannot hold 16 experts"),
    ("solve", "--slots 17", "use at most 16 slots per rank"),
    ("solve", "--policy greedy", "choose one of none, deepseek, flashlb"),
    ("solve", "--out absent/out.npz", "does not exist; create it first"),
    ("solve", "--out out.csv", "must end in .npz or .json or .yaml"),
    ("solve", "--format sglang", "written to a name ending in .json"),
    ("solve", "--format onnx", "unknown format 'onnx'"),
    ("solve", "--as logits", "--as names 'logits'; choose one of heat, slots, routes, weights"),
    ("solve", "--map absent.npy", "absent.npy: cannot be read (No such file or directory)"),
    ("solve", "--as slots --map layers.npz", "does not fit heat of 2 layers"),
    ("solve", "--heat absent.npz", "No such file"),
    ("solve", "--heat prose.csv", "prose.csv: is no CSV"),
    ("solve", "--heat idle.npz", "all of its 20 steps hold zero tokens"),
    ("solve", "--heat negative.npy", "heat is -1.0 at step 2, layer 1, expert 7"),
    ("solve", "--placement absent.json", "No such file"),
    ("solve", "--placement ranks.npz", "places on 8 ranks, expected 4"),
    ("solve", "--placement four.npz", "4 slots"),
    ("solve", "--placement layers.npz", "layers"),
    ("solve", "--prior other.npy", "a prior is heat of the same model"),
    ("solve", "--prior trace.npz --placement out.npz", "either --placement or --prior"),
    ("replay", "--window 100", "the trace has 100 steps, a window of 100 leaves none"),
    ("replay", "--window 0", "'--window'"),
    ("replay", "--interval 40,few", "'--interval'"),
    ("replay", "--interval 8 --interval 9", "--interval is given twice; write its values with commas"),
    ("replay", "--hindsight --no-hindsight", "--hindsight/--no-hindsight is given twice"),
    ("replay", "--policy absent:f", "policy absent:f: cannot import 'absent'"),
    ("replay", "--policy none,greedy", "--policy names 'greedy'; choose among none, deepseek,"),
    ("replay", "--policy ,", "--policy names nothing"),
    ("replay", "--report report.pdf", "must end in .html"),
    ("replay", "--charts four.npz", "exists and is not a folder"),
    ("replay", "--out out.csv", "must end in .json"),
    ("replay", "--placement four.npz", "--placement has 4 slots per rank, asked for [5]"),
    ("replay", "--slots 5,6 --prior trace.npz", "--prior places experts on one number of slots"),
    ("replay", "--redundant 4", "either --slots or --redundant"),
    ("replay", "--heat four.npz", "holds no array whose name says heat"),
    ("replay", "--heat idle.npz", "all of its 20 steps hold zero tokens"),
    ("replay", "--link-bandwidth 0", "link_bandwidth is 0"),
    ("replay", "--nodes 3", "4 ranks do not spread evenly"),
    ("replay", "--nodes 0,0,1", "the number of each of 4 ranks' node"),
    ("replay", "--nodes 0,0,1,-1", "the number of each of 4 ranks' node"),
    ("replay", "--nodes two", "--nodes"),
    ("replay", "--token-group 3", "--token-group 3 does not divide 4 ranks"),
    ("replay", "--budget-ms 0", "budget_ms is 0"),
    ("replay", "--max-layers 0", "max_layers is 0"),
    ("advise", "--redundant 3", "use --redundant 0 or that plus a multiple of 4"),
    ("advise", "--redundant few", "'--redundant'"),
    ("advise", "--window 100", "has 100 steps, a window of 100 leaves none"),
    ("advise", "--out advice.txt", "must end in .json"),
    ("sweep", "absent.npz", "absent.npz"),
    ("sweep", "idle.npz", "idle.npz: all of its 20 steps hold zero tokens"),
    ("sweep", "short.npz --interval 32", "short.npz: the trace has 20 steps"),
    ("sweep", "--redundant 3", "trace.npz: 16 experts and 3 redundant ones do not spread"),
    ("sweep", "--set fitted_curve", "--set 'fitted_curve': write NAME=VALUE,VALUE, each name once"),
    ("sweep", "--set curve=on", "--set 'curve=on': write NAME=VALUE"),
    ("sweep", "--set seed=1 --set seed=2", "each name once"),
    ("sweep", "--set fitted_curve=1", "--set fitted_curve: '1' is not on or off"),
    ("sweep", "--set par_threshold=low", "--set par_threshold: 'low' is not a number"),
    ("sweep", "--set par_threshold=0.5", "par_threshold"),
    ("bench", "--peers trtllm", "--peers names 'trtllm'; choose among vllm-ascend, vllm, sglang"),
    ("bench", "--window 60", "100 steps are no two windows of 60"),
    ("trace", "burn", "No such command 'burn'"),
    ("trace", "info trace.npz --as heats", "choose one of heat, slots, routes, weights"),
    ("trace", "stats trace.npz --ranks 0", "'--ranks'"),
    ("trace", "convert trace.npz --out b.txt", "must end in .zarr or .npz or .npy"),
    ("trace", "convert trace.npz --out absent/b.npz", "does not exist"),
    ("trace", "slice trace.npz --steps 5 --out b.npz", "expected FIRST:LAST"),
    ("trace", "slice trace.npz --steps 100: --out b.zarr", "is empty; the trace has 100 steps"),
    ("trace", "slice x --steps 0:1 --steps 3:4", "--steps is given twice; give it once"),
    ("trace", "synth --kind wild --out b.npz", "choose one of static, drift, phased, bursty"),
    ("trace", "synth --steps 1000000000 --out b.npz", "more than this machine's memory"),
    ("trace", "synth --top-k 65 --out b.npz", "1..64 choices"),
    ("serve", "--listen a:1 --listen b:1", "--listen is given twice; give it once"),
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("trace.npz", heat=synthetic_heat("drift", 100, 2, 16, tokens=256, top_k=2, seed=1))
    np.savez("idle.npz", heat=np.zeros((20, 2, 16), dtype=np.int32))
    np.savez("short.npz", heat=np.ones((20, 2, 16), dtype=np.int32))
    np.save("other.npy", np.ones((4, 2, 17), dtype=np.int32))
    negative = np.ones((4, 2, 16))
    negative[2, 1, 7] = -1
    np.save("negative.npy", negative)
    for name, shape in (("four", (2, 16, 4, 4)), ("ranks", (2, 16, 8, 5)), ("layers", (3, 16, 4, 5))):
        np.savez(f"{name}.npz", phy2log=Placement.linear(*shape).phy2log_LRS)
    (tmp_path / "prose.csv").write_text("hello")
    return tmp_path


@pytest.mark.parametrize(("command", "arguments", "message"), REFUSED)
def test_it_is_refused_in_one_line(command, arguments, message, files, capsys, monkeypatch):
    for module in (advise, bench, replay, sweep):
        monkeypatch.setattr(module, "compile_solver", lambda: pytest.fail("the work was begun"))
    monkeypatch.setattr(solve, "compile_progress", lambda: pytest.fail("the work was begun"))
    before = sorted(files.iterdir())
    given = changed(shlex.split(GOOD[command]), *shlex.split(arguments))
    assert message in refusal(capsys, command, *given)
    assert sorted(files.iterdir()) == before
