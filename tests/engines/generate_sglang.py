"""Generate text with a real SGLang engine and write token ids and log-probabilities. Runs in the engine's own Python.

``python generate_sglang.py MODEL OUT.json '{"requests": 8, "max_tokens": 160, "engine": {...}}'``

With ``"until": "FILE"``, no new round starts once that file exists.
"""

import json
import sys
import time
from pathlib import Path

from generate_vllm import prompts


def generate(model, options):
    """Run all requests of a round concurrently. Return ``[ids, logprobs]`` for each request."""
    import sglang

    settings = {
        "skip_tokenizer_init": True,
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "float32",
        "context_length": 512,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "log_level": "info",
    }
    engine = sglang.Engine(model_path=model, **(settings | options.get("engine", {})))
    print("READY", flush=True)
    sampling = {"temperature": 0, "max_new_tokens": options["max_tokens"], "ignore_eos": True}
    answers = []
    for turn in range(options.get("rounds", 1)):
        if "until" in options and Path(options["until"]).exists():
            break
        wave = prompts(options["requests"], seed=turn + 1)
        began = time.perf_counter()
        outputs = engine.generate(input_ids=wave, sampling_params=sampling, return_logprob=True)
        answers += [
            [output["output_ids"], [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]]
            for output in outputs
        ]
        print(f"ROUND {turn} {time.perf_counter() - began:.2f} s", flush=True)
        for call, arguments in options.get("between", []):
            print(call, getattr(engine, call)(**arguments), flush=True)
    engine.shutdown()
    return answers


if __name__ == "__main__":
    answers = generate(sys.argv[1], json.loads(sys.argv[3]))
    with Path(sys.argv[2]).open("w") as out:
        json.dump(answers, out)
