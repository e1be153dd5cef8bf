"""The options of SGLang that decide how a model can be balanced, and the refusal of those that it cannot be with."""

from __future__ import annotations

from dataclasses import dataclass

from worker_agent.adapters.compat import refuse

_KNOWN_BACKENDS = ("none", "deepep")
_MAX_ENTRIES = 16
"""Of a dealing table under dynamic dispatch; what the service deals by default."""

OF_ITS_MANAGER = {
    "eplb_algorithm": "auto",
    "eplb_rebalance_num_iterations": 1000,
    "eplb_rebalance_layers_per_chunk": None,
    "eplb_min_rebalancing_utilization_threshold": 1.0,
}
"""Options of SGLang's own EPLB manager, whose place the agent takes, with their defaults."""


@dataclass(frozen=True)
class SglangOptions:
    """Options as SGLang resolved them from its command line, by their names."""

    dispatch: str
    """``ep_dispatch_algorithm``: static reads one replica per expert and source rank, dynamic goes round several."""

    all_to_all: str
    """``moe_a2a_backend``."""

    shares_tokens: bool
    """All ranks route the same tokens, and so need one table: as a rule those without an all-to-all, unless
    each routes its own before they are gathered."""

    recorder: str | None
    """``expert_distribution_recorder_mode``."""

    tensor_parallel: int
    expert_parallel: int
    pipeline_parallel: int
    context_parallel: int
    """Prefill's and decode's multiplied."""

    replicas: int = 1
    """``dp_size``: models beside each other, each with experts of its own. Attention data parallelism is none."""

    unsupported: tuple[tuple[str, str], ...] = ()
    """Options that are switched on and cannot be, as the user writes them, with the reason."""

    @classmethod
    def of_this_process(cls) -> SglangOptions:
        """Read them from SGLang's published configuration."""
        from sglang.srt.eplb.expert_distribution import megamoe_prefill_only_recorder_enabled
        from sglang.srt.layers.moe.utils import is_moe_input_scattered_across_dp_ranks
        from sglang.srt.runtime_context import get_disagg, get_exec, get_lora, get_model, get_parallel

        moe, offload, parallel = get_exec().moe, get_exec().offload, get_parallel()
        elsewhere = "Experts are then not where they were when the agent met the other ranks"
        switched_on = {
            "--elastic-ep-backend": (
                moe.elastic_ep_backend is not None,
                "Ranks come and go under the agents' votes",
            ),
            "--enable-lora": (
                bool(get_lora().enable_lora),
                "Adapters of experts are cut by rank and slot, and stay behind when their expert moves",
            ),
            "--enable-pdmux": (
                get_disagg().enable_pdmux,
                "Two passes run at once, and a layer can only be switched between passes",
            ),
            "--enable-paged-experts": (moe.enable_paged_experts, elsewhere),
            "--kt-weight-path": (moe.kt_weight_path is not None, elsewhere),
            "--cpu-offload-gb": (offload.cpu_offload_gb > 0, elsewhere),
            "--offload-group-size": (offload.offload_group_size > 0, elsewhere),
            "--startup-weight-load-mode overlap": (get_model().is_startup_weight_load_overlap, elsewhere),
            "--weight-cache-mode": (
                get_model().weight_cache_mode != "off",
                "Other engines share these experts' memory, and would read moved ones",
            ),
            "SGLANG_AITER_MEGA_EPLB_PREFILL_ONLY": (
                megamoe_prefill_only_recorder_enabled(),
                "SGLang then counts no decode passes",
            ),
        }
        return cls(
            dispatch=moe.ep_dispatch_algorithm,
            all_to_all=moe.moe_a2a_backend,
            shares_tokens=not is_moe_input_scattered_across_dp_ranks(),
            recorder=moe.expert_distribution_recorder_mode,
            tensor_parallel=parallel.tp_size,
            expert_parallel=parallel.moe_ep_size,
            pipeline_parallel=parallel.pp_size,
            context_parallel=parallel.attn_cp_size * parallel.dcp_size,
            replicas=parallel.dp_size,
            unsupported=tuple((name, why) for name, (is_on, why) in switched_on.items() if is_on),
        )

    def entries(self, slots_of_all: int) -> int:
        """D of the tables, given the number of physical experts, which is as many as SGLang has room for."""
        if self.dispatch == "static":
            return 1
        most = min(slots_of_all, _MAX_ENTRIES)
        return 1 << (most.bit_length() - 1)

    def check(self, *, allow_unverified: bool) -> None:
        """Refuse what cannot be balanced.

        Raises
        ------
        UnsupportedEngineError
            With the option, the reason and a remedy.
        """
        cases = [(True, name, why, "Start without it") for name, why in self.unsupported]
        cases += [
            (
                self.dispatch not in ("static", "dynamic"),
                f"--ep-dispatch-algorithm {self.dispatch}",
                "It does not send tokens by the tables that the agent writes",
                "Choose static or dynamic",
            ),
            (
                self.pipeline_parallel > 1,
                f"pipeline parallelism (--pp-size {self.pipeline_parallel})",
                "Each stage would be a deployment of its own, and its passes are not numbered alike",
                "Start with --pp-size 1",
            ),
            (
                self.replicas > 1,
                f"data parallel replicas in one server (--dp-size {self.replicas})",
                "Each has experts of its own and is a deployment of its own, but they would have one name",
                "Start a server for each, with an EPLB_AGENT_DEPLOYMENT of its own",
            ),
            (
                self.expert_parallel != self.tensor_parallel,
                f"--ep-size {self.expert_parallel} with --tp-size {self.tensor_parallel}",
                "Experts are then cut into parts, or there are several groups of experts",
                f"Start with --ep-size {self.tensor_parallel}",
            ),
            (
                self.context_parallel > 1,
                "context parallelism",
                "Which ranks share tokens has not been read there",
                "Start with --attn-cp-size 1 and --dcp-size 1",
            ),
            (
                self.recorder != "stat",
                f"--expert-distribution-recorder-mode {self.recorder}",
                "Heat is read from the counts of mode stat, which stay on the device",
                "Leave it out: with EPLB on, SGLang chooses stat",
            ),
            (
                self.all_to_all not in _KNOWN_BACKENDS and not allow_unverified,
                f"--moe-a2a-backend {self.all_to_all}",
                "Whether it reads experts and tables where the agent writes them has not been seen",
                f"Choose {' or '.join(_KNOWN_BACKENDS)}, set EPLB_AGENT_ALLOW_UNVERIFIED_ENGINE=1 to take the risk",
            ),
        ]
        refuse(cases)
