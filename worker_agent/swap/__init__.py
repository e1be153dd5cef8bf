"""The layer switch: voting, transfers, staging and commits.

Start with ``machine``. It holds the whole protocol as a pure state machine, without clock, sockets, threads or tensors.
The other modules carry out its actions.
"""
