"""The list of what strangers try, and how an attempt gets into it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tests.attacks.target import Target


@dataclass(frozen=True)
class Attempt:
    """One thing to try, and the promise that it proves; ``run`` fails where it does harm, and returns what came of it.

    ``locked``: against a service that asks for credentials.
    """

    name: str
    proves: str
    locked: bool
    run: Callable[[Target], Awaitable[str]]


ATTEMPTS: list[Attempt] = []


def attempt(name: str, proves: str, *, locked: bool = False) -> Callable[[Any], Any]:
    """Lists what it decorates."""

    def listed(run: Callable[[Target], Awaitable[str]]) -> Callable[[Target], Awaitable[str]]:
        ATTEMPTS.append(Attempt(name, proves, locked, run))
        return run

    return listed


def refused(
    expected: grpc.StatusCode,
    proves: str,
    calls: dict[str, Callable[[Target], Awaitable[Any]]],
    *,
    locked: bool = False,
) -> None:
    """List attempts, each by its name, that must end with a status, and so prove one promise."""
    for name, call in calls.items():

        async def run(target: Target, call: Callable[[Target], Awaitable[Any]] = call) -> str:
            code = await call(target)
            assert code is expected, f"{code}, not {expected}"
            return f"refused: {code.name}"

        ATTEMPTS.append(Attempt(name, proves, locked, run))
