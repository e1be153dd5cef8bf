"""Commands that install the packages of an extra."""

from __future__ import annotations

import re
import shlex
from importlib import metadata

_OF_EXTRA = re.compile(r"""(?P<requirement>[^;]+);.*\bextra == ["'](?P<extra>[\w-]+)["']""")


def install_command(extra: str, distribution: str = "eplb-service") -> str:
    """Return the ``pip`` command that installs the packages of a distribution's extra.

    The command names the packages and not the distribution, so it also works if the distribution is not on an index.

    Parameters
    ----------
    extra
        Name of the extra, such as ``"ray"``.
    distribution
        Distribution that declares the extra.

    Examples
    --------
    >>> install_command("no-such-extra")
    "install the 'no-such-extra' extra of eplb-service"
    """
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        requirements = []
    packages = [
        match["requirement"].strip()
        for line in requirements
        if (match := _OF_EXTRA.match(line)) and match["extra"] == extra
    ]
    if not packages:
        return f"install the {extra!r} extra of {distribution}"
    return f"pip install {' '.join(map(shlex.quote, packages))}"
