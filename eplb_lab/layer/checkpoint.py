"""Loader that copies a checkpoint's expert tensors into the local slots."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from eplb_lab.layer.weights import ExpertTensors

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names that most checkpoints use for an expert's matrices w1, w3 and w2."""


class ExpertLoader:
    """Loads the experts of one layer from a checkpoint's tensors, in any order.

    Tensors are named ``<prefix>.<expert>.<projection>.<suffix>``. The suffix is ``weight`` or ``bias``. W8A8 also has
    ``weight_scale``, with one scale per output row (``[N]`` or ``[N, 1]``), and ``weight_offset``, which must be zero.
    Scales per group or block within a row are rejected, because no layer supports them.

    The checkpoint contains all experts. The loader copies an expert into every local slot that holds it.

    Parameters
    ----------
    tensors
        The layer's tensors.
    experts
        E, the number of logical experts.
    logical_S
        Logical expert of each local slot.
    prefix
        Prefix of the layer's tensor names.
    projections
        Names of the gate, up and down projections.
    tp_rank
        Index of the tensor-parallel rank, which loads its shard: a share of the rows of w1 and w3, and of the columns
        of w2.
    tp_size
        Number of tensor-parallel ranks that share an expert.

    Raises
    ------
    ValueError
        If ``tp_rank`` is not within ``0..tp_size-1``.
    """

    def __init__(
        self,
        tensors: ExpertTensors,
        experts: int,
        logical_S: Iterable[int],
        prefix: str,
        projections: tuple[str, str, str] = PROJECTIONS,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self._label = f"layer {tensors.layer_index}"
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"{self._label}: tp_rank must be 0..{tp_size - 1}, got {tp_rank}")
        self._experts = experts
        self._prefix = prefix
        self._projections = projections
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
            suffix: (getattr(tensors, f"w13_{suffix}"), getattr(tensors, f"w2_{suffix}"))
            for suffix in ("weight", "weight_scale", "bias")
            if getattr(tensors, f"w13_{suffix}") is not None
        }
        self._slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(logical_S):
            self._slots_of.setdefault(expert, []).append(slot)
        self._missing = {
            (expert, projection, suffix)
            for expert in self._slots_of
            for projection in projections
            for suffix in self._tensors
        }

    def load(self, name: str, tensor: torch.Tensor) -> int:
        """Copy one checkpoint tensor into its expert's slots, and return the number of slots.

        Raises ``ValueError`` if ``name`` is not an expert tensor of this layer, or if the tensor has an unsupported
        shape, data type or value.
        """
        try:
            return self._load(name, tensor)
        except ValueError as problem:
            raise ValueError(f"{self._label}: checkpoint tensor {name} {problem}") from None

    def finish(self) -> None:
        """Raise ``ValueError`` if a tensor that this rank needs has not been loaded."""
        if self._missing:
            name = ".".join(map(str, (self._prefix, *min(self._missing))))
            raise ValueError(
                f"{self._label}: checkpoint tensor {name} is missing ({len(self._missing)} in total)"
            )

    def _load(self, name: str, tensor: torch.Tensor) -> int:
        match = re.fullmatch(rf"{re.escape(self._prefix)}\.(\d+)\.([^.]+)\.([^.]+)", name)
        if match is None:
            raise ValueError(
                f"is not an expert tensor; the name must be {self._prefix}.<expert>.<projection>.<suffix>"
            )
        expert = int(match[1])
        projection = match[2]
        suffix = match[3]
        if expert >= self._experts:
            raise ValueError(f"belongs to expert {expert}, but the layer has experts 0..{self._experts - 1}")
        if projection not in self._projections:
            names = ", ".join(self._projections)
            raise ValueError(f"has unknown projection {projection!r}; it must be one of {names}")
        slots = self._slots_of.get(expert, [])
        if suffix == "weight_offset" and "weight_scale" in self._tensors:
            # ModelSlim checkpoints contain offsets, which are zero if tokens are quantised individually.
            if tensor.any():
                raise ValueError("must be zeros, because the layer's quantisation is symmetric")
            return len(slots)
        if suffix not in self._tensors:
            raise ValueError(f"has unknown suffix {suffix!r}; it must be one of {', '.join(self._tensors)}")
        for slot in slots:
            target = self._target(slot, projection, suffix)
            target.copy_(self._fitted(tensor, target, split=int(projection == self._projections[2])))
        self._missing.discard((expert, projection, suffix))
        return len(slots)

    def _target(self, slot: int, projection: str, suffix: str) -> torch.Tensor:
        w13_S, w2_S = self._tensors[suffix]
        if projection == self._projections[2]:
            return w2_S[slot]
        return w13_S[slot].chunk(2)[self._projections.index(projection)]

    def _fitted(self, tensor: torch.Tensor, target: torch.Tensor, split: int) -> torch.Tensor:
        """Return this rank's shard of an expert's tensor, in the shape of ``target``.

        ``split`` is the dimension that is divided among tensor-parallel ranks. A target with fewer dimensions is not
        split.
        """
        # Values of 8 bits or fewer are meaningless without their scales.
        is_wide = tensor.is_floating_point() and tensor.itemsize > 1
        if not (is_wide if target.is_floating_point() else tensor.dtype == target.dtype):
            requirement = (
                "a floating-point dtype of 16 bits or more" if target.is_floating_point() else target.dtype
            )
            raise ValueError(f"must have {requirement}, got {tensor.dtype}")
        expected = list(target.shape)
        if split < target.ndim:
            expected[split] *= self._tp_size
        shape = list(tensor.shape)
        if shape == [*expected, 1]:
            tensor = tensor.squeeze(-1)
        elif shape != expected:
            rows = ", one scale for each output row" if target.ndim == 1 else ""
            raise ValueError(f"must have shape {expected}{rows}, got {shape}")
        if split >= target.ndim:
            return tensor
        return tensor.narrow(split, self._tp_rank * target.shape[split], target.shape[split])
