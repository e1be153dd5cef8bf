"""The layer switch: vote, transfer, staging, commit.

Read ``machine`` first: it is the whole protocol, without clock, sockets, threads or tensors. The other modules carry
out what it asks for.
"""
