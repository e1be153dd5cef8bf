"""The layer switch: voting, transfers, staging and commits.

Read ``machine`` first. It defines the whole protocol as a pure state machine, without a clock, sockets, threads or
tensors. The other modules carry out its actions.
"""
