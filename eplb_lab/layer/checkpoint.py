"""Loads a checkpoint's expert tensors, named by logical expert, into every local slot that holds the expert."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from eplb_lab.layer.weights import ExpertTensors

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's matrices w1, w3 and w2 in most checkpoints."""


class ExpertLoader:
    """Fills one layer's ``tensors`` from a checkpoint's, in whatever order they come.

    These are named ``<prefix>.<expert>.<projection>.<suffix>``; the suffix is ``weight`` or ``bias``, and in W8A8
    ``weight_scale``, one for each output row (``[N]`` or ``[N, 1]``), and ``weight_offset``, which must be zeros. Other
    scales, by group or block of a row, are refused: nothing here computes with them.

    The checkpoint has all ``experts``, of which this rank takes those in its slots, ``logical_S``, and of each the part
    of ``tp_rank`` where experts are split further: rows of w1 and w3, columns of w2. Raises ``ValueError`` where there
    is no such rank.
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
        self._where = f"layer {tensors.layer_index}"
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"{self._where}: there is no tensor-parallel rank {tp_rank} among {tp_size}")
        self._experts, self._prefix, self._projections = experts, prefix, projections
        self._tp_rank, self._tp_size = tp_rank, tp_size
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
        """Copy one checkpoint tensor to where it belongs; return how many slots took it (0: not held here).

        Raises ``ValueError`` naming layer, tensor and what was expected where the name is no expert tensor of
        this layer, or the tensor does not fit.
        """
        try:
            return self._load(name, tensor)
        except ValueError as problem:
            raise ValueError(f"{self._where}: checkpoint tensor {name} {problem}") from None

    def finish(self) -> None:
        """Raise ``ValueError`` naming the first missing tensor, unless all that this rank needs came."""
        if self._missing:
            name = ".".join(map(str, (self._prefix, *min(self._missing))))
            raise ValueError(
                f"{self._where}: checkpoint tensor {name} is missing ({len(self._missing)} tensors are)"
            )

    def _load(self, name: str, tensor: torch.Tensor) -> int:
        match = re.fullmatch(rf"{re.escape(self._prefix)}\.(\d+)\.([^.]+)\.([^.]+)", name)
        if match is None:
            raise ValueError(f"is no expert tensor: expected {self._prefix}.<expert>.<projection>.<suffix>")
        expert, projection, suffix = int(match[1]), match[2], match[3]
        if expert >= self._experts:
            raise ValueError(f"is of expert {expert}; the layer has experts 0..{self._experts - 1}")
        if projection not in self._projections:
            known = ", ".join(self._projections)
            raise ValueError(f"has the unknown projection {projection!r}; expected one of {known}")
        slots = self._slots_of.get(expert, [])
        if suffix == "weight_offset" and "weight_scale" in self._tensors:
            # ModelSlim's checkpoints have offsets, all zero where tokens are quantized one by one.
            if tensor.any():
                raise ValueError("must be zeros: the layer's quantization is symmetric")
            return len(slots)
        if suffix not in self._tensors:
            raise ValueError(f"has no parameter to go to: {suffix!r} is none of {', '.join(self._tensors)}")
        for slot in slots:
            destination = self._destination(slot, projection, suffix)
            destination.copy_(
                self._fitted(tensor, destination, split=int(projection == self._projections[2]))
            )
        self._missing.discard((expert, projection, suffix))
        return len(slots)

    def _destination(self, slot: int, projection: str, suffix: str) -> torch.Tensor:
        w13_S, w2_S = self._tensors[suffix]
        if projection == self._projections[2]:
            return w2_S[slot]
        return w13_S[slot].chunk(2)[self._projections.index(projection)]

    def _fitted(self, loaded: torch.Tensor, own: torch.Tensor, split: int) -> torch.Tensor:
        """Return this rank's part of one expert's tensor, split along that dimension if ``own`` has it."""
        # In 8 bits or fewer a number is nothing without its scale.
        plain = loaded.is_floating_point() and loaded.itemsize > 1
        if not (plain if own.is_floating_point() else loaded.dtype == own.dtype):
            wanted = "a floating-point dtype of 16 bits or more" if own.is_floating_point() else own.dtype
            raise ValueError(f"must have {wanted}, got {loaded.dtype}")
        expected = [size * self._tp_size if at == split else size for at, size in enumerate(own.shape)]
        shape = list(loaded.shape)
        if shape == [*expected, 1]:
            loaded = loaded.squeeze(-1)
        elif shape != expected:
            rows = ", one scale for each output row" if own.ndim == 1 else ""
            raise ValueError(f"must have the shape {expected}{rows}, got {shape}")
        if split >= own.ndim:
            return loaded
        return loaded.narrow(split, self._tp_rank * own.shape[split], own.shape[split])
