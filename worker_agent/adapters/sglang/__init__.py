"""Balances SGLang's expert-parallel layers: the agent takes the place of its ``EPLBManager``.

SGLang routes by ``ExpertLocationMetadata``: tables in, counts of chosen experts out of its distribution recorder, one
call after every forward pass. ``plugin`` is the entry point, ``hooks`` what is hooked, ``options`` what is refused,
``balancer`` what runs in a rank, ``tables`` and ``weights`` what it writes, ``layer`` what the agent sees of a layer.
"""
