"""SGLang options that affect balancing, and a check that refuses values incompatible with the agent."""

from __future__ import annotations

from dataclasses import dataclass

from worker_agent.adapters.compat import refuse

_TESTED_BACKENDS = ("none", "deepep")
_MAX_ENTRIES = 16
"""Maximum number of table entries per expert under dynamic dispatch, equal to the service's default."""

MANAGER_DEFAULTS = {
    "eplb_algorithm": "auto",
    "eplb_rebalance_num_iterations": 1000,
    "eplb_rebalance_layers_per_chunk": None,
    "eplb_min_rebalancing_utilization_threshold": 1.0,
}
"""Options of the EPLB manager that the agent replaces, with their defaults."""


@dataclass(frozen=True)
class SglangOptions:
    """SGLang's options, as resolved from its command line and environment."""

    dispatch: str
    """``ep_dispatch_algorithm``: ``static`` uses one replica per expert and source rank, ``dynamic`` uses several in
    turn."""

    all_to_all: str
    """``moe_a2a_backend``."""

    shares_tokens: bool
    """True if all ranks route the same tokens and therefore need the same table.

    This is usually the case without an all-to-all backend, unless each rank routes its own tokens before they are
    gathered.
    """

    recorder: str | None
    """``expert_distribution_recorder_mode``."""

    tensor_parallel: int
    """``tp_size``."""

    expert_parallel: int
    """``moe_ep_size``."""

    pipeline_parallel: int
    """``pp_size``."""

    context_parallel: int
    """Product of the context-parallel sizes of prefill and decode."""

    replicas: int = 1
    """``dp_size``: number of models in one server, each with its own experts. Attention data parallelism is not
    included."""

    unsupported: tuple[tuple[str, str], ...] = ()
    """Active options that the agent does not support, as the user spells them, each with the reason."""

    @classmethod
    def of_this_process(cls, release: str) -> SglangOptions:
        """Read the options from SGLang's published configuration.

        Parameters
        ----------
        release
            SGLang's release.
        """
        from sglang.srt.layers.moe.utils import is_moe_input_scattered_across_dp_ranks
        from sglang.srt.runtime_context import get_exec, get_parallel

        moe = get_exec().moe
        parallel = get_parallel()
        # In 0.5.21, dp_size is the number of attention ranks if attention is data parallel.
        divides_attention = release == "0.5.21" and parallel.enable_dp_attention
        return cls(
            dispatch=moe.ep_dispatch_algorithm,
            all_to_all=moe.moe_a2a_backend,
            shares_tokens=not is_moe_input_scattered_across_dp_ranks(),
            recorder=moe.expert_distribution_recorder_mode,
            tensor_parallel=parallel.tp_size,
            expert_parallel=parallel.moe_ep_size,
            pipeline_parallel=parallel.pp_size,
            context_parallel=parallel.attn_cp_size * parallel.dcp_size,
            replicas=1 if divides_attention else parallel.dp_size,
            unsupported=_active_unsupported(),
        )

    def entries(self, physical_experts: int) -> int:
        """Return D, the number of table entries per expert.

        Parameters
        ----------
        physical_experts
            Number of slots on all ranks, which is also the maximum number of entries that fit in SGLang's tables.
        """
        if self.dispatch == "static":
            return 1
        limit = min(physical_experts, _MAX_ENTRIES)
        return 1 << (limit.bit_length() - 1)

    def check(self, *, allow_unverified: bool) -> None:
        """Refuse options that do not work with the agent.

        Parameters
        ----------
        allow_unverified
            True to accept all-to-all backends that have never been tested.

        Raises
        ------
        UnsupportedEngineError
            If an option is refused. The message names the option, the reason and a remedy.
        """
        cases = [(True, name, reason, f"Start without {name}") for name, reason in self.unsupported]
        cases += [
            (
                self.dispatch not in ("static", "dynamic"),
                f"--ep-dispatch-algorithm {self.dispatch}",
                "It does not dispatch tokens with the tables that the agent writes",
                "Choose static or dynamic",
            ),
            (
                self.pipeline_parallel > 1,
                f"pipeline parallelism (--pp-size {self.pipeline_parallel})",
                "Each stage would need its own deployment, and stages number their forward passes differently",
                "Start with --pp-size 1",
            ),
            (
                self.replicas > 1,
                f"data-parallel replicas in one server (--dp-size {self.replicas})",
                "Each replica has its own experts and needs its own deployment, but all have the same deployment name",
                "Start one server for each replica, with a different EPLB_AGENT_DEPLOYMENT",
            ),
            (
                self.expert_parallel != self.tensor_parallel,
                f"--ep-size {self.expert_parallel} with --tp-size {self.tensor_parallel}",
                "With these sizes, each expert is split across ranks, or there are several expert-parallel groups",
                f"Start with --ep-size {self.tensor_parallel}",
            ),
            (
                self.context_parallel > 1,
                "context parallelism",
                "With this option, the agent does not know which ranks share tokens",
                "Start with --attn-cp-size 1 and --dcp-size 1",
            ),
            (
                self.recorder != "stat",
                f"--expert-distribution-recorder-mode {self.recorder}",
                "The agent reads heat from the counts of mode stat, which stay on the device",
                "Omit the option, so that SGLang chooses stat for EPLB",
            ),
            (
                self.all_to_all not in _TESTED_BACKENDS and not allow_unverified,
                f"--moe-a2a-backend {self.all_to_all}",
                "No test has shown that this backend reads the experts and tables that the agent writes",
                f"Choose {' or '.join(_TESTED_BACKENDS)}, "
                "set EPLB_AGENT_ALLOW_UNVERIFIED_ENGINE=1 to accept the risk",
            ),
        ]
        refuse(cases)


def _active_unsupported() -> tuple[tuple[str, str], ...]:
    """Return each active option that the agent does not support, with the reason."""
    from sglang.srt.eplb.expert_distribution import megamoe_prefill_only_recorder_enabled
    from sglang.srt.runtime_context import get_disagg, get_exec, get_lora, get_model

    moe = get_exec().moe
    offload = get_exec().offload
    offload_reason = "With this option, experts do not stay in the memory that the agent writes to"
    options = (
        (
            moe.elastic_ep_backend is not None,
            "--elastic-ep-backend",
            "Ranks join and leave, but the agents' votes need a fixed group",
        ),
        (
            bool(get_lora().enable_lora),
            "--enable-lora",
            "LoRA weights are split by rank and slot, so they would stay behind when their expert moves",
        ),
        (
            get_disagg().enable_pdmux,
            "--enable-pdmux",
            "With this option, two passes run at once, and a layer can only be switched between passes",
        ),
        # Releases before 0.5.23 have no paged experts.
        (getattr(moe, "enable_paged_experts", False), "--enable-paged-experts", offload_reason),
        (moe.kt_weight_path is not None, "--kt-weight-path", offload_reason),
        (offload.cpu_offload_gb > 0, "--cpu-offload-gb", offload_reason),
        (offload.offload_group_size > 0, "--offload-group-size", offload_reason),
        (get_model().is_startup_weight_load_overlap, "--startup-weight-load-mode overlap", offload_reason),
        (
            get_model().weight_cache_mode != "off",
            "--weight-cache-mode",
            "Other engines share the memory of these experts, and would read experts that have moved",
        ),
        (
            megamoe_prefill_only_recorder_enabled(),
            "SGLANG_AITER_MEGA_EPLB_PREFILL_ONLY",
            "With this option, SGLang does not count decode passes",
        ),
    )
    return tuple((name, reason) for is_active, name, reason in options if is_active)
