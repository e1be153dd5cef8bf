"""Conformance kit: makes an engine's EPLB move experts, and checks that the engine's answers do not change.

``python -m eplb_lab.conformance vllm`` runs it. ``scenarios`` defines how experts move, ``run`` compares the answers
with and without moves, and ``process`` drives vLLM and SGLang. Modules in ``inside`` run in the engine's
processes and import nothing else from this package.
"""
