"""Placement solver for the policies ``flashlb`` and ``deepseek``. Its kernels use only arrays: no I/O and no clock."""
