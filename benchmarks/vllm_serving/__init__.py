"""Two real vLLM servers under the same drifting load, one balanced while it serves: ``make demo-vllm``."""
