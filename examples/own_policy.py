"""Compare your own balancing policy with the built-in one on a recorded trace.

Run it from the repository root: ``python examples/own_policy.py``. To use the policy on the command line,
run ``eplb replay --policy flashlb,own_policy:swap_first ...`` in the directory of this file. ``eplb bench``
compares the policy with other engines' balancers.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.open_trace import open_trace
from eplb_service.replay.jobs import jobs_for, replay, scene_for, setups_of

TRACE = Path(__file__).parents[1] / "docs/examples/byte_moe_decoding.npz"
Int = npt.NDArray[np.integer]


def swap_first(heat_TLE: Int, phy2log_LRS: Int) -> Int:
    """Swap the first experts of the hottest and the coldest rank of each layer.

    Parameters
    ----------
    heat_TLE
        Tokens of the window, ``[T, L, E]``.
    phy2log_LRS
        Deployed placement, ``[L, R, S]``. It is a copy, so it can be changed in place.
    """
    for heat_E, phy2log_RS in zip(heat_TLE.sum(axis=0), phy2log_LRS, strict=True):
        load_R = heat_E[phy2log_RS].sum(axis=1)
        pair = [load_R.argmax(), load_R.argmin()]
        phy2log_RS[pair, 0] = phy2log_RS[pair[::-1], 0]
    return phy2log_LRS


def main() -> None:
    """Replay the trace with both policies: 8 ranks, 5 slots, a decision every 64 steps."""
    setups = setups_of(windows=[64], intervals=[64], slots=[5])
    jobs = jobs_for(["flashlb", "own_policy:swap_first"], setups, PlannerSettings())
    result = replay(open_trace(TRACE), jobs, scene_for(ranks=8))
    baseline = result.baselines[0]
    print(f"without balancing: PAR {baseline.par_realised:.3f}")
    for policy in result.policies:
        print(f"{policy.policy}: PAR {policy.par_realised:.3f}, {policy.moves} experts moved")


if __name__ == "__main__":
    main()

# Output:
#   without balancing: PAR 2.093
#   flashlb: PAR 1.536, 140 experts moved
#   own_policy:swap_first: PAR 1.836, 24 experts moved
