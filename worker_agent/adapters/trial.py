"""Try at the start whether an engine's experts compute the same after they have changed slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.device import bytes_of
from worker_agent.live_layer import ExpertWeights, LiveLayer
from worker_agent.swap.staging import Staging, copy_into

Compute: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""The expert computation of one layer on local tokens: from a local slot for each token, int64 ``[T]``, to their
outputs ``[T, H]``. Token ``t`` is the same in every call with the same number of tokens."""

_TOKENS_PER_SLOT = 2
_MIN_DIFFERENCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""By type of the outputs, as a share of the largest one; of shorter types ``_OF_SHORT_TYPES``."""
_OF_SHORT_TYPES = 2e-2


@torch.no_grad()
def move_and_back(layer: LiveLayer) -> None:
    """Exchange the experts of two slots as a switch installs them, and back, and compare all bytes.

    Raises ``UnsupportedEngineError`` if a tensor is not as it was written, or if an expert has no bytes at all.
    """
    weights = layer.expert_weights()
    tables = (layer.expert_map.cpu(), layer.log2phy.cpu())
    if not any(slot.numel() for weight in weights for slot in weight):
        raise UnsupportedEngineError(
            "MoE layers whose experts' tensors are empty",
            "The kernel keeps its own copy of the weights",
            "Choose another MoE backend",
        )
    if len(weights[0]) < 2:
        return
    (staged,) = Staging().reserve([weights], [2])
    for buffer, weight in zip(staged, weights, strict=True):
        for slot in range(2):
            buffer[slot].copy_(weight[slot])
    for slots in ([1, 0], [0, 1]):
        copy_into(layer, staged, slots, *tables)
        for kind, (buffer, weight) in enumerate(zip(staged, layer.expert_weights(), strict=True)):
            pairs = [(buffer[row], weight[slot]) for row, slot in enumerate(slots)]
            if not all(torch.equal(bytes_of(sent), bytes_of(there)) for sent, there in pairs):
                raise UnsupportedEngineError(
                    f"MoE layers whose tensor {kind} of an expert is not what was written to it",
                    "Its experts share memory, or are not stored as separate tensors",
                    "Report this model and its quantisation",
                )


@torch.no_grad()
def exchange_and_compare(layer: LiveLayer, compute: Compute, name: str) -> str | None:
    """Exchange the layer's experts between its slots, compare the outputs of the same tokens, and exchange them back.

    This finds values that a kernel keeps in its own memory, which no search finds. Returns ``None``, or the reason why
    the computation cannot run alone, in which case nothing is proved. Raises ``UnsupportedEngineError`` if an output
    follows the slot instead of the expert.
    """
    slots = len(layer.expert_weights()[0])
    if slots < 2:
        return None
    slot_T = torch.arange(slots).repeat(_TOKENS_PER_SLOT)
    try:
        before_TH = compute(slot_T).clone()
        again_TH = compute(slot_T).clone()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    _exchange(layer.expert_weights(), slots)
    try:
        after_TH = compute(slots - 1 - slot_T).clone()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _exchange(layer.expert_weights(), slots)
    differing_T = _differing(before_TH, again_TH, after_TH)
    if differing_T.any():
        experts = sorted(set(slot_T[differing_T.cpu()].tolist()))
        raise UnsupportedEngineError(
            f"{name}, whose experts in slots {', '.join(map(str, experts[:8]))} give other outputs from other slots",
            "A part of them stays behind when they move",
            "Report this model and its quantisation",
        )
    return None


def _differing(before_TH: torch.Tensor, again_TH: torch.Tensor, after_TH: torch.Tensor) -> torch.Tensor:
    """Return the tokens whose output changed by more than a repetition and rounding explain, bool ``[T]``."""
    share = _MIN_DIFFERENCE.get(before_TH.dtype, _OF_SHORT_TYPES)
    tokens = len(before_TH)
    first_TX, second_TX, moved_TX = (
        one.reshape(tokens, -1).to(torch.float32) for one in (before_TH, again_TH, after_TH)
    )
    allowed_T = 4 * (second_TX - first_TX).abs().amax(dim=1) + share * first_TX.abs().amax(dim=1)
    apart_T = (moved_TX - first_TX).abs().amax(dim=1)
    # Weights that are not numbers, as dummy weights may be, prove nothing.
    return (apart_T > allowed_T) & first_TX.isfinite().all(dim=1)


@torch.inference_mode()
def _exchange(weights: Sequence[ExpertWeights], slots: int) -> None:
    """Exchange slot ``s`` with slot ``S - 1 - s``, in place and bit by bit; done twice it is undone."""
    (staged,) = Staging().reserve([weights], [2])
    for low in range(slots // 2):
        pair = (low, slots - 1 - low)
        for weight, buffer in zip(weights, staged, strict=True):
            for row, slot in enumerate(pair):
                buffer[row].copy_(weight[slot])
        # Some tensors may be two views of the same memory: all are read before one is written.
        for weight, buffer in zip(weights, staged, strict=True):
            for row, slot in enumerate(reversed(pair)):
                weight[slot].copy_(buffer[row])
