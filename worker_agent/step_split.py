"""Per-step split inside an engine. Each pass divides experts' tokens over their replicas according to its own counts.

All ranks must compute the same split. They do if they all see the same choices in a pass, or if they exchange their
counts in every layer. The counts of an earlier pass are never used, because they give a worse balance than fixed
shares.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from eplb_core.placement import Int32
from worker_agent.device import on_host
from worker_agent.step_split_kernel import SplitKernels
from worker_agent.stepwise import Gatherer, StepwiseSplit

_log = logging.getLogger("eplb.agent")

KERNEL_DEVICES = ["cuda"]
"""Types of devices on which the Triton kernels may compute the split."""

StepSplitSetting: TypeAlias = "str | int"
"""``auto``, ``on``, ``off``, or the minimum number of tokens in a pass for the pass to be split."""

_PROBED_ROWS = 64


def is_requested(setting: StepSplitSetting) -> bool:
    """Return True if the setting may turn the split on. Otherwise, adapters do not touch the engine's routing.

    ``auto`` never turns the split on, because the fitted costs say that the split does not pay on any known device
    (``docs/step_split.md``).

    Examples
    --------
    >>> [is_requested(setting) for setting in ("auto", "on", "off", 4096)]
    [False, True, False, True]
    """
    return setting not in ("auto", "off")


@dataclass(frozen=True)
class SplitChoice:
    """Decision on whether an engine uses the step split.

    Parameters
    ----------
    least_tokens
        Minimum number of tokens in a pass for the pass to be split; ``None`` if no pass is split.
    exchanges
        True if the ranks exchange their counts, because they see different tokens.
    reason
        Reason for the log.
    """

    least_tokens: int | None
    exchanges: bool
    reason: str

    @property
    def is_on(self) -> bool:
        """True if some passes are split."""
        return self.least_tokens is not None

    @property
    def whole(self) -> bool:
        """True if all passes are split, so that the planner may place experts for this split."""
        return self.least_tokens == 1

    def __str__(self) -> str:
        if self.least_tokens is None:
            return f"step split: off; {self.reason}"
        passes = "all passes" if self.whole else f"passes of at least {self.least_tokens} tokens"
        return f"step split: on for {passes}; {self.reason}"


def choose_split(
    setting: StepSplitSetting,
    *,
    sees_all: bool,
    device_type: str,
    obstacle: str | None = None,
    no_exchange: str | None = None,
) -> SplitChoice:
    """Decide if an engine uses the step split. The result is the same on all ranks if the arguments are.

    Parameters
    ----------
    setting
        The setting ``step_split``.
    sees_all
        True if all ranks see the choices of all tokens of a pass.
    device_type
        Type of the model's device.
    obstacle
        Reason why this engine cannot use the step split at all.
    no_exchange
        Reason why the engine's ranks cannot exchange counts; ``None`` if they can.

    Examples
    --------
    >>> print(choose_split(512, sees_all=True, device_type="cuda"))
    step split: on for passes of at least 512 tokens; EPLB_AGENT_STEP_SPLIT=512
    >>> print(choose_split("on", sees_all=False, device_type="npu"))
    step split: off; it needs float64 matrix products, which NPUs do not support
    """
    if setting == "off":
        return _off("EPLB_AGENT_STEP_SPLIT=off")
    if not is_requested(setting):
        return _off(
            "auto: according to the fitted costs, the split does not pay. It takes about 180 us per layer per pass on "
            "an H100, and saves 3 us at 4,096 tokens and 56 us at 16,384 on an H200. If a layer's experts take "
            "milliseconds, set EPLB_AGENT_STEP_SPLIT to on or to the minimum number of tokens for which it pays"
        )
    if device_type == "npu":
        return _off("it needs float64 matrix products, which NPUs do not support")
    if obstacle is not None:
        return _off(obstacle)
    stated = f"EPLB_AGENT_STEP_SPLIT={setting}"
    if sees_all:
        return SplitChoice(1 if setting == "on" else int(setting), False, stated)
    if no_exchange is not None:
        return _off(no_exchange)
    if setting != "on":
        return _off(
            "the ranks see different numbers of tokens, so no minimum can be set; set EPLB_AGENT_STEP_SPLIT=on"
        )
    return SplitChoice(1, True, f"{stated}; ranks exchange their counts in every layer")


def _off(reason: str) -> SplitChoice:
    return SplitChoice(None, False, reason)


class StepSplit:
    """Per-step split of one layer, under the most recently installed placement.

    Parameters
    ----------
    phy2log_RS
        Initial placement, integers ``[R, S]``. An expert may be in several slots of a rank.
    experts
        E, the number of logical experts.
    device
        Device of the model.
    least_tokens
        Minimum number of tokens in a pass for the pass to be split.
    group
        Ranks that have different tokens; ``None`` if all ranks see the same choices.

    Examples
    --------
    Expert 0 has slots on both ranks. Rank 0 also holds expert 1, and rank 1 holds expert 2. Of five tokens for expert
    0, four for expert 1 and one for expert 2, each rank gets five. The last row is padding:

    >>> split = StepSplit(np.array([[0, 1], [0, 2]]), experts=3, device="cpu")
    >>> ids_TK = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 0])[:, None]
    >>> physical_TK, counted_TK = split.physical(ids_TK, torch.tensor(10))
    >>> physical_TK.flatten().tolist()
    [0, 2, 2, 2, 2, 1, 1, 1, 1, 3, 0]
    >>> int(counted_TK.sum())
    10
    """

    def __init__(
        self,
        phy2log_RS: npt.NDArray[np.integer],
        experts: int,
        device: torch.device | str,
        *,
        least_tokens: int = 1,
        group: Gatherer | None = None,
    ) -> None:
        self._experts = experts
        self._least_tokens = least_tokens
        self._group = group
        placed_RS = phy2log_RS.astype(np.int32)
        self._split = StepwiseSplit(placed_RS, experts, device)
        self._first_E = torch.from_numpy(_first_slots(placed_RS, experts)).to(device)
        self._installed_RS = placed_RS
        self._kernels: SplitKernels | None = None
        if group is None and torch.device(device).type in KERNEL_DEVICES:
            self._kernels = self._working_kernels()

    @property
    def uses_kernels(self) -> bool:
        """True if the Triton kernels compute the split, False if the PyTorch operators do."""
        return self._kernels is not None

    def _working_kernels(self) -> SplitKernels | None:
        """Return kernels that give the same results as the PyTorch operators on this device, or ``None``."""
        reason = SplitKernels.reason_against(self._split, self._experts)
        if reason is None:
            kernels = SplitKernels(self._split, self._experts, self._first_E)
            ids_TK = probe(self._experts).to(self._first_E.device)
            real_rows = torch.tensor(len(ids_TK) - 3, dtype=torch.int32, device=ids_TK.device)
            try:
                if torch.equal(kernels.physical(ids_TK, real_rows), self.physical(ids_TK, real_rows)[0]):
                    return kernels
                reason = "the kernels do not give the same results on this device"
            except Exception as error:  # Triton raises many types of exceptions
                reason = f"{type(error).__name__}: {error}"
        _log.warning(
            "step split: using the PyTorch operators instead of the Triton kernels, because %s", reason
        )
        return None

    def applies(self, tokens: int) -> bool:
        """Return True if a pass of this many tokens, padding included, is split. The host knows this number."""
        return self._group is not None or tokens >= max(self._least_tokens, 1)

    def install(self, phy2log_RS: npt.NDArray[np.integer]) -> None:
        """Switch to a new placement, in place, unless it is the current one. Call this between two passes.

        Parameters
        ----------
        phy2log_RS
            Integers ``[R, S]`` or ``[R*S]``, of the same size as the initial placement.
        """
        placed_RS = phy2log_RS.astype(np.int32).reshape(self._installed_RS.shape)
        if not np.array_equal(placed_RS, self._installed_RS):
            self._installed_RS = placed_RS
            self.write_again()

    def write_again(self) -> None:
        """Write all tensors in place, because a sleeping engine may have discarded device memory."""
        self._split.install(self._installed_RS)
        first_E = torch.from_numpy(_first_slots(self._installed_RS, self._experts))
        self._first_E.copy_(on_host(first_E, self._first_E.device), non_blocking=True)

    def physical(
        self, ids_TK: torch.Tensor, real_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Assign each choice to a physical expert.

        The host does not read back any result, so a graph can capture the call.

        Parameters
        ----------
        ids_TK
            Logical experts. An id outside ``0..E-1`` means that no expert was chosen.
        real_rows
            Number of rows that are not padding, a scalar on the device; ``None`` if all rows are real. It must be equal
            on ranks that see the same choices.

        Returns
        -------
        physical_TK : torch.Tensor
            Physical experts, int32 ``[T, K]``. Padding goes to the first replica of its expert. If no expert was
            chosen, the value is -1.
        counted_TK : torch.Tensor
            Bool ``[T, K]``, True for choices of real rows, which are the only ones that the split counts.
        """
        ids_TK = ids_TK.to(torch.int32)
        is_expert_TK = (ids_TK >= 0) & (ids_TK < self._experts)
        counted_TK = is_expert_TK
        if real_rows is not None:
            row_T1 = torch.arange(ids_TK.shape[0], device=ids_TK.device).unsqueeze(1)
            counted_TK = is_expert_TK & (row_T1 < real_rows)
        if self._kernels is not None and ids_TK.numel():
            return self._kernels.physical(ids_TK, real_rows), counted_TK
        slot_TK = self._split.split(torch.where(counted_TK, ids_TK, -1), self._group)
        first_TK = self._first_E[torch.where(is_expert_TK, ids_TK, 0).long()]
        physical_TK = torch.where(counted_TK, slot_TK, first_TK)
        return torch.where(is_expert_TK, physical_TK, -1), counted_TK


def _first_slots(phy2log_RS: Int32, experts: int) -> Int32:
    """Return the lowest physical expert of each logical expert, int32 ``[E]``."""
    first_E = np.zeros(experts, dtype=np.int32)
    flat_P = phy2log_RS.reshape(-1)
    first_E[flat_P[::-1]] = np.arange(flat_P.size, dtype=np.int32)[::-1]
    return first_E


def probe(experts: int) -> torch.Tensor:
    """Return choices that cover all experts, some more often than others, int32 ``[T, 2]``."""
    row_T1 = torch.arange(max(_PROBED_ROWS, experts)).unsqueeze(1)
    even_TK = row_T1 + torch.arange(2)
    skewed_TK = row_T1 * row_T1 // 3
    return torch.cat([even_TK, skewed_TK + torch.arange(2)]).to(torch.int32) % experts


def ranks_agree(split: StepSplit, experts: int, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of a CPU group split the same choices in the same way (collective over ``group``).

    Call this only if all ranks see the same choices.
    """
    own = split.physical(probe(experts).to(device))[0].cpu().tolist()
    gathered: list[list[list[int]] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return all(other == own for other in gathered)
