"""Make vLLM's and SGLang's own EPLB run on CPU, for tests only. Loaded along with the shims of both engines.

Both move weights on CPU with gloo. They need accelerator functions only to order and time the moves.
"""

from __future__ import annotations

import torch


def register_vllm() -> None:
    """Replace the accelerator's stream and events in vLLM's EPLB. Its moves are synchronous on CPU."""
    if torch.accelerator.is_available():
        return
    from vllm.distributed.eplb import eplb_state

    class Torch:
        Event = _Event

        def __getattr__(self, name):
            return getattr(torch, name)

    eplb_state.torch = Torch()
    torch.accelerator.current_stream = lambda *_: _Stream()


def register_sglang() -> None:
    """Add the function that SGLang's EPLB calls before its first move."""
    if not torch.accelerator.is_available():
        torch.cpu.empty_cache = lambda: None


class _Stream:
    def synchronize(self) -> None:
        """Return immediately."""


class _Event:
    def __init__(self, *_, **__) -> None:
        pass

    def record(self, *_) -> None:
        """Record nothing."""

    def synchronize(self) -> None:
        """Return immediately."""

    def elapsed_time(self, _) -> float:
        """Return that no time has passed."""
        return 0.0
