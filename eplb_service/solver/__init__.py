"""FlashLB and its peers as numba kernels: arrays in, arrays out, no I/O and no clock."""
