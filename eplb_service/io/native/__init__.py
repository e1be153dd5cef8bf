"""The native trace: a Zarr v3 folder that is written while serving, and read in slices."""
