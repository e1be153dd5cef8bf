"""What replaces the EPLB manager in one rank of SGLang: the agent, called after every forward pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from eplb_service.wire.heat import StepPhase
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.sglang.layer import HeatRings, SglangLayer
from worker_agent.adapters.sglang.options import SglangOptions
from worker_agent.adapters.sglang.tables import LocationTables
from worker_agent.adapters.sglang.weights import addresses_in, addresses_of, expert_weights
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings

_log = logging.getLogger("eplb.agent")

RING_ROWS = 64
"""Steps of heat kept on the device; reports are cut long before."""


class SglangBalancer:
    """Has the methods of ``EPLBManager`` that SGLang calls, and no generator that would rebalance.

    Parameters
    ----------
    runner
        SGLang's ``ModelRunner`` of the target model.
    options
        Checked already.
    """

    def __init__(self, runner: Any, options: SglangOptions) -> None:
        self._runner = runner
        self._options = options
        self._passes = 0
        self._paused = False
        self._agent: Agent | None = None
        self._stream: Any = None

    @property
    def agent(self) -> Agent:
        """This rank's agent."""
        assert self._agent is not None, "SGLang has not loaded its model yet"
        return self._agent

    def start(self, metadata: Any, recorder: Any, rank: int, group: dist.ProcessGroup) -> None:
        """The model is loaded: show its layers to an agent, and meet the other ranks. A collective.

        Parameters
        ----------
        metadata, recorder
            SGLang's ``ExpertLocationMetadata``, ``None`` for a model without, and its distribution recorder.
        rank
            This rank's number among those of the experts.
        group
            A CPU-capable group of them.

        Raises
        ------
        UnsupportedEngineError
            Where the model cannot be balanced.
        """
        model = self._runner.model
        if metadata is None or not hasattr(model, "routed_experts_weights_of_layer"):
            raise UnsupportedEngineError(
                f"the model {type(model).__name__}",
                "SGLang does not know its experts' places and weights",
                "Serve it without --enable-eplb",
            )
        _refuse_routing_kernels(model)
        self._metadata, self._recorder = metadata, recorder
        if not recorder.recording:
            recorder.start_record()
        layers = self._show_layers(rank)
        self._addresses = addresses_of(layer.expert_weights() for layer in layers)
        self._agent = Agent.start(
            layers,
            group,
            AgentSettings(),
            token_group=0 if self._options.shares_tokens else None,
            on_commit=self._follow,
        )

    def _show_layers(self, rank: int) -> list[SglangLayer]:
        weights = self._runner.model.routed_experts_weights_of_layer
        layer_ids, metadata = sorted(weights.keys()), self._metadata
        shares = self._options.shares_tokens
        entries = self._options.entries(int(metadata.num_physical_experts))
        self._tables = LocationTables(metadata, layer_ids, entries, 0 if shares else rank)
        first = self._tables.first
        self._heat = HeatRings(
            _counted(self._recorder), layer_ids, first.slots, first.experts, rank, shares, RING_ROWS
        )
        maps_LE = torch.from_numpy(first.expert_map(rank)).to(self._heat.counter.device)
        return [
            SglangLayer(
                self._tables.log2phy(index),
                maps_LE[index],
                expert_weights(weights[layer_id], first.slots, layer_id),
                self._heat,
                index,
                shares,
            )
            for index, layer_id in enumerate(layer_ids)
        ]

    # After every forward pass

    def step(self, forward_batch: Any) -> None:
        """A forward pass is over, on this stream; SGLang's ranks make the same ones, also those without tokens.

        Raises
        ------
        UnsupportedEngineError
            In the first pass, where SGLang put the weights into other tensors after the model was loaded.
        """
        if self._runner.device != "cpu":
            self._stream = torch.get_device_module(self._runner.device).current_stream()
        if not self._passes and not self._weights_are_where_they_were():
            raise UnsupportedEngineError(
                "this MoE runner backend",
                "It put the experts into other tensors after the model was loaded",
                "Choose another --moe-runner-backend",
            )
        self._passes += 1
        counted = self._recorder.recording and self._recorder._record_current_pass
        self._heat.record(counted, self._metadata.physical_to_logical_map)
        self.agent.step(_phase(forward_batch.forward_mode), number=self._passes)

    def _follow(self, layer: int) -> None:
        self._tables.follow(layer, self.agent.installed.placement.phy2log_LRS[layer])

    # Around sleep and other weights

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Nothing is under way inside; balanced again afterwards, unless it was paused before."""
        outer = self._paused
        self.pause(reason)
        try:
            yield
        finally:
            if not outer:
                self.go_on()

    def pause(self, reason: str) -> None:
        """Finish or abort the switch under way, until ``go_on``; a collective, between the same two passes."""
        if self._paused:
            return
        self._paused = True
        if self._stream is None:
            self.agent.drain(reason)
            return
        # A layer that is committed now must follow the last pass, and what SGLang does next must follow it.
        module = torch.get_device_module(self._runner.device)
        with module.stream(self._stream):
            self.agent.drain(reason)
        module.current_stream().wait_stream(self._stream)

    def go_on(self) -> None:
        """Balance again. SGLang loads each expert into the slots where it is, so the placement stays."""
        if not self._paused:
            return
        if not self._weights_are_where_they_were():
            _log.error(
                "SGLang put the experts into other tensors: they are served as they are, and balanced no more until "
                "the engine is started again"
            )
            return
        self._paused = False
        self.agent.resume()

    def _weights_are_where_they_were(self) -> bool:
        return addresses_in(self._runner.model) >= self._addresses

    # In the manager's place

    def on_forward_pass_end(self) -> None:
        """``step`` follows the pass itself."""

    def disable_rebalance(self, reason: str) -> NoReturn:
        """Only elastic expert parallelism calls it."""
        raise RuntimeError(f"{reason}: elastic expert parallelism is not balanced by eplb-agent")

    def enable_rebalance(self) -> NoReturn:
        """Only elastic expert parallelism calls it."""
        self.disable_rebalance("EPLB is to be enabled again")

    def reset_generator(self) -> NoReturn:
        """Only elastic expert parallelism calls it."""
        self.disable_rebalance("EPLB is to begin again")

    def rebalance(self) -> NoReturn:
        """Only elastic expert parallelism calls it, where a rank has failed."""
        self.disable_rebalance("SGLang asked its own balancer to rebalance experts")


def _phase(mode: Any) -> StepPhase:
    if mode.is_idle():
        return StepPhase.DUMMY
    return StepPhase.PREFILL if mode.is_extend() and not mode.is_target_verify() else StepPhase.DECODE


def _counted(recorder: Any) -> torch.Tensor:
    """What the recorder counts in a pass, on the device, set to zero before the next."""
    gatherer = recorder._single_pass_gatherers["primary"]
    counted: torch.Tensor | None = getattr(gatherer, "_data", None)
    if counted is None:
        raise UnsupportedEngineError(
            f"heat counted by {type(gatherer).__name__}",
            "Its counts are not on the device",
            "Leave the options of SGLang's expert distribution recorder out",
        )
    return counted


def _refuse_routing_kernels(model: Any) -> None:
    """A kernel that chooses experts by itself may not follow the tables."""
    for name, module in model.named_modules():
        output_format = getattr(getattr(module, "topk_config", None), "output_format", None)
        if getattr(output_format, "name", None) in ("BYPASSED", "TRITON_KERNEL"):
            raise UnsupportedEngineError(
                f"{name} leaves routing to a kernel",
                "It follows no table",
                "Choose another --moe-runner-backend",
            )
