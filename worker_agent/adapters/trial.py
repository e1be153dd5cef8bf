"""Startup checks that experts still compute the same outputs after changing slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.device import bytes_of
from worker_agent.live_layer import ExpertWeights, LiveLayer
from worker_agent.swap.staging import Staging, copy_into

Compute: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""The expert computation of one layer on local tokens.

It takes the local slot of each token, int64 ``[T]``, and returns the tokens' outputs, ``[T, H]``. Token ``t`` has the
same input in all calls with the same number of tokens.
"""

_TOKENS_PER_SLOT = 2
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Maximum difference in an output, by data type, as a fraction of the output's largest absolute value."""
_SHORT_TYPE_TOLERANCE = 2e-2
"""Tolerance for lower-precision types, such as bfloat16."""


@torch.no_grad()
def move_and_back(layer: LiveLayer) -> None:
    """Exchange the experts of two slots as a commit would, exchange them back, and compare all bytes.

    Raises ``UnsupportedEngineError`` if a tensor does not retain the bytes written to it, or if the expert tensors are
    empty.
    """
    weights = layer.expert_weights()
    tables = (layer.expert_map.cpu(), layer.log2phy.cpu())
    if not any(slot.numel() for weight in weights for slot in weight):
        raise UnsupportedEngineError(
            "MoE layers whose expert tensors are empty",
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
            if not all(torch.equal(bytes_of(expected), bytes_of(actual)) for expected, actual in pairs):
                raise UnsupportedEngineError(
                    f"MoE layers in which tensor {kind} of an expert does not retain the bytes written to it",
                    "The experts share memory, or are not stored as separate tensors",
                    "Report this model and its quantisation",
                )


@torch.no_grad()
def exchange_and_compare(layer: LiveLayer, compute: Compute, name: str) -> str | None:
    """Exchange the layer's experts between its slots, compare outputs for the same tokens, and undo the exchange.

    This detects values that a kernel keeps in its own memory, which ``refuse_unmoved`` cannot find.

    Parameters
    ----------
    layer
        Layer to test.
    compute
        Its expert computation.
    name
        Name of the layer, for messages.

    Returns
    -------
    str or None
        ``None`` if the layer passed or has a single slot. If ``compute`` raised an exception, its message; the layer
        then remains untested.

    Raises
    ------
    UnsupportedEngineError
        If an output depends on the expert's slot.
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
    differs_T = _differs(before_TH, again_TH, after_TH)
    if differs_T.any():
        experts = sorted(set(slot_T[differs_T.cpu()].tolist()))
        slot_list = ", ".join(map(str, experts[:8]))
        raise UnsupportedEngineError(
            f"{name}, whose experts in slots {slot_list} compute different outputs in other slots",
            "Some values of these experts stay behind when the experts move",
            "Report this model and its quantisation",
        )
    return None


def _differs(before_TH: torch.Tensor, again_TH: torch.Tensor, after_TH: torch.Tensor) -> torch.Tensor:
    """Return a mask of the tokens whose outputs differ after the exchange, bool ``[T]``.

    A difference counts if it exceeds the rounding tolerance plus four times the difference between two runs before the
    exchange.
    """
    tolerance = _TOLERANCES.get(before_TH.dtype, _SHORT_TYPE_TOLERANCE)
    tokens = len(before_TH)
    first_TX, second_TX, moved_TX = (
        output.reshape(tokens, -1).to(torch.float32) for output in (before_TH, again_TH, after_TH)
    )
    allowed_T = 4 * (second_TX - first_TX).abs().amax(dim=1) + tolerance * first_TX.abs().amax(dim=1)
    difference_T = (moved_TX - first_TX).abs().amax(dim=1)
    # Dummy weights may produce non-finite outputs, which prove nothing.
    return (difference_T > allowed_T) & first_TX.isfinite().all(dim=1)


@torch.inference_mode()
def _exchange(weights: Sequence[ExpertWeights], slots: int) -> None:
    """Exchange slot ``s`` with slot ``S - 1 - s``, in place and bit for bit. A second call undoes the first."""
    (staged,) = Staging().reserve([weights], [2])
    for low in range(slots // 2):
        pair = (low, slots - 1 - low)
        for weight, buffer in zip(weights, staged, strict=True):
            for row, slot in enumerate(pair):
                buffer[row].copy_(weight[slot])
        # Tensors may be views of the same memory, so read all of them before writing any.
        for weight, buffer in zip(weights, staged, strict=True):
            for row, slot in enumerate(reversed(pair)):
                weight[slot].copy_(buffer[row])
