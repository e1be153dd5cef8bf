"""Hosts an SGLang engine: ``python -m eplb_lab.conformance.inside.sglang_host CALLS REPLIES``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb_lab.conformance.inside.host import serve


class SglangHost:
    """An SGLang engine with its own EPLB.

    Parameters
    ----------
    options
        Model, ranks, redundant slots, interval, requests, setup, and additional ``Engine`` arguments in ``engine``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        import sglang
        import torch

        arguments = {
            "model_path": options["model"],
            "tp_size": options["ranks"],
            "ep_size": options["ranks"],
            "enable_eplb": True,
            "ep_num_redundant_experts": options["redundant"],
            "eplb_rebalance_num_iterations": options["interval"],
            "expert_distribution_recorder_buffer_size": options["interval"],
            "skip_tokenizer_init": True,
            "context_length": 512,
            "max_running_requests": options["requests"],
            # Cached prefixes that were computed before a move would hide faults in prefill.
            "disable_radix_cache": True,
            "random_seed": 0,
        }
        if not torch.accelerator.is_available():
            arguments |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
            arguments |= {"max_total_tokens": 4096, "disable_cuda_graph": True}
        if options["quantisation"]:
            arguments |= {"quantization": options["quantisation"], "dtype": "bfloat16"}
        if options["sleeps"]:
            arguments["enable_memory_saver"] = True
        self._model = options["model"]
        self._engine = sglang.Engine(**(arguments | options["engine"]))

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[Any]]:
        """Return ``[ids, logprobs]`` for every prompt."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        return [
            [output["output_ids"], [logprob for logprob, *_ in output["meta_info"]["output_token_logprobs"]]]
            for output in outputs
        ]

    def sleep_and_wake(self) -> None:
        """Offload the weights, then restore them."""
        self._engine.release_memory_occupation()
        self._engine.resume_memory_occupation()

    def reload(self) -> None:
        """Load the weights from the checkpoint again.

        Raises
        ------
        RuntimeError
            If SGLang reports a failure.
        """
        loaded, *message = self._engine.update_weights_from_disk(self._model)
        if not loaded:
            raise RuntimeError(str(message[0]))

    def close(self) -> None:
        """Stop the engine."""
        self._engine.shutdown()


if __name__ == "__main__":
    serve(SglangHost)
