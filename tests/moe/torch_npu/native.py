"""torch operators that token counting, table lookups and commits launch on a device, per pass or per switch."""

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
"""torch_npu must declare each of these operators for its device. It does not declare ``index_add_``, for example."""


class Launched(TorchDispatchMode):
    """Records the names of operators that run while it is active, except for views.

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
