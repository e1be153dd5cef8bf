"""Adapter for vLLM-Ascend: the agent replaces its ``EplbUpdator`` and the processes behind it.

vLLM-Ascend keeps its own setting (``dynamic_eplb``), layers, maps and counters. ``hooks`` patches vLLM-Ascend, whose
model runner then calls ``host`` in each rank. ``weights`` selects an expert's tensors, and ``refusals`` refuses
settings that do not work with the agent.
"""
