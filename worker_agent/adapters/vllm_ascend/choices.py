"""Count the choices of each expert in all layers of a forward pass, with one operator per layer."""

from __future__ import annotations

import torch

MAX_BUFFERED = 1 << 15
"""Maximum number of choices to buffer per layer.

Larger steps are counted without buffering, because they are slow anyway and would need megabytes of buffer.
"""


class ChoiceCounter:
    """Counts the experts that a rank's tokens choose, in a pass that a graph may capture.

    Each layer copies its choices into a row of one buffer. One operator adds the rows of consecutive layers to the
    counts, after the last layer or when the sequence is interrupted. Buffers are never freed, so a captured graph can
    always write to them. The counts keep their address, so the agent reads the tensor that graphs write to.

    Parameters
    ----------
    layers
        L, the number of layers.
    experts
        E, the number of experts that can be chosen.
    device
        Device that holds the choices.

    Examples
    --------
    >>> counter = ChoiceCounter(layers=2, experts=4, device=torch.device("cpu"))
    >>> counter.count(0, torch.tensor([[0, 1], [1, 2]]))
    >>> counter.count(1, torch.tensor([[3, 3], [0, 1]]), torch.tensor([True, False]))
    >>> counter.chosen_LE.tolist()
    [[1, 2, 1, 0], [0, 0, 0, 2]]
    """

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._chosen_LE = torch.zeros((layers, experts), dtype=torch.int32, device=device)
        self._ids_LC = torch.zeros((layers, 0), dtype=torch.int64, device=device)
        self._ones_1C = torch.zeros((1, 0), dtype=torch.int32, device=device)
        self._active_1C = torch.zeros((1, 0), dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []
        """Buffers replaced by larger ones. They are kept because captured graphs still write to them."""
        self._first = self._next = 0
        """First buffered layer that has not been counted yet, and the layer after the last such layer."""
        self._kind: tuple[object, ...] = ()
        """Shape of the buffered choices, and identity of their token mask."""
        self._weights_1C = self._ones_1C

    @property
    def chosen_LE(self) -> torch.Tensor:
        """Number of choices since the last ``clear``, int32 ``[L, E]``."""
        self._add_up()
        return self._chosen_LE

    def count(self, layer: int, ids_TK: torch.Tensor, active_T: torch.Tensor | None = None) -> None:
        """Count the choices of one layer.

        Parameters
        ----------
        layer
            Index of the layer, starting at 0.
        ids_TK
            ``[T, K]``, experts that each token chose.
        active_T
            bool ``[T]``, False for padding; ``None`` if every token counts.
        """
        choices = ids_TK.numel()
        kind = (ids_TK.shape, *_same_memory(active_T))
        waiting = self._next > self._first
        if waiting and (layer != self._next or kind != self._kind):
            self._add_up()
            waiting = False
        if choices > MAX_BUFFERED:
            self._weigh(ids_TK, active_T)
            ids_1C = ids_TK.reshape(1, -1).long()
            self._chosen_LE[layer : layer + 1].scatter_add_(1, ids_1C, self._weights_1C)
            return
        if not waiting:
            self._first = self._next = layer
            self._kind = kind
            self._weigh(ids_TK, active_T)
        self._ids_LC[layer, :choices].copy_(ids_TK.reshape(-1))
        self._next = layer + 1
        if self._next == len(self._chosen_LE):
            self._add_up()

    def clear(self) -> None:
        """Discard all choices."""
        self._first = self._next = 0
        self._chosen_LE.zero_()

    def _weigh(self, ids_TK: torch.Tensor, active_T: torch.Tensor | None) -> None:
        """Set each choice's weight (1, or 0 for padding), and enlarge the buffers if they are too small."""
        choices = ids_TK.numel()
        if self._ids_LC.shape[1] < choices <= MAX_BUFFERED:
            self._outgrown.append(self._ids_LC)
            columns = _rounded_up(choices)
            rows = len(self._chosen_LE)
            self._ids_LC = torch.zeros((rows, columns), dtype=torch.int64, device=self._ids_LC.device)
        if self._ones_1C.shape[1] < choices:
            self._outgrown += [self._ones_1C, self._active_1C]
            columns = _rounded_up(choices)
            device = self._ones_1C.device
            self._ones_1C = torch.ones((1, columns), dtype=torch.int32, device=device)
            self._active_1C = torch.zeros((1, columns), dtype=torch.int32, device=device)
        if active_T is None:
            self._weights_1C = self._ones_1C[:, :choices]
            return
        self._weights_1C = self._active_1C[:, :choices]
        self._weights_1C.view(ids_TK.shape).copy_(active_T.reshape(-1, 1))

    def _add_up(self) -> None:
        """Add the buffered rows to the counts with one operator."""
        first = self._first
        rows = self._next - self._first
        self._first = self._next
        if rows:
            choices = self._weights_1C.shape[1]
            ids_LC = self._ids_LC[first : first + rows, :choices]
            self._chosen_LE[first : first + rows].scatter_add_(1, ids_LC, self._weights_1C.expand(rows, -1))


def _same_memory(mask_T: torch.Tensor | None) -> tuple[object, ...]:
    """Return a key that identifies a mask's memory. Identical views of the same memory have equal keys."""
    return () if mask_T is None else (mask_T.data_ptr(), mask_T.shape, mask_T.stride())


def _rounded_up(choices: int) -> int:
    """Return the next power of two, so that all outgrown buffers together are smaller than the one in use."""
    return 1 << (choices - 1).bit_length()
