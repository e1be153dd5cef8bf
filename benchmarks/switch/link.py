"""Effect of transfers on the model's exchanges over the same link, measured by median and slowest step time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.wire.plan import RankLayer, sources_of
from worker_agent.settings import AgentSettings
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane import Lanes
from worker_agent.swap.machine import StartTransfer
from worker_agent.swap.transfer import ByteBudget, TransferWorker

EXPERT_BYTES = 44_000_000
SLOTS = 4
"""Number of experts in one layer's transfer. They are DeepSeek-V3 experts in W8A8 (44 MB each)."""
MODEL_BYTES = 4_000_000
"""Number of bytes that the model exchanges per step in each direction."""
SHARES = (1.0, 0.25)
_LONGER = 4
"""Number of exchanges measured during transfers, as a multiple of those measured alone.

Some layers must arrive in that time.
"""


class _Layer:
    """A layer whose experts are plain bytes."""

    def __init__(self) -> None:
        self._weights = [[torch.zeros(EXPERT_BYTES, dtype=torch.uint8) for _ in range(SLOTS)]]

    def expert_weights(self) -> list[list[torch.Tensor]]:
        """Return the weights."""
        return self._weights


def beside_transfers(steps: int) -> dict[str, object]:
    """Time the model's exchange, without transfers and at each link share. Return the times in milliseconds."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    model = group.process_group("model", timedelta(seconds=60))
    sent, received = (torch.zeros(MODEL_BYTES, dtype=torch.uint8) for _ in range(2))
    peer = 1 - group.rank

    def exchange() -> None:
        works = [model.recv([received], peer, 0), model.send([sent], peer, 0)]
        for work in works:
            work.wait()

    figures: dict[str, object] = {}
    if group.size != 2:
        return figures
    layer = _Layer()
    figures |= _figures("alone", [_timed(exchange) for _ in range(steps)])
    moves_M5 = np.array(
        [(rank, slot, 1 - rank, slot, slot) for rank in range(2) for slot in range(SLOTS)], np.int32
    )
    empty_RS = np.zeros((2, SLOTS), dtype=np.int32)
    update = RankLayer(0, empty_RS, sources_of(moves_M5, 2, SLOTS), np.zeros(SLOTS, np.int32), ())
    for number, share in enumerate(SHARES):
        lanes = Lanes(group, "gloo", torch.device("cpu"), timedelta(seconds=60))
        worker = TransferWorker(lanes, AgentSettings(), ByteBudget(None, share=share))
        seconds = []
        layers = 0
        began = time.perf_counter()
        worker.start(StartTransfer((update,), 1, number), [layer])
        for _ in range(steps * _LONGER):
            seconds.append(_timed(exchange))
            if (result := worker.poll()) is not None:
                assert result.error is None, result.error
                layers += 1
                worker.start(StartTransfer((update,), layers + 1, number), [layer])
        elapsed = time.perf_counter() - began
        figures |= _figures(f"share_{share:g}", seconds)
        megabytes_per_second = layers * SLOTS * EXPERT_BYTES / 1e6 / elapsed
        figures[f"link_share_{share:g}_transfer_megabytes_per_second"] = megabytes_per_second
        while worker.poll() is None:
            time.sleep(0.001)
        worker.close()
        dist.barrier()
    return figures


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _figures(name: str, seconds: list[float]) -> dict[str, object]:
    return {
        f"link_{name}_exchange_ms_p{percentile}": 1e3 * float(np.percentile(seconds, percentile))
        for percentile in (50, 90, 99)
    }
