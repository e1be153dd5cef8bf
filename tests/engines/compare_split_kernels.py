"""Compare the step-split kernels with the PyTorch operators, and compile the kernels. Runs in an engine's Python.

``python compare_split_kernels.py interpret`` runs them in Triton's interpreter, ``... compile`` compiles them for an
H100 without running them.
"""

import os
import sys

import numpy as np

TRIALS = 24


def placements(draw):
    """Yield placements, each with its number of experts.

    Some placements have an expert twice on a rank. The last one is large.
    """
    for _ in range(TRIALS):
        ranks, slots = draw.integers(1, 7, size=2)
        experts = int(draw.integers(max(1, ranks * slots // 2), ranks * slots + 1))
        yield placed(draw, ranks, slots, experts)
    yield placed(draw, 32, 9, 256)


def placed(draw, ranks, slots, experts):
    replicas = draw.integers(0, experts, ranks * slots - experts)
    flat_P = draw.permutation(np.concatenate([np.arange(experts), replicas]))
    return flat_P.reshape(ranks, slots), experts


def interpret():
    """Compare physical experts bitwise. The choices include ids that name no expert, and padding rows."""
    import torch

    from worker_agent import step_split

    draw = np.random.default_rng(0)
    compared = 0
    for trial, (placed_RS, experts) in enumerate(placements(draw)):
        operators = step_split.StepSplit(placed_RS, experts, "cpu")
        step_split.KERNEL_DEVICES[:] = ["cpu"]
        kernels = step_split.StepSplit(placed_RS, experts, "cpu")
        step_split.KERNEL_DEVICES[:] = ["cuda"]
        assert kernels.uses_kernels
        assert not operators.uses_kernels
        rows = draw.integers(1, 300)
        choices = draw.integers(1, 9)
        ids_TK = torch.from_numpy(draw.zipf(1.3, (rows, choices)) % (experts + 1) - 1)
        ids_TK = ids_TK.to(torch.int32 if trial % 2 else torch.int64)
        real_rows = None if trial % 3 == 0 else torch.tensor(draw.integers(0, rows + 1), dtype=torch.int32)
        for split in (operators, kernels):
            split.install(np.roll(placed_RS, trial, axis=0))
        expected, actual = (split.physical(ids_TK, real_rows) for split in (operators, kernels))
        assert torch.equal(expected[0], actual[0]), trial
        assert torch.equal(expected[1], actual[1]), trial
        compared += ids_TK.numel()
    print(f"{compared} choices are equal")


def compile_all():
    """Compile all kernels for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from worker_agent import step_split_kernel as module

    i32 = "*i32"
    i64 = "*i64"
    f64 = "*fp64"
    block = {"HAS_REAL_ROWS": True, "BLOCK": 128}
    sizes = {"M": 64, "X": 96, "Y": 64, "E_PAD": 256, "M_PAD": 64, "R_PAD": 32, "X_PAD": 128, "Y_PAD": 64}
    sizes |= {"P_PAD": 512, "CHUNK": 64, "WAYS": 16}
    kernels = [
        (module._count_blocks, [i64, i32, i32, *["i32"] * 3], block | {"BINS": 512}),
        (module._solve, [i32, *[i64] * 3, *[f64] * 8, *[i64] * 3, *["i32"] * 5], sizes),
        (
            module._map_choices,
            [i64, i32, i32, i64, i64, i32, i32, i32, *["i32"] * 4],
            block | {"STEPS": 10},
        ),
    ]
    for kernel, types, constants in kernels:
        names = kernel.arg_names
        kinds = iter(types)
        signature = {name: "constexpr" if name in constants else next(kinds) for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        print(f"{kernel.__name__}: {len(compiled.asm['cubin'])} bytes")


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
        interpret()
    else:
        compile_all()
