"""vLLM's configuration for the rank scripts of vLLM-Ascend. They import it in the engine's own Python."""


def engine_config(folder, ranks, **additional_config):
    """Return the configuration of an expert-parallel engine with ``ranks`` tensor-parallel ranks.

    ``folder`` contains the model's ``config.json``, and ``additional_config`` is vLLM-Ascend's.
    """
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        tensor_parallel_size=ranks,
        enable_expert_parallel=True,
        distributed_executor_backend="mp",
        additional_config=additional_config,
    ).create_engine_config()
