"""Adapter for vLLM-Ascend: the agent replaces its ``EplbUpdator`` and the processes behind it.

vLLM-Ascend keeps its own setting (``dynamic_eplb``), layers, maps and counters. The module ``hooks`` patches it. Its
model runner calls ``host`` in each rank. The module ``weights`` selects the tensors of an expert, and ``refusals``
refuses settings that do not work with the agent.
"""
