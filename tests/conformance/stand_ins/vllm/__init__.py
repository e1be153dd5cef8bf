"""A stand-in for vLLM with the toy engine, for the kit's host and plugin."""

import tempfile
from importlib.metadata import entry_points
from types import SimpleNamespace

import torch

from tests.conformance.toy_engine import ToyEngine
from vllm.distributed.eplb.eplb_state import EplbState


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, eplb_config, enable_sleep_mode=False, faults=(), **arguments):
        assert arguments["enable_eplb"]
        assert arguments["tensor_parallel_size"] == 1
        if enable_sleep_mode:
            print("ValueError: Sleep mode is not supported on this platform.")
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        if arguments.get("quantization"):
            raise NotImplementedError(f"no {arguments['quantization']} kernels")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tempfile.mkstemp()[1]}", rank=0, world_size=1
        )
        for plugin in entry_points(group="vllm.general_plugins"):
            plugin.load()()
        self._engine = _Engine(eplb_config["step_interval"], faults)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def generate(self, requests, sampling, use_tqdm):
        prompts = [request["prompt_token_ids"] for request in requests]
        return [
            SimpleNamespace(outputs=[_completion(answer)])
            for answer in self._engine.generate(prompts, sampling.max_tokens)
        ]

    def collective_rpc(self, method):
        assert method == "reload_weights"
        self._engine.reload()


def _completion(answer):
    logprobs = [
        {token: SimpleNamespace(logprob=value)}
        for token, value in zip(answer.ids, answer.logprobs, strict=True)
    ]
    return SimpleNamespace(token_ids=list(answer.ids), logprobs=logprobs)


class _Engine(ToyEngine):
    def __init__(self, interval, faults):
        super().__init__(faults=faults)
        self.state = EplbState(self, interval)

    def _after_step(self):
        self.state.step()
