"""Types of the arrays that kernels take; their dimensions stand in the variables' names.

L layers, N episodes, E experts, R ranks, S slots a rank, P physical slots, G sources (token groups).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
