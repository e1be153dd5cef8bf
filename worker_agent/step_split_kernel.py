"""Triton kernels for the per-step split on ranks that see the same choices: three launches instead of over a hundred.

1. ``_count_blocks`` counts the choices of each expert in each block of choices.
2. ``_solve`` runs as one program. It turns the per-block counts into sums over earlier blocks, runs all rounds, tries
   all roundings, and writes the end of each slot's tokens.
3. ``_map_choices`` numbers the choices in expert order, using prefix counts instead of a sort, and finds each choice's
   slot.

All sums are exact in float64 (see ``stepwise``), so the result is bitwise equal to ``StepwiseSplit.split``, regardless
of the order of summation. ``StepSplit`` compares the two on the device before it uses the kernels.

Memory is accessed as follows. Two of the kernels read the choices, one block per program, and one writes them; repeated
loads of a block hit the cache. The per-block counts, ``[B, E]`` in int32, are written twice and read twice. The
placement's matrices are read once, except for the round matrix, ``[M, 2M]``, which is read in every round, and the
rounding matrices, which are read 16 times. At 64 replica slots, the round matrix occupies 64 KiB, which fits into the
L1 cache of an H100.

The kernels have only run in Triton's interpreter. Their speed has not been measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from worker_agent.stepwise import StepwiseSplit, rounds_for
from worker_agent.stepwise_tables import PENALTIES, ROUNDINGS

if TYPE_CHECKING:
    triton: Any = None
    tl: Any = None
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

_BLOCK = 128
"""Number of choices that one program counts and maps."""
_MAX_REPLICA_SLOTS = 128
"""Maximum number of replica slots for which one program can multiply the matrices."""
_MAX_EXPERTS = 1024
_EXPERTS_AT_ONCE = 64
"""Number of experts whose counts the second kernel reads together."""


def _jit(function: Any) -> Any:
    return function if triton is None else triton.jit(function)


@_jit
def _rounded(x):  # type: ignore[no-untyped-def] # Triton's kernels have no Python types
    """Round to the nearest whole number, halves to even, as ``torch.round`` does, for magnitudes below 2**51."""
    return (x + 6755399441055744.0) - 6755399441055744.0


@_jit
def _product(  # type: ignore[no-untyped-def]
    matrix, row_R, column_C, rows, columns, stride, vector_C
):
    """Return the product of a row-major matrix and a vector, padded with zeros."""
    cell_RC = row_R[:, None] * stride + column_C[None, :]
    inside_RC = (row_R[:, None] < rows) & (column_C[None, :] < columns)
    matrix_RC = tl.load(matrix + cell_RC, mask=inside_RC, other=0.0)
    return tl.sum(matrix_RC * vector_C[None, :], axis=1)


@_jit
def _product_by_rows(  # type: ignore[no-untyped-def]
    matrix, row_R, column_C, rows, columns, vector_R
):
    """Return the product of a vector and a row-major matrix, padded with zeros."""
    cell_RC = row_R[:, None] * columns + column_C[None, :]
    inside_RC = (row_R[:, None] < rows) & (column_C[None, :] < columns)
    matrix_RC = tl.load(matrix + cell_RC, mask=inside_RC, other=0.0)
    return tl.sum(matrix_RC * vector_R[:, None], axis=0)


@_jit
def _expert_of(  # type: ignore[no-untyped-def]
    ids, real_rows, choice_B, choices, per_row, experts, HAS_REAL_ROWS: tl.constexpr
):
    """Return each choice's expert, or E for choices that the split does not count."""
    id_B = tl.load(ids + choice_B, mask=choice_B < choices, other=-1).to(tl.int32)
    counted_B = (id_B >= 0) & (id_B < experts)
    if HAS_REAL_ROWS:
        counted_B = counted_B & (choice_B // per_row < tl.load(real_rows))
    return tl.where(counted_B, id_B, experts)


@_jit
def _count_blocks(  # type: ignore[no-untyped-def]
    ids,
    real_rows,
    counts_BE,
    choices,
    per_row,
    experts,
    HAS_REAL_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Count the choices of each expert in one block, int32 ``[B, E]``."""
    block = tl.program_id(0)
    choice_B = block * BLOCK + tl.arange(0, BLOCK)
    expert_B = _expert_of(ids, real_rows, choice_B, choices, per_row, experts, HAS_REAL_ROWS)
    bin_E = tl.arange(0, BINS)
    tl.store(counts_BE + block * experts + bin_E, tl.histogram(expert_B, BINS), mask=bin_E < experts)


@_jit
def _solve(  # type: ignore[no-untyped-def]
    counts_BE,
    counts_E,
    before_E,
    ends_P,
    totals_YE,
    from_totals,
    rounds_CM2,
    exact_X2,
    by_sum_XM,
    bound_MR,
    later_MM,
    dither_WX,
    expert_P,
    expert_M,
    position_M,
    blocks,
    experts,
    ranks,
    physical,
    rounds,
    M: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    E_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    X_PAD: tl.constexpr,
    Y_PAD: tl.constexpr,
    P_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Compute the end of each slot's tokens, and turn the per-block counts into sums over earlier blocks."""
    m_M = tl.arange(0, M_PAD)
    r_R = tl.arange(0, R_PAD)
    x_X = tl.arange(0, X_PAD)
    y_Y = tl.arange(0, Y_PAD)
    total_Y = tl.zeros((Y_PAD,), dtype=tl.float64)
    for first in range(0, experts, CHUNK):
        e_C = first + tl.arange(0, CHUNK)
        earlier_C = tl.zeros((CHUNK,), dtype=tl.int32)
        for block in range(0, blocks):
            cell_C = counts_BE + block * experts + e_C
            count_C = tl.load(cell_C, mask=e_C < experts, other=0)
            tl.store(cell_C, earlier_C, mask=e_C < experts)
            earlier_C += count_C
        tl.store(counts_E + e_C, earlier_C.to(tl.int64), mask=e_C < experts)
        total_Y += _product(totals_YE, y_Y, e_C, Y, experts, experts, earlier_C.to(tl.float64))

    start0_M = _product(from_totals, m_M, y_Y, M, Y, Y, total_Y)
    start1_M = _product(from_totals + M * Y, m_M, y_Y, M, Y, Y, total_Y)
    constant_X = _product(from_totals + 2 * M * Y, x_X, y_Y, X, Y, Y, total_Y)
    base_M = _product(from_totals + (2 * M + X) * Y, m_M, y_Y, M, Y, Y, total_Y)
    first_R = _product(from_totals + (3 * M + X) * Y, r_R, y_Y, ranks, Y, Y, total_Y)

    state_M = _rounded(start0_M)
    previous = 0
    for number in range(1, rounds + 1):
        level = number * 2 // (rounds + 1)
        kind = 2 * level - tl.where(level > previous, 1, 0)
        matrix = rounds_CM2 + kind * (M * 2 * M)
        next_M = _product(matrix, m_M, m_M, M, M, 2 * M, tl.abs(state_M))
        next_M += _product(matrix + M, m_M, m_M, M, M, 2 * M, state_M)
        state_M = _rounded(next_M + tl.where(level == 0, start0_M, start1_M))
        previous = level

    exact_X = constant_X + _product(exact_X2, x_X, m_M, X, M, 2 * M, tl.abs(state_M))
    exact_X += _product(exact_X2 + M, x_X, m_M, X, M, 2 * M, state_M)
    best_M = tl.zeros((M_PAD,), dtype=tl.float64)
    best_peak = tl.full((), float("inf"), tl.float64)
    for way in range(0, WAYS):
        dither_X = tl.load(dither_WX + way * X + x_X, mask=x_X < X, other=0.0)
        whole_X = tl.floor(exact_X + dither_X)
        slots_M = tl.maximum(base_M + _product_by_rows(by_sum_XM, x_X, m_M, X, M, whole_X), 0.0)
        bound_R = first_R + _product_by_rows(bound_MR, m_M, r_R, M, ranks, slots_M)
        peak = tl.max(tl.where(r_R < ranks, bound_R, float("-inf")), axis=0)
        best_M = tl.where(peak < best_peak, slots_M, best_M)
        best_peak = tl.minimum(peak, best_peak)
    later_M = _product(later_MM, m_M, m_M, M, M, M, best_M).to(tl.int64)

    # Other threads of this program wrote the counts.
    tl.debug_barrier()
    e_E = tl.arange(0, E_PAD)
    count_E = tl.load(counts_E + e_E, mask=e_E < experts, other=0)
    tl.store(before_E + e_E, tl.cumsum(count_E, axis=0) - count_E, mask=e_E < experts)
    tl.debug_barrier()
    p_P = tl.arange(0, P_PAD)
    e_P = tl.load(expert_P + p_P, mask=p_P < physical, other=0)
    end_P = tl.load(before_E + e_P) + tl.load(counts_E + e_P)
    tl.store(ends_P + p_P, end_P, mask=p_P < physical)
    tl.debug_barrier()
    e_M = tl.load(expert_M + m_M, mask=m_M < M, other=0)
    later_M = tl.minimum(later_M, tl.load(counts_E + e_M))
    p_M = tl.load(position_M + m_M, mask=m_M < M, other=0)
    tl.atomic_add(ends_P + p_M, -later_M, mask=m_M < M)


@_jit
def _map_choices(  # type: ignore[no-untyped-def]
    ids,
    real_rows,
    earlier_BE,
    before_E,
    ends_P,
    physical_P1,
    first_E,
    out,
    choices,
    per_row,
    experts,
    physical,
    HAS_REAL_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write the physical expert of each choice in one block."""
    block = tl.program_id(0)
    choice_B = block * BLOCK + tl.arange(0, BLOCK)
    expert_B = _expert_of(ids, real_rows, choice_B, choices, per_row, experts, HAS_REAL_ROWS)
    other_B = block * BLOCK + tl.arange(0, BLOCK)
    expert_O = _expert_of(ids, real_rows, other_B, choices, per_row, experts, HAS_REAL_ROWS)
    is_earlier_BO = (expert_O[None, :] == expert_B[:, None]) & (other_B[None, :] < choice_B[:, None])
    counted_B = expert_B < experts
    safe_B = tl.where(counted_B, expert_B, 0)
    number_B = tl.sum(is_earlier_BO.to(tl.int32), axis=1)
    number_B += tl.load(earlier_BE + block * experts + safe_B)
    number_B = number_B.to(tl.int64) + tl.load(before_E + safe_B)
    # Find the first slot whose end is greater than the number.
    low_B = tl.zeros((BLOCK,), dtype=tl.int32)
    high_B = low_B + physical
    for _ in range(STEPS):
        middle_B = (low_B + high_B) // 2
        end_B = tl.load(ends_P + tl.minimum(middle_B, physical - 1))
        goes_up_B = (low_B < high_B) & (end_B <= number_B)
        high_B = tl.where((low_B < high_B) & (end_B > number_B), middle_B, high_B)
        low_B = tl.where(goes_up_B, middle_B + 1, low_B)
    slot_B = tl.load(physical_P1 + low_B)
    id_B = tl.load(ids + choice_B, mask=choice_B < choices, other=-1).to(tl.int32)
    is_expert_B = (id_B >= 0) & (id_B < experts)
    first_B = tl.load(first_E + tl.where(is_expert_B, id_B, 0))
    chosen_B = tl.where(counted_B, slot_B, tl.where(is_expert_B, first_B, -1))
    tl.store(out + choice_B, chosen_B, mask=choice_B < choices)


class SplitKernels:
    """The kernels for one layer, which read the tensors of its ``StepwiseSplit``.

    Parameters
    ----------
    split
        The layer's split.
    experts
        E, the number of logical experts.
    first_E
        Lowest physical expert of each expert, int32.
    """

    def __init__(self, split: StepwiseSplit, experts: int, first_E: torch.Tensor) -> None:
        self._split = split
        self._experts = experts
        self._first_E = first_E

    @staticmethod
    def reason_against(split: StepwiseSplit, experts: int) -> str | None:
        """Return the reason why the kernels cannot replace the PyTorch operators; ``None`` if they can."""
        if triton is None:
            return "Triton is not installed"
        replica_slots = split.later_MM.shape[0]
        if replica_slots > _MAX_REPLICA_SLOTS or experts > _MAX_EXPERTS:
            return f"{replica_slots} replica slots of {experts} experts are too many for one program"
        return None

    def physical(self, ids_TK: torch.Tensor, real_rows: torch.Tensor | None) -> torch.Tensor:
        """Return the physical expert of each choice, int32 ``[T, K]``, as ``StepSplit.physical`` does.

        Parameters
        ----------
        ids_TK, real_rows
            See ``StepSplit.physical``.
        """
        split = self._split
        device = ids_TK.device
        ids_TK = ids_TK.contiguous()
        choices = ids_TK.numel()
        experts = self._experts
        blocks = triton.cdiv(choices, _BLOCK)
        rows = (ids_TK if real_rows is None else real_rows, choices, ids_TK.shape[1], experts)
        has_rows = real_rows is not None
        counts_BE = torch.empty((blocks, experts), dtype=torch.int32, device=device)
        sums_2E = torch.empty((2, experts), dtype=torch.int64, device=device)
        ends_P = torch.empty(split.expert_P.shape[0], dtype=torch.int64, device=device)
        out_TK = torch.empty(ids_TK.shape, dtype=torch.int32, device=device)
        grid = (blocks,)
        bins = triton.next_power_of_2(experts + 1)
        _count_blocks[grid](
            ids_TK, rows[0], counts_BE, *rows[1:], HAS_REAL_ROWS=has_rows, BLOCK=_BLOCK, BINS=bins
        )
        self._launch_solve(counts_BE, sums_2E, ends_P, choices)
        physical = ends_P.shape[0]
        _map_choices[grid](
            ids_TK,
            rows[0],
            counts_BE,
            sums_2E[1],
            ends_P,
            split.physical_P1,
            self._first_E,
            out_TK,
            *rows[1:],
            physical,
            HAS_REAL_ROWS=has_rows,
            BLOCK=_BLOCK,
            STEPS=physical.bit_length() + 1,
        )
        return out_TK

    def _launch_solve(
        self, counts_BE: torch.Tensor, sums_2E: torch.Tensor, ends_P: torch.Tensor, choices: int
    ) -> None:
        assert len(PENALTIES) == 2, "the kernel supports exactly two penalties"
        split = self._split
        replica_slots, ranks = split.bound_MR.shape
        sums, totals = split.by_sum_XM.shape[0], split.totals_YE.shape[0]
        physical = ends_P.shape[0]
        padded = {
            "E_PAD": self._experts,
            "M_PAD": replica_slots,
            "R_PAD": ranks,
            "X_PAD": sums,
            "Y_PAD": totals,
            "P_PAD": physical,
        }
        _solve[(1,)](
            counts_BE,
            sums_2E[0],
            sums_2E[1],
            ends_P,
            split.totals_YE,
            split.from_totals,
            split.rounds_CM2,
            split.exact_X2,
            split.by_sum_XM,
            split.bound_MR,
            split.later_MM,
            split._dither_WX,
            split.expert_P,
            split.expert_M,
            split.position_M,
            counts_BE.shape[0],
            self._experts,
            ranks,
            physical,
            rounds_for(choices) if split._rounds is None else split._rounds,
            M=replica_slots,
            X=sums,
            Y=totals,
            **{name: triton.next_power_of_2(size) for name, size in padded.items()},
            CHUNK=_EXPERTS_AT_ONCE,
            WAYS=ROUNDINGS,
            num_warps=8,
        )
