"""Stand-ins for the accelerator-only packages that SGLang imports. Every name exists but cannot be called.

The module is installed as ``sitecustomize``, so that all of an engine's processes have them.
"""

from __future__ import annotations

import sys

from stand_ins import Finder, StandIn

_ABSENT = ("sgl_kernel", "torchvision")


class _Name(StandIn):
    """A function, class or namespace that must not be used here."""

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self._name} is not available on this machine")


def _is_absent(name):
    package = name.partition(".")[0]
    return package in _ABSENT and not (package == "torchvision" and _asked_by_transformers())


def _asked_by_transformers():
    """Return True if transformers imports the package.

    transformers uses torchvision if available, but does not need it here.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.utils.import_utils":
            return True
        frame = frame.f_back
    return False


sys.meta_path.append(Finder(_is_absent, _Name, __version__="0.4.10"))
