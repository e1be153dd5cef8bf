"""Adapter for SGLang: the agent replaces SGLang's ``EPLBManager``.

SGLang routes with the tables of its ``ExpertLocationMetadata``. Its distribution recorder counts the chosen experts,
and SGLang calls the manager after every forward pass. ``hooks`` connects the agent to SGLang, ``host`` runs the agent
in a rank, and ``options`` refuses options that do not work with the agent.
"""
