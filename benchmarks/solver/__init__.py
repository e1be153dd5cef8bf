"""The solver beside other people's, on the same heat."""

import os

# Set before numpy is imported: one thread for everybody.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
