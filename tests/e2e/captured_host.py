"""A host whose forward pass is one captured graph on a GPU, or the same pass run eagerly on a CPU.

All ranks receive the same tokens, route them with their tables, compute the experts in their slots, and sum the
outputs. The graph reads and writes heat, tables and weights by address. Only a pass's inputs come from outside the
graph. With ``lists``, the host has a tensor and a scale per expert, and derives from them the tensors that the pass
reads.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from worker_agent.agent import Agent
from worker_agent.live_layer import ExpertWeights
from worker_agent.settings import AgentSettings

LAYERS = 4
EXPERTS = 16
SLOTS = 10
HIDDEN = 32
INTERMEDIATE = 48
TOP_K = 2
TOKENS = 64
HEAT_ROWS = 64
STEPS_PER_WORKLOAD = 192
FLOAT8 = torch.float8_e4m3fn
_MAX_STEPS = 6000
_PASS_CYCLES = 4_000_000
_MISSED_EVERY = 97


def in_float8(weight_EXY: torch.Tensor) -> list[torch.Tensor]:
    """Return the weights of E experts in float8, with their scales ``[E, 1, 1]``."""
    scale_E11 = weight_EXY.abs().amax(dim=(1, 2), keepdim=True) / 448
    return [(weight_EXY / scale_E11).to(FLOAT8), scale_E11]


def read(weights: Sequence[ExpertWeights], rows_N: torch.Tensor) -> torch.Tensor:
    """Return rows of one weight in float32, ``[N, ...]``, multiplied by the rows' scales if the weight has scales."""
    first = weights[0]
    if first.dtype != FLOAT8:
        return first[rows_N]
    scales = weights[1]
    return first.view(torch.uint8)[rows_N].view(FLOAT8).float() * scales[rows_N]


class CapturedLayer:
    """One layer of the host, a ``LiveLayer``."""

    shares_tokens = True

    def __init__(
        self,
        experts: Sequence[torch.Tensor],
        placement: Placement,
        layer: int,
        rank: int,
        rings: Sequence[torch.Tensor],
        counter: torch.Tensor,
        in_lists: bool,
    ) -> None:
        device = counter.device
        self.rank = rank
        local_experts = placement.phy2log_LRS[layer, rank].tolist()
        lists = [[weight[expert].to(device).clone() for expert in local_experts] for weight in experts]
        self._weights: list[ExpertWeights] = [
            tensors if in_lists else torch.stack(tensors) for tensors in lists
        ]
        self.refresh()
        self.expert_map = torch.tensor(placement.expert_map(rank)[layer], device=device)
        self.log2phy = torch.tensor(placement.default_log2phy()[0, layer], device=device)
        # A host with lists does not count the tokens that its slots receive.
        self.moe_load: torch.Tensor | None = None if in_lists else rings[0][:, layer]
        self.source_load: torch.Tensor | None = rings[1][:, layer]
        self.load_counter = counter
        self.leaves_weights = False

    def expert_weights(self) -> list[ExpertWeights]:
        """Return the weights that the pass reads, or copies in a control run, which must not update its weights."""
        if self.leaves_weights:
            return [weight.clone() for weight in self._weights if isinstance(weight, torch.Tensor)]
        return self._weights

    def refresh(self) -> None:
        """Derive the tensors that the pass reads if the weights are lists.

        The agent does not know about these tensors.
        """
        self._read = [torch.stack(weight) if isinstance(weight, list) else weight for weight in self._weights]

    def forward(self, hidden_TH: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """Return this rank's part ``[T, H]`` of the layer's output. No shape depends on a value."""
        slots_N = self.log2phy[chosen_TK].long().reshape(-1) - self.rank * SLOTS
        mine_N = (slots_N >= 0) & (slots_N < SLOTS)
        slots_N = slots_N.clamp(0, SLOTS - 1)
        row = (self.load_counter % HEAT_ROWS).reshape(1)
        if self.moe_load is not None:
            _count(self.moe_load, row, slots_N, mine_N)
        if self.rank == 0:  # All ranks see the same tokens, so only one of them counts.
            _count(self.source_load, row, chosen_TK.reshape(-1), torch.ones_like(mine_N))
        masked_NH = _outputs(self._read, slots_N, hidden_TH) * mine_N.unsqueeze(1)
        return masked_NH.reshape(TOKENS, TOP_K, HIDDEN).sum(dim=1)


def _outputs(weights: Sequence[ExpertWeights], rows_N: torch.Tensor, hidden_TH: torch.Tensor) -> torch.Tensor:
    """Return the expert output for each choice, ``[N, H]``. ``rows_N`` are the chosen experts' rows in the weights."""
    kinds = len(weights) // 2
    up_NHI = read(weights[:kinds], rows_N)
    down_NIH = read(weights[kinds:], rows_N)
    choices_NH = hidden_TH.repeat_interleave(TOP_K, dim=0)
    within_NI = torch.relu(torch.einsum("nh,nhi->ni", choices_NH, up_NHI))
    return torch.einsum("ni,nih->nh", within_NI, down_NIH)


def _count(ring: torch.Tensor, row: torch.Tensor, index_N: torch.Tensor, counts_N: torch.Tensor) -> None:
    counts = torch.zeros_like(ring[:1]).scatter_add_(1, index_N.unsqueeze(0), counts_N.int().unsqueeze(0))
    ring.index_copy_(0, row, counts)


class CapturedHost:
    """All layers of one rank, and a forward pass over inputs that are written in place.

    Parameters
    ----------
    device
        A CPU runs the pass eagerly; a GPU captures it once and replays it.
    experts
        ``float32``, ``float8`` (with a scale per expert), or ``lists`` (float8 with one tensor per expert).
    """

    def __init__(self, device: torch.device, experts: str) -> None:
        self.rank = dist.get_rank()
        ranks = dist.get_world_size()
        draws = torch.Generator().manual_seed(0)
        self.experts_L = []
        for _ in range(LAYERS):
            up_EHI = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=draws) / HIDDEN**0.5
            down_EIH = torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, generator=draws) / INTERMEDIATE**0.5
            whole = [up_EHI, down_EIH]
            self.experts_L.append(
                [*in_float8(up_EHI), *in_float8(down_EIH)] if experts != "float32" else whole
            )
        placement = Placement.linear(LAYERS, EXPERTS, ranks, SLOTS)
        rings = [
            torch.zeros(HEAT_ROWS, LAYERS, width, dtype=torch.int32, device=device)
            for width in (SLOTS, EXPERTS)
        ]
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.layers = [
            CapturedLayer(weights, placement, layer, self.rank, rings, self.counter, experts == "lists")
            for layer, weights in enumerate(self.experts_L)
        ]
        self.hidden_LTH = torch.zeros(LAYERS, TOKENS, HIDDEN, device=device)
        self.chosen_LTK = torch.zeros(LAYERS, TOKENS, TOP_K, dtype=torch.int64, device=device)
        self.part_LTH = torch.zeros(LAYERS, TOKENS, HIDDEN, device=device)
        self.run = self._pass if device.type == "cpu" else self._captured()
        self.counter.zero_()

    def _pass(self) -> None:
        for number, layer in enumerate(self.layers):
            self.part_LTH[number] = layer.forward(self.hidden_LTH[number], self.chosen_LTK[number])
        self.counter.add_(1)

    def _captured(self) -> Callable[[], None]:
        module: Any = torch.get_device_module(self.counter.device)
        self._pass()  # Libraries must allocate their buffers before the capture.
        module.synchronize()
        graph = module.CUDAGraph()
        with module.graph(graph):
            self._pass()
        replay: Callable[[], None] = graph.replay
        return replay

    def forward(self, hidden_LTH: torch.Tensor, chosen_LTK: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queue a pass.

        The returned function waits for the pass and returns every layer's output, ``[L, T, H]``. It is a collective.
        """
        self.hidden_LTH.copy_(hidden_LTH, non_blocking=True)
        self.chosen_LTK.copy_(chosen_LTK, non_blocking=True)
        self.run()
        output_LTH = self.part_LTH.to("cpu", non_blocking=True, copy=True)
        queued = torch.get_device_module(self.counter.device).Event()
        queued.record()

        def output() -> torch.Tensor:
            queued.synchronize()
            dist.all_reduce(output_LTH)
            return output_LTH

        return output

    def expected(self, hidden_LTH: torch.Tensor, chosen_LTK: torch.Tensor) -> torch.Tensor:
        """Return the expected outputs, ``[L, T, H]``, computed from the original experts."""
        outputs = [
            _outputs(experts, chosen_TK.reshape(-1), hidden_TH)
            for experts, chosen_TK, hidden_TH in zip(self.experts_L, chosen_LTK, hidden_LTH, strict=True)
        ]
        return torch.stack(outputs).reshape(LAYERS, TOKENS, TOP_K, HIDDEN).sum(dim=2)


def step_without_waiting(passes: int) -> str | None:
    """Run passes on a GPU without a service, and make torch raise an error if an agent call waits for the device.

    Return the reason why balancing stopped, or ``None``.
    """
    host = CapturedHost(torch.device("cuda", 0), "float32")
    settings = AgentSettings(service="127.0.0.1:9", transfer_backend="gloo")
    agent = Agent.start(host.layers, dist.group.WORLD, settings, token_group=0)
    for _ in range(passes):
        host.run()
        torch.cuda.set_sync_debug_mode("error")
        agent.step()
        torch.cuda.set_sync_debug_mode("default")
    halted = agent.halted
    agent.close()
    return halted


def _popularity(workload: int) -> torch.Tensor:
    """Return the experts' popularity in a workload, ``[L, E]``. The most popular experts differ between layers."""
    draws = torch.Generator().manual_seed(100 + workload)
    skew_E = torch.linspace(1.0, 0.1, EXPERTS) ** 3
    return torch.stack([skew_E[torch.randperm(EXPERTS, generator=draws)] for _ in range(LAYERS)])


def serve(
    service: str, device_name: str, experts: str, switches: int, ahead: int, leaves_weights: bool = False
) -> dict[str, Any]:
    """Serve changing workloads until layers have switched ``switches`` times.

    A control run, whose layers do not update their weights or the derived tensors, stops at the first difference.
    Unless ``ahead`` is 0, each host queues that many passes on its device, and one rank misses calls.

    Returns
    -------
    dict
        The largest difference from the original experts, the number of layer switches, the layers whose commits
        the host was notified of, whether all weights kept their addresses, and why balancing stopped.
    """
    device = torch.device(device_name)
    host = CapturedHost(device, experts)
    addresses = [weight.data_ptr() for layer in host.layers for weight in _tensors(layer)]
    shared = device.type != "cpu" and torch.get_device_module(device).device_count() < dist.get_world_size()
    committed: list[int] = []

    def on_commit(index: int) -> None:
        committed.append(index)
        if not leaves_weights:
            host.layers[index].refresh()

    for layer in host.layers:
        layer.leaves_weights = leaves_weights and experts != "lists"
    agent = Agent.start(
        host.layers,
        dist.group.WORLD,
        AgentSettings(
            service=service,
            deployment="captured",
            transfer_backend="gloo" if shared else "auto",
            vote_timeout_seconds=60,
            commit_timeout_seconds=60,
            verify_transfers=experts == "lists",
        ),
        token_group=0,
        on_commit=on_commit,
    )
    draws = torch.Generator().manual_seed(7)
    worst = 0.0
    queued: deque[tuple[Callable[[], torch.Tensor], torch.Tensor, torch.Tensor]] = deque()
    for step in range(_MAX_STEPS):
        popularity_LE = _popularity(step // STEPS_PER_WORKLOAD)
        hidden_LTH = torch.randn(LAYERS, TOKENS, HIDDEN, generator=draws)
        chosen_LTK = torch.stack(
            [
                torch.multinomial(row_E.expand(TOKENS, -1), TOP_K, replacement=False, generator=draws)
                for row_E in popularity_LE
            ]
        )
        if ahead and device.type != "cpu":
            hidden_LTH, chosen_LTK = hidden_LTH.pin_memory(), chosen_LTK.pin_memory()
            torch.get_device_module(device)._sleep(_PASS_CYCLES)
        queued.append((host.forward(hidden_LTH, chosen_LTK), hidden_LTH, chosen_LTK))
        if not (ahead and host.rank == 1 and step % _MISSED_EVERY == 0):
            agent.step()
        # All ranks must leave the loop at the same pass.
        switched = torch.tensor([agent.stats.layers_switched])
        dist.all_reduce(switched, dist.ReduceOp.MIN)
        over = int(switched) >= switches or step == _MAX_STEPS - 1 or (leaves_weights and worst > 1e-2)
        while len(queued) > ahead * (not over):
            output, hidden_LTH, chosen_LTK = queued.popleft()
            worst = max(worst, float((output() - host.expected(hidden_LTH, chosen_LTK)).abs().max()))
        if over:
            break
    facts = {
        "worst": worst,
        "switched": agent.stats.layers_switched,
        "committed": committed,
        "same_addresses": addresses
        == [tensor.data_ptr() for layer in host.layers for tensor in _tensors(layer)],
        "halted": agent.halted,
    }
    agent.close()
    return facts


def _tensors(layer: CapturedLayer) -> list[torch.Tensor]:
    weights = [kind if isinstance(kind, list) else [kind] for kind in layer._weights]
    return [*itertools.chain(*weights), layer.expert_map, layer.log2phy]
