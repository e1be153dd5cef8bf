"""Refusals for SGLang 0.5.21 and 0.5.22, in which many models, devices and draft layers bypass the expert tables."""

from __future__ import annotations

import inspect
from typing import Any

from worker_agent.adapters.compat import refuse

_OLDER = ("0.5.21", "0.5.22")
_MAPPING_DEVICES = ("cuda",)
"""Devices on which the older releases map choices to slots. SGLang calls AMD's GPUs ``cuda`` as well."""
_REMEDY = "Install SGLang 0.5.23"


def refuse_runner(release: str, runner: Any, all_to_all: str) -> None:
    """Refuse devices, all-to-all backends and draft models that work with the agent only in a later release.

    Raises ``UnsupportedEngineError`` before the model is loaded.

    Parameters
    ----------
    release
        SGLang's release.
    runner
        SGLang's ``ModelRunner`` for the target model.
    all_to_all
        ``moe_a2a_backend``.
    """
    if release not in _OLDER:
        return
    refuse(
        [
            (
                runner.device not in _MAPPING_DEVICES,
                f"SGLang {release} on {runner.device}",
                "This release does not map chosen experts to slots on devices other than GPUs",
                _REMEDY,
            ),
            (
                all_to_all == "none",
                f"SGLang {release} without an all-to-all backend",
                "In most models, this release uses expert numbers as slot numbers, instead of reading the tables",
                f"{_REMEDY}, start with --moe-a2a-backend deepep",
            ),
            (
                not runner.spec_algorithm.is_none(),
                f"speculative decoding with SGLang {release}",
                "In this release, layers of the draft model may read the tables of the target model's layers",
                f"{_REMEDY}, start without --speculative-algorithm",
            ),
        ]
    )


def refuse_unmapped_model(release: str, model: Any) -> None:
    """Refuse a model whose code does not look up expert locations, because it would use expert numbers as slot numbers.

    In later releases, ``TopK`` itself looks them up. Raises ``UnsupportedEngineError``.

    Parameters
    ----------
    release
        SGLang's release.
    model
        The loaded model.
    """
    if release not in _OLDER:
        return
    for name, module in model.named_modules():
        routers = [child for child in module.children() if type(child).__name__ in ("TopK", "HashTopK")]
        refuse(
            [
                (
                    bool(routers) and not _looks_up_locations(type(module)),
                    f"{type(module).__name__} ({name}) in SGLang {release}",
                    "Its code passes no expert locations to the router, so experts would not be found after a switch",
                    _REMEDY,
                )
            ]
        )


def _looks_up_locations(layer: type) -> bool:
    """Return True if the layer's computation with DeepEP looks up expert locations."""
    methods = (getattr(layer, name, None) for name in ("forward_deepep", "_forward_deepep"))
    return any(method and "ExpertLocationDispatchInfo" in inspect.getsource(method) for method in methods)
