"""Which of MC2's operators a machine has, and which arguments they want there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from worker_agent.moe.operators import Operators

_A3_CHIPS = range(250, 256)
"""What ``torch_npu.npu.get_soc_version`` says of Atlas A3."""


@dataclass(frozen=True)
class MC2Variant:
    """Version and arguments of the fused operators."""

    version: int = 2
    """1 or 2: without or with ``_v2``."""

    a3: bool = True
    """Whether to name a tensor-parallel group, as A3 demands; together with version 2 a mask is understood as well."""

    hierarchical: bool = False
    """Whether nodes talk in two levels, as A2 can: the weights then travel with the tokens."""

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            raise ValueError(f"MC2 has versions 1 and 2, got {self.version}")

    @property
    def masks(self) -> bool:
        """Whether choices that are not real can be masked; otherwise they must go somewhere."""
        return self.a3 and self.version == 2

    @classmethod
    def of(cls, operators: Operators, device: torch.device) -> MC2Variant:
        """What the operators and the machine of ``device`` offer."""
        version = 2 if hasattr(operators, "npu_moe_distribute_dispatch_v2") else 1
        if device.type != "npu":
            return cls(version)
        import torch_npu

        a3 = torch_npu.npu.get_soc_version() in _A3_CHIPS
        two_levels = os.environ.get("HCCL_INTRA_PCIE_ENABLE"), os.environ.get("HCCL_INTRA_ROCE_ENABLE")
        return cls(version, a3, hierarchical=not a3 and two_levels == ("1", "0"))
