"""A decoder under test: how it is called, with good bytes, and what it may raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Parameters
    ----------
    seeds
        Makes byte strings that are read without an error.
    read
        Reads a byte string; of what it raises only ``clear`` errors, with a message, are no defects.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], object]
    clear: tuple[type[Exception], ...]


def outcome_of(decoder: Decoder, data: bytes) -> str:
    """What was wrong, "" where nothing was; any other error, or one without a message, is a defect.

    So is a warning, but for two of numpy's that a damaged header may draw: a type's old name, which Python hides from
    users, and numbers as Python 2 wrote them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings(
            "ignore", message="Reading `.npy` or `.npz` file required additional header parsing"
        )
        try:
            decoder.read(data)
        except decoder.clear as error:
            if not str(error):
                raise
            return str(error)
    return ""
