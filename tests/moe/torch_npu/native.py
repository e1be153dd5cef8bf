"""torch's own operators that counting, tables and commits launch in every pass or at every switch on a device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NATIVE = (
    "_foreach_zero_",
    "add.out",
    "copy_",
    "empty_like",
    "index_copy_",
    "ones",
    "remainder.Scalar_out",
    "scatter_add_",
    "stack",
    "sum.dim_IntList",
    "zero_",
    "zeros",
)
"""Each must be one that torch_npu declares for its device; ``index_add_``, for one, is not."""


class Launched(TorchDispatchMode):
    """Keeps the names of the operators that run while it is active, views left out.

    Examples
    --------
    >>> with Launched() as launched:
    ...     _ = torch.zeros(3)[1:].add_(1)
    >>> launched.names
    ['zeros', 'add_.Tensor']
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(function.name().removeprefix("aten::"))
        return function(*args, **(kwargs or {}))
