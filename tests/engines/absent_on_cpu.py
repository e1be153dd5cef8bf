"""Packages that SGLang imports and that are only built for accelerators: any name of theirs, until it is called.

Installed as ``sitecustomize``, so that every process of an engine has them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

_ABSENT = ("sgl_kernel", "torchvision")


class _Name:
    """A function, class or namespace that nobody may use here."""

    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self._name} is not there on this machine")


class _Module(types.ModuleType):
    __version__ = "0.4.10"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        package = name.partition(".")[0]
        if package not in _ABSENT or (package == "torchvision" and _asked_by_transformers()):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        """Nothing to run."""


def _asked_by_transformers():
    """It uses torchvision wherever it finds it, and is right to do without it here."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.utils.import_utils":
            return True
        frame = frame.f_back
    return False


sys.meta_path.append(_Absent())
