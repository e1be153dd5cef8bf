"""Compute a placement for a recorded heat trace.

Run it from the repository root: ``python examples/solve_a_trace.py``.
"""

from pathlib import Path

from eplb_service import solve
from eplb_service.io.open_trace import read_heat

TRACE = Path(__file__).parents[1] / "docs/examples/byte_moe_decoding.npz"


def main() -> None:
    """Place a small model's experts on 8 ranks with 5 slots each, based on heat recorded while decoding."""
    heat_TLE = read_heat(TRACE)
    print(f"heat: {heat_TLE.shape[0]} steps, {heat_TLE.shape[1]} layers, {heat_TLE.shape[2]} experts")

    solution = solve(heat_TLE, ranks=8, slots=5)
    print(f"PAR {solution.par_before:.3f} before, {solution.par_after:.3f} promised after")
    print(f"layer 0, experts of rank 0: {solution.phy2log[0, 0].tolist()}")
    print(solution.verdicts[0].reason)


if __name__ == "__main__":
    main()

# Output:
#   heat: 256 steps, 4 layers, 32 experts
#   PAR 2.218 before, 1.544 promised after
#   layer 0, experts of rank 0: [15, 1, 14, 29, 20]
#   placed from scratch (26 slots receive weights): PAR 1.961 to 1.484 on this window
