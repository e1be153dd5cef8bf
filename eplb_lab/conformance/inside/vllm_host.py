"""Hosts a vLLM engine: ``python -m eplb_lab.conformance.inside.vllm_host CALLS REPLIES``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb_lab.conformance.inside.host import serve


class VllmHost:
    """A vLLM engine with its own EPLB.

    Parameters
    ----------
    options
        Model, ranks, redundant slots, interval, requests, setup, and additional ``LLM`` arguments in ``engine``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch
        from vllm import LLM

        eplb = {
            "num_redundant_experts": options["redundant"],
            "window_size": options["interval"],
            "step_interval": options["interval"],
        }
        arguments = {
            "model": options["model"],
            "tensor_parallel_size": options["ranks"],
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "skip_tokenizer_init": True,
            "seed": 0,
            "max_model_len": 512,
            "max_num_seqs": options["requests"],
            # Blocks that were computed before a move would hide faults in prefill.
            "enable_prefix_caching": False,
        }
        if not torch.accelerator.is_available():
            # Asynchronous EPLB needs an accelerator's streams.
            eplb |= {"use_async": False, "communicator": "torch_gloo"}
            arguments |= {"dtype": "float32", "enforce_eager": True}
        if options["quantisation"]:
            arguments |= {"quantization": options["quantisation"], "dtype": "bfloat16"}
        if options["sleeps"]:
            arguments["enable_sleep_mode"] = True
        engine = dict(options["engine"])
        eplb |= engine.pop("eplb_config", {})
        self._llm = LLM(**(arguments | engine), eplb_config=eplb)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[Any]]:
        """Return ``[ids, logprobs]`` for every prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [output.outputs[0] for output in self._llm.generate(requests, sampling, use_tqdm=False)]
        return [
            [
                list(output.token_ids),
                [
                    chosen[token].logprob
                    for token, chosen in zip(output.token_ids, output.logprobs, strict=True)
                ],
            ]
            for output in outputs
        ]

    def sleep_and_wake(self) -> None:
        """Offload the weights, then restore them."""
        self._llm.sleep(level=1)
        self._llm.wake_up()

    def reload(self) -> None:
        """Load the weights from the checkpoint again."""
        self._llm.collective_rpc("reload_weights")

    def close(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(VllmHost)
