"""Tests of invalid arguments: they produce a one-line error before any work begins, and no file is written."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from eplb_core.placement import Placement
from eplb_lab.commands import bench
from eplb_service.cli import advise, prove, replay, solve, sweep
from eplb_service.io.synthetic import synthetic_heat
from tests.cli.arguments import refusal

GOOD = {
    "solve": "--heat trace.npz --ranks 4 --slots 5 --out out.npz",
    "replay": "--heat trace.npz --ranks 4 --slots 5 --window 40 --out out.json",
    "advise": "--heat trace.npz --ranks 4",
    "prove": "--heat trace.npz --ranks 4 --slots 5 --window 32 --interval 32",
    "sweep": "trace.npz --ranks 4 --interval 16",
    "bench": "--heat trace.npz --ranks 4 --peers none",
    "calibrate": "--out curve.json",
    "status": "decode",
    "trace": "",
    "slove": "",
}
REFUSED = (
    ("slove", "", "No such command 'slove'. Did you mean 'solve', 'serve', 'prove'?"),
    ("solve", "--bogus", "No such option: --bogus"),
    ("solve", "--ranks many", "'--ranks'"),
    ("solve", "--ranks 0", "'--ranks'"),
    ("solve", "--slots 3", "12 slots cannot hold 16 experts"),
    ("solve", "--out absent/out.npz", "does not exist; create it first"),
    ("solve", "--out out.csv", "must end in .npz or .json or .yaml"),
    ("solve", "--format sglang", "must end in .json for this format"),
    ("solve", "--as logits", "--as is 'logits'; choose one of heat, slots, routes, weights"),
    ("solve", "--map absent.npy", "absent.npy: cannot be read (No such file or directory)"),
    ("solve", "--heat absent.npz", "No such file"),
    ("solve", "--heat idle.npz", "all of its 20 steps have zero tokens"),
    ("solve", "--placement absent.json", "No such file"),
    ("solve", "--placement layers.npz", "layers"),
    ("replay", "--window 100", "the trace has 100 steps, so a first window of 100 leaves no step to score"),
    ("replay", "--interval 40,few", "'--interval'"),
    ("replay", "--policy absent:f", "policy absent:f: cannot import 'absent'"),
    ("replay", "--policy none,greedy", "--policy contains 'greedy'; choose from none, deepseek,"),
    ("replay", "--report report.pdf", "must end in .html"),
    ("replay", "--charts four.npz", "expected a folder, or a new name in an existing folder"),
    ("replay", "--redundant 4", "--slots and --redundant are mutually exclusive"),
    ("replay", "--heat four.npz", "holds phy2log [2, 4, 4]: specify the meaning with --as"),
    ("replay", "--nodes 3", "a number of nodes that divides 4 ranks"),
    ("replay", "--nodes 0,0,1", "or the node of each rank"),
    ("replay", "--token-group 3", "--token-group 3 does not divide the 4 ranks evenly"),
    ("advise", "--redundant 3", "use --redundant 0, or that number plus a multiple of 4"),
    ("prove", "decode", "give either --heat, for a recorded trace, or the name of a deployment"),
    ("prove", "--window 40 --interval 40", "60 steps follow the first window, but a proof needs at least 64"),
    ("prove", "--balancer greedy", "--balancer contains 'greedy'; choose from none, deepseek,"),
    ("prove", "--balancer absent:f", "--balancer: policy absent:f: cannot import 'absent'"),
    ("prove", "--engine-split odd", "--engine-split is 'odd'; choose one of tables, even, deal, step"),
    ("prove", "--split odd", "split is 'odd'"),
    ("prove", "--report page.pdf", "must end in .html"),
    ("prove", "--recording kept.zarr", "--recording applies to a live deployment, not to --heat"),
    ("prove", "--answers absent.json absent.json", "absent.json: cannot be read (No such file or directory)"),
    ("prove", "--answers absent.json", "Option '--answers' requires 2 arguments"),
    ("prove", "--slots 4,5", "a placement has a single number of slots"),
    ("prove", "--slots 3", "12 slots cannot hold 16 experts"),
    ("prove", "--heat idle.npz", "all of its 20 steps have zero tokens"),
    ("sweep", "idle.npz", "idle.npz: all of its 20 steps have zero tokens"),
    ("sweep", "short.npz --interval 32", "short.npz: the trace has 20 steps"),
    ("sweep", "--redundant 3", "trace.npz: 16 experts and 3 redundant ones cannot be split"),
    ("sweep", "--set curve=on", "--set is 'curve=on'; expected NAME=VALUE"),
    ("sweep", "--set fitted_curve=on", "--set is 'fitted_curve=on'; expected NAME=VALUE"),
    ("sweep", "--set min_gain", "--set is 'min_gain'; expected NAME=VALUE,VALUE with each name only once"),
    ("solve", "--fitted-curve", "No such option: --fitted-curve"),
    ("replay", "--no-estimate-device", "No such option: --no-estimate-device"),
    ("sweep", "--set par_threshold=low", "--set par_threshold: 'low' is not a number"),
    ("bench", "--peers trtllm", "--peers contains 'trtllm'; choose from vllm-ascend, vllm, sglang, models"),
    ("bench", "--window 60", "100 steps are fewer than two windows of 60"),
    ("calibrate", "", "give --hidden and --inter"),
    ("calibrate", "--hidden 8 --inter 8 --device moon", "device string: moon"),
    ("calibrate", "--hidden 8 --inter 8 --phase night", "choose one of any, decode, prefill"),
    ("status", "--address http://eplb:1", "--address is 'http://eplb:1'; expected host:port"),
    ("trace", "burn", "No such command 'burn'"),
    ("trace", "info trace.npz --as heats", "choose one of heat, slots, routes, weights"),
    ("trace", "convert trace.npz --out b.txt", "must end in .zarr or .npz or .npy"),
    ("trace", "slice trace.npz --steps 5 --out b.npz", "expected FIRST:LAST"),
    ("trace", "slice trace.npz --steps 100: --out b.zarr", "is empty; the trace has 100 steps"),
    ("trace", "synth --kind wild --out b.npz", "choose one of static, drift, phased, bursty"),
    ("trace", "synth --steps 1000000000 --out b.npz", "more than this machine's memory"),
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("trace.npz", heat=synthetic_heat("drift", 100, 2, 16, tokens=256, top_k=2, seed=1))
    np.savez("idle.npz", heat=np.zeros((20, 2, 16), dtype=np.int32))
    np.savez("short.npz", heat=np.ones((20, 2, 16), dtype=np.int32))
    for name, shape in (("four", (2, 16, 4, 4)), ("layers", (3, 16, 4, 5))):
        np.savez(f"{name}.npz", phy2log=Placement.linear(*shape).phy2log_LRS)
    return tmp_path


@pytest.mark.parametrize(("command", "arguments", "message"), REFUSED)
def test_invalid_arguments_are_rejected_on_one_line(command, arguments, message, files, capsys, monkeypatch):
    for module in (advise, bench, prove, replay, solve, sweep):
        monkeypatch.setattr(module, "compile_solver", lambda: pytest.fail("the work was begun"))
    before = sorted(files.iterdir())
    # If an option is repeated, the last one counts.
    assert message in refusal(capsys, command, *shlex.split(f"{GOOD[command]} {arguments}"))
    assert sorted(files.iterdir()) == before
