"""Stand-ins for packages that are only built for accelerators. Every module, and every name in it, exists."""

import importlib.abc
import importlib.machinery
import types


class StandIn:
    """A name that contains further names of the same class."""

    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(f"{self._name}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules whose names are ``absent``.

    The modules contain the values in ``facts``. Any other name is an instance of ``kind``, a ``StandIn`` class.
    """

    def __init__(self, absent, kind, **facts):
        self._absent = absent
        self._kind = kind
        self._facts = facts

    def find_spec(self, name, _path, _target=None):
        if not self._absent(name):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        stand_in = self._kind(spec.name)
        vars(module).update(self._facts, __getattr__=stand_in.__getattr__)
        return module

    def exec_module(self, _module):
        """Do nothing, because the module is already complete."""
