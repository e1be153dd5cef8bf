"""Why advice is what it is, in sentences for an operator: by balance, by time, by memory, by what splitting takes."""

from __future__ import annotations

from collections.abc import Sequence

from eplb_service.replay.advice_options import SAME_TIME, Option
from eplb_service.replay.result import Replay
from eplb_service.replay.runner import UNSPLIT

_WORTH_IT = 0.03
"""Peak-to-average ratio that balancing must win to be worth running."""
_FEW_EXPERTS = 2
"""Experts per rank at which there is next to nothing to exchange."""


def judged(
    replay: Replay, left_alone: float, par: float, floor: float, chosen: Option, choices_per_step: float
) -> tuple[bool, list[str]]:
    """Whether balancing pays by the peak-to-average ratio and the stated times, and why.

    Parameters
    ----------
    replay
        In which ``chosen`` was tried.
    left_alone, par, floor
        The ratio without redundancy and balancing, as chosen, and by sampling alone.
    chosen
        The setting that is judged.
    choices_per_step
        Tokens over all experts of a layer in a step.
    """
    won, avoidable = left_alone - par, left_alone - floor
    per_rank = choices_per_step / replay.ranks
    reasons = [f"PAR goes from {left_alone:.3f} to {par:.3f}; token sampling alone leaves about {floor:.3f}."]
    pays = won >= _WORTH_IT
    if avoidable < _WORTH_IT:
        reasons.append("The ranks are already as even as token sampling lets them be.")
    elif not pays:
        reasons.append(
            "The heat moves faster than placements can follow: what is fitted on a window does not last."
        )
    if floor - 1 > 0.5 * (left_alone - 1):
        reasons.append(
            f"A rank gets only {per_rank:.0f} tokens per layer and step: chance makes most of the imbalance, and no "
            "placement helps against it. Larger batches would."
        )
    if replay.experts / replay.ranks <= _FEW_EXPERTS:
        reasons.append(
            f"A rank has only {replay.experts / replay.ranks:g} of the model's experts: there is little to exchange, "
            "only redundancy helps."
        )
    if replay.costs.step_ms and chosen.net_ms <= 0:
        pays = False
        reasons.append(f"Switching costs as much as balance wins: {chosen.net_ms:.3f} ms of a step, net.")
    elif replay.costs.step_ms:
        reasons.append(
            f"That is {chosen.net_ms:.2f} ms of a step of {replay.costs.step_ms:g} ms, net of switching."
        )
    return pays, reasons


def judged_in_time(left_alone_ms: float, chosen: Option, stall_ms: float) -> tuple[bool, str]:
    """Whether balancing pays by the cost curve, and why; ``stall_ms`` is what switches take of a step."""
    assert chosen.moe_ms is not None
    pays = chosen.net_ms > SAME_TIME * left_alone_ms
    return pays, (
        f"The slowest ranks of all layers take {chosen.moe_ms:.3f} ms of a step, left alone {left_alone_ms:.3f} ms; "
        f"switching costs {stall_ms:.3f} ms of it: {chosen.net_ms:+.3f} ms ({chosen.net_ms / left_alone_ms:+.1%}), net."
    )


def reasons_of_split(replay: Replay, chosen: Option) -> list[str]:
    """Whether the stepwise split pays in the setting advised; nothing where steps are not split."""
    cost = replay.costs.split
    unsplit = [
        policy
        for policy in replay.policies
        if policy.label.startswith(UNSPLIT) and policy.setup == chosen.setup
    ]
    if cost is None or not unsplit or unsplit[0].moe_ms is None or chosen.moe_ms is None:
        return []
    won = unsplit[0].moe_ms - chosen.moe_ms
    return [
        f"Of that the stepwise split itself takes {cost.ms_of_step(replay.layers):.3f} ms. By tables, without it, "
        f"{unsplit[0].moe_ms:.3f} ms: the split {'pays' if won > 0 else 'does not pay'} ({won:+.3f} ms)."
    ]


def reasons_of_memory(replay: Replay, options: Sequence[Option], chosen: Option) -> list[str]:
    """What the slots advised take of memory, and what more of them would win for what they take."""

    def memory(option: Option) -> str:
        more = option.setup.slots * replay.ranks / replay.experts - 1
        known = f" ({option.bytes_per_rank / 2**30:.2f} GiB per rank)" if option.bytes_per_rank else ""
        return f"{more:.0%} more memory for experts than without any{known}"

    redundant = chosen.setup.slots * replay.ranks - replay.experts
    said = [f"{redundant} redundant experts take {memory(chosen)}."] if redundant else []
    best = min(options, key=lambda option: option.par)
    if best.setup.slots > chosen.setup.slots:
        more = best.setup.slots * replay.ranks - replay.experts
        in_ms = f", {best.net_ms - chosen.net_ms:.2f} ms" if replay.costs.step_ms else ""
        said.append(f"{more} would win another {chosen.par - best.par:.3f}{in_ms}, and take {memory(best)}.")
    return said
