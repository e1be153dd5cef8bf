"""Benchmark of two vLLM servers under the same drifting load, one of them balanced: ``make demo-vllm``."""
