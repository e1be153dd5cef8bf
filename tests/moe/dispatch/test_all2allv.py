"""What has been sent must not be kept while the experts run."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from tests.moe.cases import Case
from tests.moe.simulated import run_simulated
from worker_agent.moe import ExpertParallelMoE, MicroBatch, seeded_experts
from worker_agent.moe.experts import GroupedExperts
from worker_agent.moe.rank_group import Arriving, RankGroup


@pytest.mark.parametrize("two", [False, True])
def test_sent_and_arrived_rows_are_released_before_the_experts_run(
    two: bool, monkeypatch: pytest.MonkeyPatch
):
    case = Case("all2allv", experts=6, slots=3, top_k=2, tokens=(5, 4))
    alive_at_run: list[int] = []

    def one_step(group: RankGroup) -> None:
        travelled: list[weakref.ref[torch.Tensor]] = []
        start = group.start_all_to_all

        def recorded(rows_NX: torch.Tensor, sent: list[int], received: list[int]) -> Arriving:
            arriving = start(rows_NX, sent, received)
            if rows_NX.dtype == torch.uint8:
                travelled.extend([weakref.ref(rows_NX), weakref.ref(arriving._rows_MX)])
            return arriving

        monkeypatch.setattr(group, "start_all_to_all", recorded)
        layer = ExpertParallelMoE(
            case.shape,
            case.placement().astype(np.int32),
            seeded_experts(case.shape),
            log2phy_E=case.tables()[group.rank],
            ep_group=group,
        )
        experts = layer._paths["all2allv"].kernel._experts
        run = experts.run

        def watched(*args: object) -> torch.Tensor:
            alive_at_run.append(sum(rows() is not None for rows in travelled))
            return run(*args)  # type: ignore[arg-type]

        assert isinstance(experts, GroupedExperts)
        monkeypatch.setattr(experts, "run", watched)
        batches = [MicroBatch(*case.step(group.rank, step)) for step in range(2)]
        if two:
            layer.forward_two(batches[0], batches[1])
        else:
            layer(*case.step(group.rank))

    run_simulated(2, one_step)
    # Of two micro-batches the second is on its way, sent and arrived, while the experts work on the first.
    assert sorted(alive_at_run) == ([0, 0, 2, 2] if two else [0, 0])
