"""Balances SGLang's expert-parallel layers: the agent takes the place of its ``EPLBManager``.

SGLang routes by ``ExpertLocationMetadata``: tables in, counts of chosen experts out of its distribution recorder, one
call after every forward pass. ``hooks`` registers the hooks, ``host`` runs in a rank, ``known`` refuses options.
"""
