"""Where ranks' partial sums are added up, they travel in the model's own dtype: float32 would double the bytes."""

from __future__ import annotations

import pytest
import torch

from tests.moe.cases import Case
from tests.moe.simulated import run_simulated
from worker_agent.moe import ExpertParallelMoE, seeded_experts
from worker_agent.moe.rank_group import RankGroup


@pytest.mark.parametrize("dispatcher", ["allgather", "moge"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_partial_sums_travel_in_the_models_dtype(
    dispatcher: str, quantized: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(dispatcher, experts=6, slots=3, top_k=2, tokens=(5, 4), dtype=dtype)
    travelled: list[torch.dtype] = []

    def one_step(group: RankGroup) -> None:
        scatter = group.reduce_scatter

        def recorded(partial_NH: torch.Tensor) -> torch.Tensor:
            travelled.append(partial_NH.dtype)
            return scatter(partial_NH)

        monkeypatch.setattr(group, "reduce_scatter", recorded)
        layer = ExpertParallelMoE(
            case.shape,
            case.placement(),
            seeded_experts(case.shape),
            log2phy_E=case.tables()[group.rank],
            dispatcher=dispatcher,
            ep_group=group,
            quantized=quantized,
            dtype=dtype,
        )
        assert layer(*case.step(group.rank)).dtype == dtype

    run_simulated(2, one_step)
    assert travelled == [dtype, dtype]
