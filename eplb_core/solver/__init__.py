"""Placements of the policies ``flashlb`` and ``deepseek`` by numba kernels: arrays in, arrays out, no I/O, no clock."""
