"""Conformance kit: makes an engine's EPLB move experts, and checks that the engine's answers do not change.

``python -m eplb_lab.conformance vllm`` runs it. ``scenarios`` says how experts move, ``run`` compares the answers with
the answers without moves, and ``process`` drives vLLM and SGLang. Modules in ``inside`` run in the engine's
processes and import nothing else of this package.
"""
