"""Generate text with a real vLLM engine and write token ids and log-probabilities. Runs in the engine's own Python.

``python generate_vllm.py MODEL OUT.json '{"requests": 8, "max_tokens": 160, "engine": {...}}'``

With ``"until": "FILE"``, no new round starts once that file exists.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path

DIFFERENT_ROUNDS = 12
"""Number of distinct rounds. Later rounds repeat them."""


def prompts(count, seed=1):
    """Return the token ids of ``count`` prompts, which are drawn from changing domains."""
    draw = random.Random(seed)
    return [
        [draw.randrange(3 + 60 * (n % 8), 63 + 60 * (n % 8)) for _ in range(draw.randrange(4, 40))]
        for n in range(count)
    ]


async def generate(model, options):
    """Run all requests concurrently on an asynchronous engine. Return ``[ids, logprobs]`` for each request."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": True,
    }
    arguments = AsyncEngineArgs(model=model, **(settings | options.get("engine", {})))
    engine = AsyncLLM.from_engine_args(arguments)
    print("READY", flush=True)
    sampling = SamplingParams(
        temperature=0, max_tokens=options["max_tokens"], ignore_eos=True, detokenize=False, logprobs=1
    )

    async def one(number, prompt):
        last = None
        async for output in engine.generate(
            {"prompt_token_ids": prompt}, sampling, request_id=f"request-{number}"
        ):
            last = output
        answer = last.outputs[0]
        return [list(answer.token_ids), [next(iter(choices.values())).logprob for choices in answer.logprobs]]

    answers = []
    for turn in range(options.get("rounds", 1)):
        if "until" in options and Path(options["until"]).exists():
            break
        wave = prompts(options["requests"], seed=turn % DIFFERENT_ROUNDS + 1)
        began = time.perf_counter()
        answers += await asyncio.gather(*[one(f"{turn}-{n}", prompt) for n, prompt in enumerate(wave)])
        print(f"ROUND {turn} {time.perf_counter() - began:.2f} s", flush=True)
        for call, arguments in options.get("between", []):
            await engine.collective_rpc(call, kwargs=arguments)
    engine.shutdown()
    return answers


if __name__ == "__main__":
    answers = asyncio.run(generate(sys.argv[1], json.loads(sys.argv[3])))
    with Path(sys.argv[2]).open("w") as out:
        json.dump(answers, out)
