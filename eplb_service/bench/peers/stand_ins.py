"""Imports one file of a fetched package beside empty stand-ins for the inference engine around it."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Mapping
from typing import Any

from eplb_service.bench.peers.archives import Package


def import_from(package: Package, module: str) -> types.ModuleType:
    """Import ``module`` of a package's folder of balancers by its full name; its parents stay empty."""
    parents = package.folder.strip("/").split("/")
    for depth in range(1, len(parents) + 1):
        name = ".".join(parents[:depth])
        if name not in sys.modules:
            stand_in(name, {"__path__": [str(package.root.joinpath(*parents[:depth]))]})
    return importlib.import_module(f"{'.'.join(parents)}.{module}")


def stand_in(name: str, contents: Mapping[str, Any]) -> None:
    """An otherwise empty module called ``name``, and its parents."""
    parent, _, _ = name.rpartition(".")
    if parent and parent not in sys.modules:
        stand_in(parent, {"__path__": []})
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def quiet_logger() -> logging.Logger:
    """A logger for peers, who log much."""
    logger = logging.getLogger("peers")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
