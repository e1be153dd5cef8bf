"""Ours beside other people's balancers on the same heat, each in a process of its own, scored by neither."""
